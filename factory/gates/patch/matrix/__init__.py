"""The matrix: tiny training runs of baseline and candidate that together execute every line of the trainer.

``cases`` lists the runs. ``start_checkpoints`` makes their data and checkpoints with approved code. ``runs`` trains them in the sandbox, where
``executed`` records the executed lines. ``compare`` compares the files of both sides, number by number. ``unexecuted_code`` finds the instructions
of the patch that no run executed.
"""
