"""What every op keeps to, and what judges and measures one: no agent may patch it, and it imports nothing that they may.

``op`` holds the words (Op, Implementation, Shape, Cost); ``registry`` binds a choice of implementations
(``policies/kernels.yaml``) to the callables that the model is handed, and runs an op's code only when asked for it;
``oracle`` checks an implementation, forward and every gradient, against the reference in fp64; ``bench`` times one
against another, interleaved; ``tune`` chooses the fastest for this machine, whose class ``machine`` names; ``files`` writes files atomically.
"""
