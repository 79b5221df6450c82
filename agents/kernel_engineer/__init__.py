"""The proposer of faster kernels that is a language model: one target, a falsifiable hypothesis, a patch as edits.

``targets`` picks what to work on by Amdahl's law; ``prompts`` and ``tools`` are all that the model is told and may ask for;
``draft`` turns what it says into a ``Proposal``, or says what is wrong with it; ``role`` is the whole, for ``agents.loop`` to run.
"""
