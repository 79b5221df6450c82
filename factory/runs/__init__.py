"""One way to train a variant of some steps, and to say how far two of them are apart.

An errand (a certificate, a preflight, an audit, a diagnosis, a gate) says what it varies as ``Arm``s; ``Runs`` trains them, each once: in trainers of
live code (``live``) or in the sandbox for code that is not trusted (``sandboxed``). What they left is read as ``Trace``s, and ``distance`` says
how far two are apart. The ledger has a row for each (``factory runs``). Nothing here judges.
"""
