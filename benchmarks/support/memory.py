"""The memory of a process, measured in a fresh one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def printed_by(script: str) -> int:
    """Run Python code in a process of its own; returns the number on its last line."""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def resident(key: str) -> int:
    """VmRSS, or VmHWM (its highest value since ``restart_peak``), of this process in bytes."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def restart_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
