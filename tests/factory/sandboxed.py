"""Running a few lines of Python in the sandbox, and looking for what it left behind."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from pathlib import Path

from factory import sandbox
from factory.sandbox import Limits, Result

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
    tmp_path: Path, code: str, *arguments: str, limits: Limits | None = None, readonly: tuple[Path, ...] = ()
) -> Result:
    """Run a few lines of Python in the sandbox; 15 seconds at most unless told."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return sandbox.run(command, output=tmp_path / "out", readonly=readonly, limits=limits or Limits(wall_seconds=15))


def told(tmp_path: Path, code: str, *arguments: str, readonly: tuple[Path, ...] = ()) -> dict[str, tuple[str, object]]:
    """What a hostile script noted with ``tell``: name → ('done', value) or ('refused', errno)."""
    script = f"{TELL}\n{textwrap.dedent(code)}\nprint(json.dumps(said))"
    result = inside(tmp_path, script, *arguments, readonly=readonly)
    assert result.ok, result
    return {name: (how, what) for name, (how, what) in json.loads(result.stdout).items()}


def processes_naming(word: str, patience: float = 3.0) -> list[int]:
    """Processes of the whole machine whose command line holds ``word``, once the kernel has had time to bury the dead."""
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
