"""Crash tests: each durable effect of a scenario is a place for a kill or a failure.

    preload/            shim.c: counts the effects of all processes; kills at the Nth, tears it, or makes it fail
    shim                builds and arms the shim, reads its log
    server              imports the factory once, forks a child for each run, kills the remaining processes of a dead run
    scenarios           the runs: ingest, segment, anneal and release, approvals, merge and revert, diagnose and rewind, erasing, backups
    starts              the start of each scenario
    state               what two runs must have in common, and what must hold for each run
    power               the disk after a power cut
    campaign            injects a fault, runs again, compares
    mutants             each fsync and rename: a test fails without it

Where a program is started counts as an effect too. A commit of the ledger or of MLflow's store, and what git does, are effects of libc's, and
need no name of their own; MLflow's server over HTTP is in ``tests/factory/show/mlflow/test_outages.py``.

``python -m tests.chaos`` (``make chaos``) does every effect of every scenario, ``--each 1`` every way at every place once; the slow tests do a
few, drawn.
"""
