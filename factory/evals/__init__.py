"""Evaluates candidates. No patch of an agent can change this code.

``suite`` chooses the held-out documents. ``export_folder`` reads the export as hostile input, and ``reference_model`` runs it. ``tasks`` scores
bits per byte, cloze and chat samples. ``baselines`` fits byte n-gram models on the same training data. ``parity`` checks that trainer, checkpoint
(``export_parity``), evaluator and the programs of ``probes`` see the same model. ``evaluator`` records the evaluation in one transaction.
``statistics`` compares two candidates item by item.
"""
