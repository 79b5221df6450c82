"""The ops of a training step: each a plain reference, its fast implementations, its cost model and its test inputs,
one file an op.

``op`` holds the words (Op, Implementation, Shape, Cost); ``registry`` lists the ops and binds a choice of
implementations
(``policies/kernels.yaml``) to the callables that the model gets handed; ``oracle`` checks an implementation, forward
and
every gradient, against the reference in fp64; ``bench`` times one against another, interleaved.
Needs torch only (triton for the implementations named so).
"""
