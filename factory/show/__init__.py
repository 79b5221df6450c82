"""What people see, and where they answer: MLflow, pages in ``reports/``, notifications. No decision imports this room.

    catching_up  what of the ledger is not shown yet, as one list; ``catch_up`` shows it
    mlflow/      runs, the registry, traces; and what people say there
    pages/       HTML and facts for people, made from the ledger
    telling/     messages to receivers

Whoever decides records in the ledger, and is done. The daemon catches up after each action and in each pass, a command when it has decided.
What must be live while a segment trains (``mlflow.metrics_follower``) is handed in by whoever starts it.
"""
