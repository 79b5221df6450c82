"""The kernel engineer: a language model that proposes faster kernels. A proposal has a target, a hypothesis that can be refuted, and edits.

``targets`` chooses the target by Amdahl's law. ``prompts`` has the model's instructions, and ``tools`` has the tools that it may call.
``draft`` turns the model's answer into a ``Proposal``, or says what is wrong with the answer. ``role`` joins them for ``agents.loop``.
"""
