"""Everything that thinks: it is handed evidence through a workbench and hands back edits as data.

``line_profiler`` makes the evidence: where a training step's time goes, by source line; ``search_proposer`` reads
it, asks the
``workbench`` to measure the implementations that the kernel registry holds, and returns a ``proposal``: a
falsifiable hypothesis and edits.
"""
