"""What needs no training: how fast this machine multiplies, how large a set-up is, and how long a shard waits for its verdict."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from factory.core.workspace import Workspace
from factory.demo.summary import JudgedShardTime, list_judged_shard_times
from factory.ledger.reader import LedgerReader
from trainer.contract.plan.rates import measure_matmul_rate

ROOT = Path(__file__).parents[2]
NOT_IN_REQUIREMENTS = ["pip"]  # which a virtual environment brings
BLOCK = 512  # bytes; of ``st_blocks``


def matmul_peaks() -> dict[str, float]:
    """FLOP/s of square products alone, by precision (``trainer.contract.plan.rates``). On a CPU: of all threads, if none had to wait."""
    return {
        name: measure_matmul_rate(torch.device("cpu"), dtype)
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
    }


def on_disk(folder: Path) -> int:
    """Bytes of all files below, by the blocks they take; a file with several names counts once."""
    seen: dict[tuple[int, int], int] = {}
    for where, _, names in os.walk(folder):
        for name in names:
            found = os.lstat(os.path.join(where, name))
            seen[found.st_dev, found.st_ino] = found.st_blocks * BLOCK
    return sum(seen.values())


def closure(wanted: list[str]) -> list[str]:
    """Names of the installed distributions that these requirements need, with what those need."""
    found: dict[str, set[str]] = {}  # name → extras that were followed
    todo = [Requirement(line) for line in wanted]
    while todo:
        requirement = todo.pop()
        name, extras = canonicalize_name(requirement.name), {"", *requirement.extras}
        fresh = extras - found.get(name, set())
        if not fresh:
            continue
        found.setdefault(name, set()).update(fresh)
        for line in importlib.metadata.requires(name) or []:
            inner = Requirement(line)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in fresh):
                todo.append(inner)
    return sorted(found)


def requirements() -> list[str]:
    """What ``make setup`` installs on this machine: pyproject.toml's dependencies, without extras."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    listed = [Requirement(line) for line in project["dependencies"]]
    return [str(one) for one in listed if one.marker is None or one.marker.evaluate()] + NOT_IN_REQUIREMENTS


def setup_bytes() -> int:
    """On disk, of every file that the distributions of ``make setup`` installed. Files that Python compiles later are not among them."""
    files: set[str] = set()
    for name in closure(requirements()):
        for file in importlib.metadata.distribution(name).files or ():
            path = os.path.realpath(str(file.locate()))
            if path.startswith(sys.prefix + os.sep) and os.path.isfile(path):
                files.add(path)
    return sum(os.lstat(path).st_blocks * BLOCK for path in files)


def clone_bytes() -> tuple[int, int] | None:
    """(files, history) on disk of a fresh clone of this commit's branch; None: this is no git checkout."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["git", "clone", "--quiet", "--no-local", "--single-branch", str(ROOT), folder + "/clone"]
        if subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
            return None
        history = on_disk(Path(folder, "clone", ".git"))
        return on_disk(Path(folder, "clone")) - history, history


def last_judged(workspace: Workspace) -> list[JudgedShardTime]:
    """The shards of the newest candidate that was the first for some, from the ledger alone. Raises: WorkspaceError."""
    every = list_judged_shard_times(LedgerReader(workspace))
    return [one for one in every if one.candidate == every[-1].candidate]
