"""The sandbox by the kernel's namespaces alone, where bubblewrap is missing or fails: ``sandbox_enter`` makes them."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from factory.sandbox import filter as sandbox_filter
from factory.sandbox.view import HOSTNAME, LAUNCHER, LAUNCHER_INSIDE, PASSWD, USER, View

ENTER = Path(__file__).with_name("enter.py")


def command(view: View, status: int, given: Callable[[bytes], int]) -> list[str]:
    """Its command line. It tells ``status`` of its child; ``given`` makes a file that it inherits."""
    column = sandbox_filter.ARCHITECTURES[platform.machine()][0]
    told = {
        **dataclasses.asdict(view),
        "parent": os.getpid(),
        "status": status,
        "filter": given(sandbox_filter.program()),
        "pivot_root": sandbox_filter.CALLS["pivot_root"][column],
        "user": USER,
        "hostname": HOSTNAME,
        "passwd": PASSWD,
        "launcher": (str(LAUNCHER), LAUNCHER_INSIDE),
    }
    return [sys.executable, "-I", "-S", str(ENTER), str(given(json.dumps(told).encode()))]


def refusal() -> str:
    """Why it cannot be used here; empty when it may work: only doing it tells what the kernel allows."""
    known = sandbox_filter.program()
    return "" if known else f"namespaces: no table of system calls for a {platform.machine()} processor"


def version() -> str:
    return f"namespaces of Linux {platform.release()}, without bubblewrap"
