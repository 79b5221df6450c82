"""The matrix: tiny training runs that together execute every line of the trainer, under baseline and candidate.

``cases`` lists the runs → ``starts`` makes their data and checkpoints with approved code → ``runs`` trains them in the sandbox, where
``record`` notes which lines were executed → ``compare`` holds what both sides left against each other, number by number →
``changed`` finds the instructions of the patch that no run executed.
"""
