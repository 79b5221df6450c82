"""One training run: a segment is a function of (code, recipe, data plan, checkpoint) and leaves files. Knows no ledger,
no MLflow.

``segment`` is the loop, ``run`` one step of it, ``batch`` what a step reads. Agents may patch every folder but ``contract/``.
"""
