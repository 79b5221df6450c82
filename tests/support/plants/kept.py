"""Plants that take seconds of training, made once for a state of the code and kept on disk; a test gets a copy in a fraction of one.

They lie in ``.pytest_cache/plants/<state>/``, where ``state`` is a hash of everything that makes them: the sources, the versions of the
packages, the processor. Whoever wants one that is not there makes it under a lock, aside, and renames it: there is a whole one or none. So two
workers, and the tiers after each other, make each once. The folders of older states go when a new one comes.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path

from tests.support.paths import ROOT

SHELF = ROOT / ".pytest_cache" / "plants"
HOURS = 6  # its rows say when they were made, and what looks at them may ask how long ago that is: an older one is made again
STATES = 3  # kept, the newest: a person goes to and fro between two commits
SOURCES = ("factory", "kernels", "models", "trainer", "agents", "policies", "tests/support")
SETTINGS = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "OMP_NUM_THREADS",
    "FACTORY_BWRAP",
)  # of the environment; they change bits
TEXTS = (
    ".json",
    ".jsonl",
    ".yaml",
)  # files that may name a folder; the ledger stores its places relative to its workspace


STATE = "FACTORY_TESTS_PLANTS"  # of the environment: a name in place of the hash, where the caller knows that what is kept is as good


@functools.cache
def state() -> str:
    """What a plant is made of, as a hash."""
    if given := os.environ.get(STATE):
        return given
    digest = hashlib.sha256()
    for top in SOURCES:
        for path in sorted((ROOT / top).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    versions = sorted(f"{found.name}=={found.version}" for found in distributions())
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "model name"))]
    environment = [os.environ.get(name, "") for name in SETTINGS]
    digest.update(json.dumps([versions, cpu[:2], environment, platform.python_version(), str(ROOT)]).encode())
    return digest.hexdigest()[:16]


def kept(name: object, folder: Path, make: Callable[[Path], None], places: Mapping[str, Path]) -> None:
    """Puts at ``folder``, which is not there, what ``make`` leaves at the folder that it is given.

    ``name`` says what it is, in whatever ``repr`` tells apart. ``places`` are other folders that its texts may name, by a word that stays the
    same: ``{"code": repository}``; a copy names the caller's.
    """
    saved = SHELF / state() / hashlib.sha256(repr(name).encode()).hexdigest()[:16]
    with _alone(saved):
        if saved.exists() and time.time() - saved.stat().st_mtime > HOURS * 3600:
            shutil.rmtree(saved)
        if not saved.exists():
            making = saved.with_suffix(".making")
            shutil.rmtree(making, ignore_errors=True)
            make(making)
            _put(making, {str(at): f"<{word}>" for word, at in {**places, "here": making}.items()})
            named = [str(p) for p in making.rglob("*") if p.is_file() and str(making).encode() in p.read_bytes()]
            assert not named, f"these name the folder in which they were made, and a copy lies elsewhere: {named}"
            os.rename(making, saved)
    shutil.copytree(saved, folder, symlinks=True)
    _put(folder, {f"<{word}>": str(at) for word, at in {**places, "here": folder}.items()})


def _put(folder: Path, instead: Mapping[str, str]) -> None:
    """In all texts below ``folder`` writes one thing for another."""
    for path in folder.rglob("*"):
        if path.suffix in TEXTS and path.is_file() and not path.is_symlink():
            before = after = path.read_text()
            for old, new in instead.items():
                after = after.replace(old, new)
            if after != before:
                stat = path.stat()
                path.write_text(after)
                os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@contextmanager
def _alone(saved: Path) -> Iterator[None]:
    if not saved.parent.exists():
        saved.parent.mkdir(parents=True, exist_ok=True)
        others = sorted((p for p in SHELF.iterdir() if p != saved.parent), key=lambda p: p.stat().st_mtime)
        for old in others[: 1 - STATES]:
            shutil.rmtree(old, ignore_errors=True)
    with open(saved.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
