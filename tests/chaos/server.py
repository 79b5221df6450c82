"""Forks a child for each run: all that a factory imports is imported once, and not in the second or two that each run lasts.

Preloaded with the shim, it reads a line of JSON for each run and answers with one. A run that the shim ends leaves processes that wait
for ever at their next effect; they are known by their environment, and killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.chaos.shim import Control

POLL_SECONDS = 0.005


def marked(control: Path) -> list[int]:
    """Processes that run with the shim on that control file, without this one."""
    mark = f"LD_SHIM_CONTROL={control}\0".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def kill_marked(control: Path) -> list[str]:
    """Kill them, and wait until they are gone; returns their command lines."""
    killed: dict[int, str] = {}
    while left := marked(control):
        for process in left:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    killed.setdefault(process, words[:200])
                os.kill(process, signal.SIGKILL)
        reap()
        time.sleep(POLL_SECONDS)
    return list(killed.values())


def reap() -> dict[int, int]:
    """Children (and orphans: this process is their reaper) that ended: process number → status."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def run(request: dict[str, Any], control: Control) -> dict[str, Any]:
    """Fork, run, wait: until the child has ended, or the shim says that all are dead."""
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setsid()
        die_with_parent()
        out = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os._exit(outcome(request))
    status: int | None = None
    while status is None and not control.dead:
        status = reap().get(child)
        time.sleep(POLL_SECONDS)
    dead = control.dead
    if not dead:  # what it started gets the time to notice that it ended
        deadline = time.monotonic() + request.get("patience", 0)
        while marked(control.path) and time.monotonic() < deadline and not control.dead:
            reap()
            time.sleep(POLL_SECONDS)
    seconds = time.monotonic() - began
    left = kill_marked(control.path)
    reap()
    code = None if dead or status is None else os.waitstatus_to_exitcode(status)
    return {"dead": dead, "code": code, "left": [] if dead else left, "seconds": seconds}


def outcome(request: dict[str, Any]) -> int:
    """In the child: 0, or as the factory's own commands end; 1 with a traceback is a fault of ours."""
    from tests.chaos import scenarios

    try:
        scenarios.drive(request["scenario"], Path(request["site"]))
        return 0
    except SystemExit as end:
        return int(end.code or 0) if isinstance(end.code, int | None) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def die_with_parent() -> None:
    """A campaign that is stopped leaves no run that goes on by itself."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    control = Control.__new__(Control)
    control.path = Path(os.environ["LD_SHIM_CONTROL"])
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    die_with_parent()
    from tests.chaos import scenarios

    scenarios.preload()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line), control)), flush=True)


if __name__ == "__main__":
    main()
