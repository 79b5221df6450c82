"""What this machine must have, and bubblewrap, which is installed where that is possible."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from factory.set_up.journal import Journal, size

WITHOUT = "the sandbox makes its namespaces itself where the kernel allows it ('factory doctor' shows whether it does)"


def obstacles(root: Path, bytes_needed: float, makes_venv: bool) -> Iterator[str]:
    """One line for each missing thing that a person has to install."""
    if makes_venv and not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        yield f"{sys.executable} cannot make virtual environments: install python3-venv with your system's package manager"
    if not shutil.which("git"):
        yield "git is needed: install it with your system's package manager"
    if not (shutil.which("g++") or shutil.which("clang++")):
        yield "a C++ compiler is needed (torch.compile uses it): install g++ with your system's package manager"
    free = shutil.disk_usage(root).free
    if free < bytes_needed:
        yield f"about {size(bytes_needed)} of disk are needed, and {root} has {size(free)}: free some space"


def bubblewrap(journal: Journal) -> None:
    """Install bubblewrap where that is possible. Without it the sandbox may still work, so set-up goes on."""
    if shutil.which("bwrap"):
        return
    if os.geteuid() or not shutil.which("apt-get"):
        journal.say(f"bubblewrap is missing: {WITHOUT}, else install it with your system's package manager")
        return
    journal.say("installing bubblewrap (the sandbox for proposed patches)")
    began = time.monotonic()
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    update, install = ["apt-get", "update", "-q"], ["apt-get", "install", "-y", "-q", "bubblewrap"]
    for command in (update, install):
        state = _state(command[1], began)
        if journal.follow([command], state, hear=_heard, environment=environment):
            journal.say(f"bubblewrap could not be installed (see {journal.log.name}): {WITHOUT}")
            return


def _state(word: str, began: float) -> Callable[[], str]:
    return lambda: f"apt-get {word}, {time.monotonic() - began:.0f} s"


def _heard(line: str) -> str:
    """``Need to get 48.3 kB of archives.``"""
    return line if line.startswith("Need to get") else ""
