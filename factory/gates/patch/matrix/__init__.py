"""The matrix: tiny training runs of baseline and candidate that together execute every line of the trainer.

``cases`` lists the runs. ``start_checkpoints`` makes their data and start checkpoints with approved code. ``runs`` starts them in the sandbox, and
``train_cases`` trains them there, while ``execution_recorder`` records the executed code. ``compare`` compares the files of both sides, number by
number. ``unexecuted_code`` finds the instructions of the patch that no run executed.
"""
