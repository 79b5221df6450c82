"""Trains one segment. A segment is a function of (code, recipe, data plan, checkpoint), and its result is files. This package knows neither
the ledger nor MLflow.

``segment`` is the loop, ``run`` one step of it, ``batch`` the input of a step. Agents may patch every folder but ``contract/``.
"""
