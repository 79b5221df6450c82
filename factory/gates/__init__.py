"""Where it is decided what goes on: gather evidence, judge, record the verdict.

``judge`` is the pure function of a release (``release_policy`` its thresholds, ``release_gate`` gathers and records); ``patch_gate`` does the
same for a patch, ``recipe_gate`` for one that changes what is learnt. Nothing in here can be patched by an agent, and missing
evidence never promotes.
"""
