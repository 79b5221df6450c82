"""The patch gate. ``stages`` measures, ``judge`` decides as a pure function of the evidence, ``policy`` has the thresholds.

The stages use: ``source_rules`` reads source. ``changed_ops`` and ``op_answers`` check ops. ``session``, ``timing`` and ``likeness`` compare
training steps. ``held_out`` scores weights. ``driver`` and the trainer run in the sandbox.
"""
