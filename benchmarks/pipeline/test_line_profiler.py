"""The line profiler on the shipped recipes: in bounded time, and its lines add up to the step.

``python -m pytest benchmarks/pipeline/test_line_profiler.py -s``. The sum of the lines against the step that nobody watched, and
their operations against torch.profiler's on the same batch, both in one process. What the stopwatch costs is measured on
another run (``stopwatch.measure_stopwatch_overhead``). Of the tiny recipe's step, 860 operations in 7 ms, it is as much as the step itself, and
torch.profiler's own cost is large too: only the lines are held there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agents.line_profiler.profile_schema import Profile
from agents.line_profiler.report.summary_text import write_profile_summary
from benchmarks.support.best_here import ROOT


@pytest.mark.parametrize(("recipe", "most_seconds"), [("tiny", 60.0), ("demo", 60.0), ("llama-100m", 600.0)])
def test_a_recipe_is_profiled_in_bounded_time_and_adds_up(tmp_path: Path, recipe: str, most_seconds: float) -> None:
    began = time.perf_counter()
    path = ROOT / "policies" / "recipes" / f"{recipe}.yaml"
    command = [sys.executable, "-m", "agents.line_profiler", "--recipe", str(path), "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    seconds = time.perf_counter() - began
    found = Profile.from_mapping(json.loads((tmp_path / "profile.json").read_text()))
    print(f"\n{recipe}: {seconds:.1f} s. {write_profile_summary(found)}")
    assert seconds < most_seconds
    assert 0.9 <= found.coverage <= 1.1
    if recipe != "tiny":
        assert 0.9 <= found.cross_check.ratio <= 1.1
