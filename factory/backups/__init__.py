"""Backs up the ledger and MLflow's database, each day and before an upgrade, and upgrades a workspace of an older version."""
