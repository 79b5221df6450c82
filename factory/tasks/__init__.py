"""Evaluation tasks of a person: multiple choice, maths, code, and lm-eval's YAML files, from ``policies/tasks/`` of the workspace.

In order: ``policy`` says when each task is measured → ``task_file`` reads a task (``items`` its items, ``lm_eval_file`` the YAML files of
lm-eval) → ``measuring`` measures one candidate and records the items with those of the held-out suite: ``multiple_choice`` and ``generation``
(with ``verifiers``) run here on ``model``, ``lm_eval_run`` has lm-eval do it in the sandbox (``inside``), with the same model →
``tiers`` says which are due, ``comparing`` compares two candidates item by item and says what could not be compared.
"""
