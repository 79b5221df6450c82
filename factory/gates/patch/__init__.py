"""The patch gate, a stage a file: scope (``factory.git.scope``), static, ops (the oracle), exploits, timing, training, held_out.

``gate`` gathers the evidence, ``judge`` is the pure function of it, ``policy`` its thresholds; ``driver`` and ``session`` run in the sandbox.
"""
