"""Evaluation tasks that a person adds in ``policies/tasks/`` of the workspace: multiple choice, maths, code, and lm-eval's YAML files.

``policy`` says when each task is measured. ``task_file`` reads a task, ``items`` its items, ``lm_eval_file`` a YAML file of lm-eval.
``measuring`` measures a candidate on a task and records the items. ``multiple_choice`` and ``answer_generation`` (with ``verifiers``) run here on
``model``. ``lm_eval_run`` runs lm-eval in the sandbox (``inside``) on the same model. ``tiers`` says which tasks are due, and ``comparing``
compares two candidates item by item.
"""
