"""One training run: a segment is a function of (code, recipe, data plan, checkpoint) and leaves files. Knows no ledger, no MLflow."""
