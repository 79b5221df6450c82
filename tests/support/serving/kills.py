"""One kill in the midst of a swap from release 1 to release 2, with clients at it, and what came of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from factory.serving.engines import Engine
from tests.support.serving.load import AT_ONCE, Load
from tests.support.serving.served import Serving, add_release, serving

NEW, OLD = "new engine", "old engine"
BEFORE = ("started", "healthy", "verified", "parity", "warm")  # the flip


@dataclass(frozen=True)
class Outcome:
    """``answers``: after the kill, by release. Seconds from the kill on."""

    failed: int
    cut: int  # streams that had begun, and ended with an error event
    answers: dict[int, int]
    longest_silence: float  # in which no client got an answer
    settled: float  # until release 2 is served, and no other engine is left
    failures: list[str]


async def kill_in_swap(
    workspace: Workspace,
    ledger: Ledger,
    exports: list[Path],
    side: str,
    stage: str,
    clients: int = AT_ONCE,
    calm: bool = False,
) -> Outcome:
    """Add release 1, serve it, add release 2; kill the engine of a side as soon as release 2's has passed ``stage``.

    ``calm``: until then few clients ask, then all.
    """
    add_release(workspace, ledger, exports[0])
    at: list[float] = []
    answered: list[int] = []

    async with serving(workspace, ledger, on_stage=lambda now, engine: kill(now, engine)) as served:

        async def kill(now: str, engine: Engine) -> None:
            if now == stage and engine.champion.release == 2 and not at:
                if calm:
                    load.hurry()
                    await load.more(clients)
                victim = engine if side == NEW else _engine_of(served, 1)
                answered.append(len(load.answers))
                at.append(time.monotonic())
                os.kill(victim.process.pid, signal.SIGKILL)

        await served.until(1)
        async with Load(served.client, exports, clients) as load:
            await load.more(clients)
            if calm:
                load.calm()
            add_release(workspace, ledger, exports[1])
            await _until(lambda: bool(at))
            await served.until(2)
            settled = time.monotonic() - at[0]
            await load.more(2 * clients)
            assert load.answers[-1] == 2
    return outcome(load, at[0], answered[0], settled)


def outcome(load: Load, at: float, answered: int, settled: float) -> Outcome:
    """Of a kill ``at`` a time, when so many were ``answered``."""
    moments = [at, *load.moments[answered:]]
    silence = max(b - a for a, b in zip(moments, moments[1:]))
    after = load.answers[answered:]
    by_release = {number: after.count(number) for number in sorted(set(after))}
    return Outcome(len(load.failures), load.cut, by_release, silence, settled, load.failures)


def _engine_of(served: Serving, release: int) -> Engine:
    (found,) = (engine for engine in served.supervisor.engines if engine.champion.release == release)
    return found


async def _until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.02)
