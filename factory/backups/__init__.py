"""Backups of the ledger and of MLflow's database, daily and before an upgrade; and the upgrade of a workspace of an older version."""
