"""Measures where a training step's time goes, by source line of ``trainer/`` and ``kernels/``: forward, backward, optimiser, data loading.


``workload`` builds a run of the recipe on random documents; ``session`` runs it; ``capture`` records its operations and
finds their lines; ``stopwatch`` times them; ``isolation`` calls each operation alone, by its ``signature``; ``lines`` sums
them by line; ``graph`` finds what could be fused or overlap; ``table`` is the profile (the schema of ``profile.json``, which
agents read); ``report`` prints it and writes ``profile.html``; ``__main__`` writes it all and ``trace.json``. Run as
``python -m agents.line_profiler --recipe R --kernels K --out DIR``.
"""
