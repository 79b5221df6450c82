"""Measures the time of a training step by source line of ``trainer/`` and ``kernels/``: forward, backward, optimiser, data loading.

``workload`` builds a run of the recipe on random documents. ``session`` runs it. ``capture`` records its operations and finds their lines.
``stopwatch`` times the operations in the step, and ``isolation`` times each one outside the step, by its ``signature``. ``lines`` sums the
times by line. ``graph`` finds lines that could be fused and branches that could overlap. ``profile_schema`` defines the profile, which is the schema
of ``profile.json`` that agents read. ``report`` prints the profile and renders ``profile.html``. ``__main__`` writes all files. Run it as
``python -m agents.line_profiler --recipe R --kernels K --out DIR``.
"""
