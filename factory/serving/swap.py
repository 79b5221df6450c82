"""Keeps the champion served: brings up engines, makes one of them current, ends the others. Never in place.

    started → healthy → verified (the export's hash is the ledger's) → parity → warm → flipped; the old engine: drained → stopped

Until ``flipped`` nothing has changed for anybody, so a new engine may fail or be killed at any stage: the old one serves on, the failure is said,
and it is tried again after a pause that doubles. The flip is one assignment. Two tasks at most: ``swap`` brings up what the ledger wants, ``mend``
what was served before and ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from factory.core.errors import FactoryError
from factory.serving import fixture
from factory.serving.champion import Champion, ExportWatch
from factory.serving.engines import Engine, EngineError, EngineKind

POLL_SECONDS = 1.0  # between looks at the ledger
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0  # before a failed engine is tried again
WARM_UP = 8  # requests at once
SOON = 10  # times as long as its start took: an engine that ends within that did not work
NO_ANSWER_SECONDS, NO_ANSWER = (
    60.0,
    50,
)  # a health question unanswered for so long, and so many times the longest yet, is a hung engine
Stage = Callable[[str, Engine], Awaitable[None]]


class Unavailable(FactoryError):
    """No engine serves, and why."""


@dataclass
class _Attempt:
    """At bringing up one champion."""

    champion: Champion
    task: asyncio.Task[None] | None = None
    failures: int = 0
    next_at: float = 0.0


class Supervisor:
    """``run`` it beside the router, which asks ``use`` for an engine. ``logs``: a folder for the engines' output.
    ``note``: (event, release, detail) for the ledger."""

    def __init__(
        self,
        kind: EngineKind,
        read: Callable[[], Champion | None],
        say: Callable[[str], None],
        logs: Path,
        note: Callable[[str, int, dict[str, Any]], None] = lambda event, release, detail: None,
        on_stage: Stage | None = None,
    ) -> None:
        self.kind, self.metrics = kind, Metrics()
        self._read, self._say, self._note, self._on_stage, self._logs = read, say, note, on_stage, logs
        self.current: Engine | None = None
        self.serving: Champion | None = None  # the last that was made current
        self.wanted: Champion | None = None
        self.trouble = ""  # of the newest attempt; empty when it worked
        self._watch: ExportWatch | None = None  # over the export of ``serving``
        self._attempts: dict[str, _Attempt] = {}
        self._background: set[asyncio.Task[None]] = set()
        self.engines: list[Engine] = []
        self._changed = asyncio.Condition()
        self._wake = asyncio.Event()
        self._looked = asyncio.Event()  # at the ledger, once
        self._flipped_at = self._seconds_to_start = 0.0
        self._short_lives = 0  # engines in a row that ended soon after they were made current
        self._fixtures: dict[str, dict[str, Any]] = {}
        self._said = ""
        self._slowest_answer = 0.0

    @property
    def changed_export(self) -> str:
        """What is wrong with the files of what is served, which its engine does not see any more."""
        return self._watch.problem if self._watch else ""

    # -- for the router -------------------------------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def use(self) -> AsyncIterator[Engine]:
        """The engine for a request, which is not stopped before the block ends. Waits while one comes up. Raises: Unavailable."""
        engine = await self._pick()
        engine.in_flight += 1
        try:
            yield engine
        finally:
            engine.in_flight -= 1
            self._wake.set()

    async def _pick(self) -> Engine:
        await self._looked.wait()
        while self.current is None:
            if not any(attempt.task and not attempt.failures for attempt in self._attempts.values()):
                raise Unavailable(self.trouble or "nothing is released yet: 'factory status' shows what is judged")
            async with self._changed:
                if self.current is None:
                    await self._changed.wait()
        return self.current

    async def examine(self, engine: Engine) -> bool:
        """Is it still of use? If not, no further request gets it, and another is brought up."""
        sound = await engine.examine()
        if not sound and engine is self.current:
            await self._lose(engine)
        return sound

    # -- the loop -------------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """For ever; ``close`` ends what it started."""
        health = asyncio.ensure_future(self._watch_health())
        try:
            while True:
                self._wake.clear()
                await self._look()
                with contextlib.suppress(
                    TimeoutError
                ):  # not wait_for: Python 3.11's forgets a cancellation that comes with the event
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._wake.wait()
        finally:
            health.cancel()

    async def close(self) -> None:
        """End every engine, whatever it does."""
        tasks = [attempt.task for attempt in self._attempts.values() if attempt.task] + list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(engine.stop() for engine in list(self.engines)), return_exceptions=True)

    async def _look(self) -> None:
        try:
            self.wanted = await asyncio.to_thread(self._read)
        except FactoryError as error:
            self._tell(f"the ledger cannot be read, so what is served stays: {error}")
        if self.current and self.current.ended.done():
            await self.examine(self.current)
        if watch := self._watch:
            changed: bool = await asyncio.to_thread(watch.look)
            if changed:
                self._say(watch.problem)
        await self._retarget("mend", self.serving if self.current is None else None)
        await self._retarget("swap", self.wanted if self.wanted != self.serving else None)
        self._looked.set()

    async def _retarget(self, name: str, target: Champion | None) -> None:
        """Let the task of that name work on ``target``, and on nothing else."""
        attempt = self._attempts.get(name)
        if attempt and attempt.champion != target:
            del self._attempts[name]
            if attempt.task:
                attempt.task.cancel()
                await asyncio.wait([attempt.task])
            attempt = None
        if target is None:
            return
        if attempt is None:
            attempt = self._attempts[name] = _Attempt(target)
        if attempt.task is None and time.monotonic() >= attempt.next_at:
            attempt.task = asyncio.ensure_future(self._attempt(attempt, mends=name == "mend"))

    async def _attempt(self, attempt: _Attempt, mends: bool) -> None:
        try:
            await self._bring_up(attempt.champion, mends)
        except Exception as error:
            expected = isinstance(error, (FactoryError, httpx.HTTPError, OSError))
            why = (str(error) or type(error).__name__) if expected else f"unexpected {type(error).__name__}: {error}"
            attempt.failures += 1
            pause = _pause(attempt.failures)
            attempt.next_at = time.monotonic() + pause
            self.trouble = f"release {attempt.champion.release} is not served: {why}"
            on = f"; release {self.current.champion.release} serves on" if self.current else ""
            self._tell(f"{self.trouble}{on}; tried again in {pause:.0f} s")
            await self._record("serving_failed", attempt.champion.release, {"why": why, "failures": attempt.failures})
        finally:
            attempt.task = None
            async with self._changed:
                self._changed.notify_all()
            self._wake.set()

    # -- one swap -------------------------------------------------------------------------------------------------------
    async def _bring_up(self, champion: Champion, mends: bool) -> None:
        """From nothing to current; an engine that ``mends`` takes no other's place: a swap was faster.

        Raises: FactoryError, httpx.HTTPError, OSError, and nothing has changed.
        """
        stage, engine, began = "started", None, time.monotonic()
        try:
            await asyncio.to_thread(champion.check)
            engine = await Engine.start(self.kind, champion, self._logs)
            self.engines.append(engine)
            await self._passed(stage, engine)
            stage = "healthy"
            await engine.wait_ready()
            await self._passed(stage, engine)
            stage = "verified"
            watch = ExportWatch(champion)
            await asyncio.to_thread(watch.check)  # what it has read is what is there now, and that is what was judged
            await self._passed(stage, engine)
            stage = "parity"
            expected = await self._fixture(champion)
            await fixture.check(engine.client, expected, self.kind.tolerance)
            await self._passed(stage, engine)
            stage = "warm"
            await _warm_up(engine, expected)
            await self._passed(stage, engine)
            stage = "flipped"
            if not await engine.examine():
                raise EngineError(engine.problem)
        except BaseException as error:
            if isinstance(error, Exception):
                self.metrics.add("factory_serve_failures_total", stage=stage)
            if engine:
                self.engines.remove(engine)
                ended = await engine.end() if isinstance(error, (httpx.HTTPError, fixture.ParityError)) else ""
                await asyncio.shield(engine.stop())
                if ended:
                    raise EngineError(ended) from error
            raise
        if mends and self.current:
            self._start(self._discard(engine))
            return
        self._flipped_at = time.monotonic()
        self._seconds_to_start = self._flipped_at - began
        self._watch = watch
        self._flip(engine)
        await self._passed("flipped", engine)

    def _flip(self, engine: Engine) -> None:
        """From here on every new request goes to ``engine``. One assignment: no request can see half of it."""
        old, self.current = self.current, engine
        again = self.serving == engine.champion
        self.serving, self.trouble, self._said = engine.champion, "", ""
        self.metrics.add("factory_serve_swaps_total", release=engine.champion.release)
        if old:
            self._start(self._retire(old))
        self._start(self._record("serving", engine.champion.release, {"engine": engine.kind.name, "again": again}))

    async def _retire(self, engine: Engine) -> None:
        """Let an engine finish what it works on, then stop it. If it ends before, its requests are asked again or told so."""
        while engine.in_flight and not engine.ended.done():
            await asyncio.wait([engine.ended], timeout=0.1)
        await self._passed("drained", engine)
        await asyncio.shield(engine.stop())
        self.engines.remove(engine)
        await self._passed("stopped", engine)

    async def _lose(self, engine: Engine) -> None:
        """The current engine is of no use any more."""
        self.current = None
        self.trouble = engine.problem
        self.metrics.add("factory_serve_engine_ends_total")
        soon = time.monotonic() - self._flipped_at < SOON * self._seconds_to_start
        self._short_lives = self._short_lives + 1 if soon else 0
        pause = _pause(self._short_lives - 1)
        after = f" in {pause:.0f} s" if pause else ""
        self._tell(f"{engine.problem}; another engine of release {engine.champion.release} is started{after}")
        if pause and self.serving and "mend" not in self._attempts:
            self._attempts["mend"] = _Attempt(self.serving, next_at=time.monotonic() + pause)
        self._start(self._record("serving_failed", engine.champion.release, {"why": engine.problem}))
        self._start(self._discard(engine))
        await self._retarget("mend", self.serving)  # at once, as requests wait for it, unless engine after engine ends
        self._wake.set()

    async def _discard(self, engine: Engine) -> None:
        """Stop an engine that no request gets any more; what it works on is asked of another."""
        await asyncio.shield(engine.stop())
        self.engines.remove(engine)

    async def _fixture(self, champion: Champion) -> dict[str, Any]:
        """What the judge's side says of an export, made once in a process of its own. Raises: ParityError."""
        if champion.export_sha256 not in self._fixtures:
            self._fixtures = {champion.export_sha256: await fixture.made(champion.export)}
        return self._fixtures[champion.export_sha256]

    async def _passed(self, stage: str, engine: Engine) -> None:
        if self._on_stage:
            await self._on_stage(stage, engine)
        if stage in ("started", "flipped", "stopped"):
            words = {
                "started": "comes up",
                "flipped": "is served",
                "stopped": "is not served any more, its engine has ended",
            }
            self._say(f"release {engine.champion.release} {words[stage]} ({engine.kind.name})")

    async def _watch_health(self) -> None:
        """An engine that ends is noticed at once, one that is unhealthy or hangs by its answers."""
        while True:
            engine = self.current
            if engine is None:
                await asyncio.sleep(POLL_SECONDS)
                continue
            began = time.monotonic()
            limit = max(NO_ANSWER_SECONDS, NO_ANSWER * self._slowest_answer)
            answer = asyncio.ensure_future(self.examine(engine))
            await asyncio.wait([answer, engine.ended], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                self._slowest_answer = max(self._slowest_answer, time.monotonic() - began)
            else:
                answer.cancel()
                if not engine.ended.done() and not engine.problem:
                    engine.problem = f"the engine of release {engine.champion.release} did not answer for {limit:.0f} s"
                await self.examine(engine)
            await asyncio.wait([engine.ended], timeout=POLL_SECONDS)

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _record(self, event: str, release: int, detail: dict[str, Any]) -> None:
        try:
            await asyncio.to_thread(self._note, event, release, detail)
        except Exception as error:  # serving goes on when the ledger's disk is full
            self._say(f"the ledger did not take '{event}' of release {release}: {error}")

    def _tell(self, words: str) -> None:
        """Say it once."""
        if words != self._said:
            self._said = words
            self._say(words)


def _pause(failures: int) -> float:
    """Seconds to wait after so many failures in a row: 0, 1, 2, 4 …"""
    return min(FIRST_PAUSE * 2 ** (failures - 1), LONGEST_PAUSE) if failures > 0 else 0.0


async def _warm_up(engine: Engine, expected: dict[str, Any]) -> None:
    """Requests of several lengths at once, so that no user's is the first. Raises: ParityError, httpx.HTTPError."""
    prompts = [row["prompt"] for row in expected["greedy"]]
    asks = [
        {"prompt": prompts[n % len(prompts)], "max_tokens": len(expected["greedy"][0]["tokens"])}
        for n in range(WARM_UP)
    ]
    for answer in await asyncio.gather(*(engine.client.post("/v1/completions", json=ask) for ask in asks)):
        if answer.status_code != 200:
            raise fixture.ParityError(f"the warm-up was answered by {answer.status_code}: {answer.text[:300]}")


HELP = {  # of /metrics
    "factory_serve_requests_total": ("counter", "Requests answered, by status."),
    "factory_serve_request_seconds_sum": ("counter", "Seconds from a request to the last byte of its answer, summed."),
    "factory_serve_request_seconds_count": ("counter", "Requests in that sum."),
    "factory_serve_retries_total": (
        "counter",
        "Requests given to another engine because theirs ended before a byte was sent.",
    ),
    "factory_serve_broken_streams_total": ("counter", "Streams that ended with an error because their engine ended."),
    "factory_serve_engine_ends_total": ("counter", "Engines that ended or became unhealthy while they served."),
    "factory_serve_swaps_total": ("counter", "Engines made current, by release."),
    "factory_serve_failures_total": ("counter", "Engines that could not be made current, by stage."),
    "factory_serve_in_flight": ("gauge", "Requests that are being answered, by release."),
    "factory_serve_release": ("gauge", "The release that new requests go to; 0: none."),
    "factory_serve_export_changed": ("gauge", "1: the files of what is served are not what was released."),
    "factory_serve_champion": ("gauge", "The release that the ledger wants served; 0: none."),
}


class Metrics:
    """Counters as Prometheus reads them (text format 0.0.4)."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, amount: float = 1, **labels: object) -> None:
        """Add to a counter of ``HELP``."""
        assert name in HELP, name
        self._counts[name, _labels(labels)] += amount  # type: ignore[assignment]

    def text(self, gauges: list[tuple[str, dict[str, object], float]]) -> str:
        """All counters, and ``gauges`` (name, labels, value) as they are now."""
        values = {**self._counts, **{(name, _labels(labels)): value for name, labels, value in gauges}}
        lines = []
        for name, (kind, words) in HELP.items():
            lines += [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
            found = [f"{name}{labels} {value:g}" for (other, labels), value in sorted(values.items()) if other == name]
            lines += found or ([f"{name} 0"] if kind == "counter" else [])
        return "\n".join(lines) + "\n"


def _labels(labels: dict[str, object]) -> str:
    inner = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{{{inner}}}" if inner else ""
