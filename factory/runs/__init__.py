"""Trains variants of the same training steps, and measures the distance between two of them.

A task (a certificate, a preflight, an audit, a diagnosis, a gate) describes its variants as ``Arm``s. ``ArmRunner`` trains each arm once: in trainers
of live code (``live_training``), or in the sandbox for untrusted code (``sandboxed_training``). A ``RunTrace`` reads the files of a run, and
``distance`` compares two runs. The ledger has a row for each run (``factory runs``). Nothing in this folder judges.
"""
