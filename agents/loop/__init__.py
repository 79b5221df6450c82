"""Runs an agent that is a language model, in a loop: aim → think → act → think …, until a proposal passes the quick check.

A ``role`` (the kernel engineer's, the recipe scout's) defines the task, the tools, and the check of a draft. ``graph`` runs the role as a
LangGraph graph; its ``checkpoints`` outlive the process. ``tools`` holds the tools that all roles have. Nothing that the model writes is run
here: edits are text until the workbench's sandbox gets them.
"""
