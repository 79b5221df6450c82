"""Shows the ledger to people: in MLflow, as pages in ``reports/``, and by notifications. Code that decides must not import this folder.

    unshown_items   finds everything in the ledger that is not shown yet; ``show_unshown_items`` shows it
    mlflow/         runs, the model registry and traces; also reads people's approvals there
    pages/          HTML pages and facts for people, made from the ledger
    notifications/  to receivers outside

Code that decides only writes to the ledger. The daemon calls ``show_unshown_items`` after each action and in each pass; a command calls it after a
decision.
Live metrics of a training segment come from ``mlflow.metrics_follower``, which the caller passes to the trainer.
"""
