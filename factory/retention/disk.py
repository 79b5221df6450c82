"""Measures the free space on the workspace's disk, and records a sample every five minutes."""

from __future__ import annotations

import json
import os
import time
from shutil import disk_usage

from factory.core.untrusted_trainer_files import read_tail
from factory.core.workspace import Workspace

SAMPLES_FILE = "disk.jsonl"  # in logs/
EVERY_SECONDS = 300.0  # between two samples
WINDOW_SECONDS = 6 * 3600.0  # only samples of the last six hours are used to estimate the growth
KEPT_BYTES = 1 << 16
FLOOR_BYTES = 1_000_000_000  # the policy's default


def record_free_space_sample(workspace: Workspace, now: float | None = None) -> None:
    """Append a sample of the free space, unless the last sample is recent. A long file is cut to its newer half."""
    now = time.time() if now is None else now
    path = workspace.logs / SAMPLES_FILE
    last = read_free_space_samples(workspace)[-1:]
    if last and 0 <= now - last[0][0] < EVERY_SECONDS:
        return
    line = json.dumps({"at": now, "free": disk_usage(workspace.root).free}).encode() + b"\n"
    if path.exists() and path.stat().st_size > 2 * KEPT_BYTES:
        aside = path.with_name(f".{SAMPLES_FILE}")
        aside.write_bytes(read_tail(path, KEPT_BYTES).partition(b"\n")[2])
        os.replace(aside, path)
    with open(path, "ab") as file:
        file.write(line if read_tail(path, 1) in (b"", b"\n") else b"\n" + line)  # the last line may be half written


def read_free_space_samples(workspace: Workspace) -> list[tuple[float, int]]:
    """Return the samples (seconds since 1970, free bytes), oldest first."""
    found = []
    for line in read_tail(workspace.logs / SAMPLES_FILE, KEPT_BYTES).split(b"\n"):
        try:
            sample = json.loads(line)
            found.append((float(sample["at"]), int(sample["free"])))
        except (ValueError, KeyError, TypeError):
            continue  # the first line may be cut, the last line may be incomplete
    return found


def estimate_hours_until_floor(samples: list[tuple[float, int]], free: int, floor: int, now: float) -> float | None:
    """Return in how many hours the free space reaches ``floor`` at the recent rate; None if it does not shrink, or if samples are missing.

    >>> estimate_hours_until_floor([(0.0, 100), (3600.0, 90)], free=90, floor=20, now=3600.0)
    7.0
    >>> estimate_hours_until_floor([(0.0, 100), (3600.0, 100)], free=100, floor=20, now=3600.0), estimate_hours_until_floor([], 1, 0, 0.0)
    (None, None)
    """
    recent = [sample for sample in samples if 0 <= now - sample[0] <= WINDOW_SECONDS]
    if not recent or now - recent[0][0] < EVERY_SECONDS:
        return None
    lost = (recent[0][1] - free) / (now - recent[0][0])
    return max(0.0, (free - floor) / lost / 3600) if lost > 0 else None
