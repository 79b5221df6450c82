"""Where a training step's time goes, by source line of ``trainer/`` and ``kernels/``: forward, backward, optimiser,
data loading.

``workload`` builds a run of the recipe on random documents; ``capture`` times its operations and finds their lines;
``table`` makes the
profile (the JSON that agents read, schema there); ``report`` prints it. Run as ``python -m agents.line_profiler
--recipe R --kernels K --out DIR``.
"""

from agents.line_profiler.table import Profile, ProfiledLine, ProfiledOp, profile

__all__ = ["Profile", "ProfiledLine", "ProfiledOp", "profile"]
