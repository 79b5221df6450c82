"""The sandbox by the kernel's namespaces, where bubblewrap is missing or fails: ``enter`` makes them."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from factory.sandbox import filter as sandbox_filter
from factory.sandbox.view import ETC, HOSTNAME, LAUNCHER, LAUNCHER_INSIDE, USER, View

ENTER = Path(__file__).with_name("enter.py")


def command(view: View, status: int, given: Callable[[bytes], int], held: int | None = None) -> list[str]:
    """The command line of ``enter``. It reports on ``status``, keeps ``held`` open while the sandbox is there, and inherits the files that
    ``given`` makes."""
    column = sandbox_filter.ARCHITECTURES[platform.machine()][0]
    spec = {
        **dataclasses.asdict(view),
        "parent": os.getpid(),
        "status": status,
        "filter": given(sandbox_filter.program()),
        "pivot_root": sandbox_filter.CALLS["pivot_root"][column],
        "user": USER,
        "hostname": HOSTNAME,
        "etc": ETC,
        "held": held,
        "launcher": (str(LAUNCHER), LAUNCHER_INSIDE),
    }
    return [sys.executable, "-I", "-S", str(ENTER), str(given(json.dumps(spec).encode()))]


def refusal() -> str:
    """Why namespaces cannot be used here; '': they may work, which only trying shows."""
    known = sandbox_filter.program()
    return "" if known else f"namespaces: no table of system calls for a {platform.machine()} processor"


def version() -> str:
    return f"namespaces of Linux {platform.release()}, without bubblewrap"
