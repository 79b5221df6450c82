"""The kernel engineer: a language model that proposes faster kernels. One target, a falsifiable hypothesis, a patch as edits.

``targets`` picks what to work on by Amdahl's law; ``prompts`` and ``tools`` are what the model reads and may ask for;
``draft`` turns its answer into a ``Proposal``, or says what is wrong with it; ``role`` joins them for ``agents.loop``.
"""
