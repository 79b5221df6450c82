"""Trains variants of some steps, and measures how far two of them are apart.

A task (a certificate, a preflight, an audit, a diagnosis, a gate) describes its variants as ``Arm``s. ``Runs`` trains each arm once: in trainers of
live code (``live_training``), or in the sandbox for untrusted code (``sandboxed_training``). A ``Trace`` reads the files of a run, and ``distance``
measures how far
two runs are apart. The ledger has a row for each run (``factory runs``). Nothing in this folder judges.
"""
