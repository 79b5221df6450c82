"""Notifies people outside: turns events of the ledger into notifications and sends them to the receivers in ``policies/notifications.yaml``.

The daemon delivers them in a thread of its own, in the order of the events, each at least once. After each delivery the position is written to
``notified.json``. A receiver that fails gets the same notification again later.
"""
