"""The patch gate. ``stages`` measures. ``judge`` decides, as a pure function of the evidence. ``policy`` has the thresholds.

The other modules help the stages. ``source_rules`` checks the source. ``changed_ops`` and ``op_answers`` check ops. ``timed_session``,
``step_timing`` and ``checkpoint_difference`` compare training steps. ``held_out_scores`` scores weights. ``op_driver`` and the trainer run in the
sandbox.
"""
