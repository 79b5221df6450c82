"""Evaluates candidates, by code that no patch can change.

In order: ``suite`` chooses the held-out documents that every candidate gets → ``export_folder`` reads the export as hostile
input and ``reference_model`` runs it → ``tasks`` score bits per byte, cloze and chat samples; ``baselines`` fit byte n-gram models on the
same training data → ``parity`` asks whether trainer, checkpoint (``export_parity``), evaluator and the programs of ``probes`` see the same model →
``evaluator`` records the evaluation in one transaction. ``statistics`` compares two candidates item by item.
"""
