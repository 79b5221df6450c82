"""The patch gate: ``stages`` measures, ``judge`` is the pure function of the evidence, ``policy`` has its thresholds.

What the stages use: ``source_rules`` reads source; ``changed_ops`` and ``op_answers`` ask about ops; ``training``, with
``session``, ``timing`` and ``likeness``, compares training steps; ``held_out`` scores weights. ``driver`` and the trainer run in the sandbox.
"""
