"""Each side of a swap killed at each stage, with 100 clients at the server: what failed, who answered, how long until all was well.

    python -m benchmarks.serving.kill_table            # some minutes; --only router

The engines are killed by SIGKILL in a server of this process; the router is a ``factory serve`` that kills itself, and is started again at once on
the same port, as a service manager does it. ``tests/factory/serving`` holds that no request fails while the router lives.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

import factory.serving.serve as serving
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from factory.serving.engines import Engine, make_native_engine_kind
from factory.serving.supervisor import EngineSupervisor
from tests.support.paths import ROOT
from tests.support.serving.kills import BEFORE, NEW, OLD, Outcome, kill_in_swap, outcome
from tests.support.serving.load import Load
from tests.support.serving.served import add_release, make_export

ROUTER, CLIENTS = "router", 100
CASES = [
    *((NEW, stage) for stage in (*BEFORE, "flipped")),
    *((OLD, stage) for stage in (*BEFORE, "flipped")),
    *((ROUTER, stage) for stage in (*BEFORE, "flipped", "drained", "stopped")),
]
HEADER = ["killed", "when the new engine is", "failed", "refused", "streams cut", "answers of 1, 2", "silence", "release 2 alone after"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="kill_table", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases with this word")
    parser.add_argument("--serve", nargs=3, metavar=("WORKSPACE", "PORT", "STAGE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve_until(Path(options.serve[0]), int(options.serve[1]), options.serve[2])
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="factory-kills-") as folder:
        exports = [make_export(Path(folder) / str(seed), seed) for seed in (1, 2)]
        for number, (side, stage) in enumerate(CASES):
            if options.only in f"{side} {stage}":
                workspace = Workspace.create(Path(folder) / f"workspace-{number}")
                ledger = Ledger.create(workspace.ledger_url)
                kill = kill_router(workspace, ledger, exports, stage) if side == ROUTER else kill_in_swap(
                    workspace, ledger, exports, side, stage, CLIENTS
                )  # fmt: skip
                print(f"| {' | '.join([side, stage, *row(asyncio.run(kill))])} |", flush=True)
    return None


def row(found: Outcome) -> list[str]:
    refused = sum("ConnectError" in failure for failure in found.failures)
    answers = ", ".join(str(found.answers.get(release, 0)) for release in (1, 2))
    return [
        str(found.failed - refused), str(refused), str(found.cut), answers, f"{found.longest_silence:.1f} s", f"{found.settled:.1f} s",
    ]  # fmt: skip


# -- the router --------------------------------------------------------------------------------------------------------
def serve_until(root: Path, port: int, stage: str) -> None:
    """``factory serve`` that kills itself once release 2's engine has passed ``stage`` (or the old one, after the flip); '-': never."""

    async def kill(now: str, engine: Engine) -> None:
        passes = 1 if stage in ("drained", "stopped") else 2
        if now == stage and engine.champion.release == passes:
            print(f"killed {time.monotonic()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    serving.EngineSupervisor = functools.partial(EngineSupervisor, on_stage=kill)  # type: ignore[misc, assignment]
    serving.serve_champion(
        Workspace.open(root),
        make_native_engine_kind(),
        host="127.0.0.1",
        port=port,
        key="",
        say=lambda line: print(line, flush=True),
    )


async def kill_router(workspace: Workspace, ledger: Ledger, exports: list[Path], stage: str) -> Outcome:
    add_release(workspace, ledger, exports[0])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None, limits=limits) as client:
        with router(workspace, port, stage) as first:
            await asyncio.to_thread(until, first, "elease 1 is served")
            async with Load(client, exports, CLIENTS) as load:
                load.pause = 0.5  # as clients do that ask again
                await load.more(CLIENTS)
                add_release(workspace, ledger, exports[1])
                at = float((await asyncio.to_thread(until, first, "killed")).split()[1])
                answered = len(load.answers)
                first.wait()
                with router(workspace, port, "-") as second:
                    await asyncio.to_thread(until, second, "elease 2 is served")
                    settled = time.monotonic() - at
                    await load.more(2 * CLIENTS)
                    await load.end()  # while it still answers
    return outcome(load, at, answered, settled)


@contextmanager
def router(workspace: Workspace, port: int, stage: str) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "benchmarks.serving.kill_table", "--serve", str(workspace.root), str(port), stage]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until(process: subprocess.Popen[str], words: str) -> str:
    """The line with ``words`` that it prints."""
    assert process.stdout
    for line in process.stdout:
        if words in line:
            return line
    raise RuntimeError(f"it ended with {process.wait()} before it said {words!r}")


if __name__ == "__main__":
    main()
