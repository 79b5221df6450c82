"""The stages of the patch gate (DESIGN §5). Each stage is a file with the stage's name. ``gate`` has their order."""
