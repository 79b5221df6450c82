"""Forks a child for each run, so that the factory's modules are imported only once. Each run takes a second or two.

The server runs with the shim. It reads a line of JSON for each run, and answers with one. A run that the shim ends leaves processes that wait
for ever at their next effect. The server finds them by their environment and kills them.
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
    """Return the other processes that run with the shim and this control file."""
    mark = f"LD_SHIM_CONTROL={control}\0".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def kill_marked(control: Path) -> list[str]:
    """Kill these processes and wait for their ends. Returns their command lines."""
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
    """Return process number → status of ended children, and of orphans, since this process reaps them."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def run(request: dict[str, Any], control: Control) -> dict[str, Any]:
    """Fork a child, run the scenario in it, and wait until the child has ended or the shim reports that all processes are dead."""
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
    if not dead:  # its children get time to notice its end
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
    """Run the scenario in the child. Returns 0 or the exit code of a factory's command; 1 with a traceback after a bug."""
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
    """Make this process die with its parent, so that a stopped campaign leaves no run."""
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
