"""Tells people outside what happened: events of the ledger → messages → a webhook, a command (``policies/notifications.yaml``).

The daemon delivers in a thread of its own, in the order of the events, each at least once: the position of what was delivered is written to
``notified.json`` after each delivery, and a receiver that fails is asked again later, with the same message.
"""
