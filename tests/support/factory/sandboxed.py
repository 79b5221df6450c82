"""Running a few lines of Python in the sandbox, and looking for what it left behind."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from factory.sandbox import sandbox
from factory.sandbox.sandbox import SandboxLimits, SandboxResult

PATIENCE = 300.0  # seconds that only a test which fails takes

# What a hostile script begins with: ``tell(name, function)`` notes whether a door opened, and how not.
TELL = """
import ctypes, json, os, socket, sys
said = {}
def tell(name, function):
    try:
        said[name] = ['done', repr(function())[:200]]
    except OSError as error:
        said[name] = ['refused', error.errno]
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    done = libc.syscall(number, *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if done < 0:
        raise OSError(ctypes.get_errno(), 'refused')
    return done
"""


def inside(
    tmp_path: Path, code: str, *arguments: str, limits: SandboxLimits | None = None, readonly: tuple[Path, ...] = ()
) -> SandboxResult:
    """Run a few lines of Python in the sandbox. What ends by itself may take as long as a busy machine makes it."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return sandbox.run_in_sandbox(
        command, output=tmp_path / "out", readonly=readonly, limits=limits or SandboxLimits(wall_seconds=PATIENCE)
    )


def told(tmp_path: Path, code: str, *arguments: str, readonly: tuple[Path, ...] = ()) -> dict[str, tuple[str, object]]:
    """What a hostile script noted with ``tell``: name → ('done', value) or ('refused', errno)."""
    script = f"{TELL}\n{textwrap.dedent(code)}\nprint(json.dumps(said))"
    result = inside(tmp_path, script, *arguments, readonly=readonly)
    assert result.ok, result
    return {name: (how, what) for name, (how, what) in json.loads(result.stdout).items()}


def timed_out(run: Callable[[SandboxLimits], SandboxResult], began: Callable[[SandboxResult], bool]) -> SandboxResult:
    """``run_in_sandbox`` under a limit that stops it after ``began`` is true of it: a slow machine is given more time to begin."""
    for seconds in (1, 8, 64, PATIENCE):
        result = run(SandboxLimits(wall_seconds=seconds))
        assert result.seconds >= seconds or not result.timed_out, result
        if began(result) or not result.timed_out:
            break
    return result


def processes_naming(word: str, patience: float = PATIENCE) -> list[int]:
    """Processes of the whole machine whose command line holds ``word``, once the kernel has had time to remove those that ended."""
    deadline = time.monotonic() + patience
    while (found := _processes_naming(word)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _processes_naming(word: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            others = entry.name.isdigit() and int(entry.name) != os.getpid()
            if others and word.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found
