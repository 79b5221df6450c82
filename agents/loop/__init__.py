"""The loop of every agent that is a language model: aim → think → act → think …, until a proposal passes its quick check.

A ``role`` (the kernel engineer's, the recipe scout's) says what there is to do, which tools there are, and what is wrong with a draft;
``graph`` runs it as a LangGraph graph whose ``checkpoints`` outlive the process; ``tools`` are what roles have in
common. Nothing from the model is run here: edits are text until the workbench's sandbox has them.
"""
