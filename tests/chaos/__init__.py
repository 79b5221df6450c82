"""Crash proof: every durable effect of a scenario is a place to be killed at, or to fail.

    preload/            shim.c: counts effects of all processes, and makes the Nth the last, a torn one, or an error
    shim                builds it, arms it, reads its log
    server              has imported everything; forks a child for each run, and kills what is left of one that died
    scenarios           what is run: ingest, a segment, anneal and release, approvals, merge and revert, diagnose and rewind, erasing, backups
    starts              what each begins with
    state               what two runs must have in common, and what must hold of each
    power               what is left on the disk when the power is cut
    campaign            inject, run again, compare; the table
    mutants             every fsync and rename: without it, the suite is red

Where a program is started counts as an effect too. A commit of the ledger or of MLflow's store, and what git does, are effects of libc's, and
need no name of their own; MLflow's server over HTTP is in ``tests/factory/show/mlflow/test_outages.py``.

``python -m tests.chaos`` (``make chaos``) does every effect of every scenario, ``--each 1`` every way at every place once; the slow tests do a
few, drawn.
"""
