"""The proposer that is a language model: one target, a falsifiable hypothesis, a patch as edits, repaired until its quick check passes.

``targets`` picks what to work on by Amdahl's law; ``prompts`` and ``tools`` are all that the model is told and may ask for;
``draft`` turns what it says into a ``Proposal``, or says what is wrong with it; ``graph`` is the loop, a LangGraph graph whose
checkpoints outlive the process. Nothing that the model says is run here: edits are text until the workbench's sandbox has them.
"""
