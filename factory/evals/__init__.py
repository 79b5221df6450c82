"""What a candidate is worth, measured by code that no patch can reach.

How a candidate walks through: ``suite`` chooses the held-out documents that every candidate gets → ``export_folder`` reads the export as hostile
input and ``reference_model`` runs it → ``tasks`` score bits per byte, cloze and chat samples; ``baselines`` fit byte n-gram models on the
same training data → ``parity`` asks whether trainer, evaluator and server (``server_probe``, its own process) see the same model →
``evaluator`` writes it all down in one transaction. ``statistics`` compares two candidates item by item.
"""
