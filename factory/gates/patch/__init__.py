"""The patch gate. ``stages`` measures, ``judge`` decides as a pure function of the evidence, ``policy`` has the thresholds.

The stages use: ``source_rules`` reads source. ``changed_ops`` and ``op_answers`` check ops. ``timed_session``, ``step_timing`` and
``checkpoint_difference`` compare
training steps. ``held_out_scores`` scores weights. ``op_driver`` and the trainer run in the sandbox.
"""
