"""The line profiler on the demo recipe: under a minute, and its lines add up to the step.

``python -m pytest benchmarks/test_line_profiler.py -s``. The sum of the lines against the step that nobody watched, and
their operations against torch.profiler's on the same batch, both in one process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from agents.line_profiler import Profile
from agents.line_profiler.words import summary

ROOT = Path(__file__).parents[1]
MOST_SECONDS = 60.0


def test_demo_is_profiled_within_a_minute_and_adds_up(tmp_path: Path) -> None:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "agents.line_profiler", "--out", str(tmp_path)], cwd=ROOT, check=True)
    seconds = time.perf_counter() - began
    found = Profile.from_mapping(json.loads((tmp_path / "profile.json").read_text()))
    print(f"\n{seconds:.1f} s. {summary(found)}")
    assert seconds < MOST_SECONDS
    assert 0.9 <= found.coverage <= 1.1
    assert 0.9 <= found.cross_check.ratio <= 1.1
