"""The patch gate (DESIGN §5): a stage a file, named as the stage; ``gate`` has their order, and decides."""
