"""Keeps the champion served. It starts engines, makes one of them current and ends the others. It never changes a running engine.

    started → healthy → verified (the export has the ledger's hash) → parity → warm → flipped; the old engine: drained → stopped

A new engine may fail or be killed at any stage before ``flipped``: the old engine continues to serve, the failure is reported, and the
supervisor tries again after a pause that doubles. The flip is one assignment. At most two tasks run: ``swap`` starts an engine for the
ledger's champion, and ``mend`` replaces an engine that served and ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from factory.core.errors import FactoryError
from factory.serving import parity_fixture
from factory.serving.champion import Champion, ExportWatch
from factory.serving.engines import Engine, EngineError, EngineKind
from factory.serving.metrics import ServerMetrics
from kernels.contract.message import Message

POLL_SECONDS = 1.0  # between two reads of the ledger
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0  # seconds to wait after a failed start
WARM_UP = 8  # requests at the same time
SHORT_LIFE_TIMES = 10  # an engine counts as short-lived if it ends within this many times its start time
NO_ANSWER_SECONDS, NO_ANSWER = (
    60.0,
    50,
)  # an engine hangs if a health request takes this many seconds, and this many times the longest earlier request
StageCallback = Callable[[str, Engine], Awaitable[None]]


class NoEngineServesError(FactoryError):
    """No engine serves. The message has the reason."""


@dataclass
class _Attempt:
    """An attempt to start an engine for one champion."""

    champion: Champion
    task: asyncio.Task[None] | None = None
    failures: int = 0
    next_at: float = 0.0


class EngineSupervisor:
    """Starts, watches and replaces engines. ``run`` runs beside the router, which gets an engine from ``acquire_engine``.

    ``logs``: a folder for the engines' output. ``note``: records (event, release, detail) in the ledger.
    """

    def __init__(
        self,
        kind: EngineKind,
        read: Callable[[], Champion | None],
        say: Callable[[str], None],
        logs: Path,
        note: Callable[[str, int, dict[str, Any]], None] = lambda event, release, detail: None,
        on_stage: StageCallback | None = None,
    ) -> None:
        self.kind, self.metrics = kind, ServerMetrics()
        self._read, self._say, self._note, self._on_stage, self._logs = read, say, note, on_stage, logs
        self.current: Engine | None = None
        self.serving: Champion | None = None  # the champion of the newest current engine
        self.wanted: Champion | None = None  # the champion of the ledger
        self.trouble = ""  # why the newest attempt failed; empty when it succeeded
        self._watch: ExportWatch | None = None  # watches the export of ``serving``
        self._attempts: dict[str, _Attempt] = {}
        self._background: set[asyncio.Task[None]] = set()
        self.engines: list[Engine] = []
        self._changed = asyncio.Condition()
        self._wake = asyncio.Event()
        self._looked = asyncio.Event()  # set after the first look at the ledger
        self._flipped_at = self._seconds_to_start = 0.0
        self._short_lives = 0  # engines in a row that ended soon after they were made current
        self._fixtures: dict[str, dict[str, Any]] = {}
        self._said = ""
        self._slowest_answer = 0.0

    @property
    def export_problem(self) -> str:
        """The problem with the files of the served export; empty if there is none. The engine has already read these files."""
        return self._watch.problem if self._watch else ""

    # -- for the router -------------------------------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def acquire_engine(self) -> AsyncIterator[Engine]:
        """Yield an engine for a request, and do not stop it before the block ends. Waits while an engine starts. Raises: NoEngineServesError."""
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
                none = Message(
                    "serving.nothing_released",
                    "No model is released, so none can be served. Run 'factory status' to see the candidates.",
                )
                raise NoEngineServesError(Message.from_json(self.trouble or none))
            async with self._changed:
                if self.current is None:
                    await self._changed.wait()
        return self.current

    async def is_usable(self, engine: Engine) -> bool:
        """Whether an engine can still be used. If not, it gets no more requests, and another engine is started."""
        sound = await engine.is_usable()
        if not sound and engine is self.current:
            await self._lose(engine)
        return sound

    # -- the loop -------------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Run without end; ``close`` ends the engines."""
        health = asyncio.ensure_future(self._watch_health())
        try:
            while True:
                self._wake.clear()
                await self._look()
                # Not wait_for: in Python 3.11 it loses a cancellation that comes together with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._wake.wait()
        finally:
            health.cancel()

    async def close(self) -> None:
        """End every engine, without waiting for its work."""
        tasks = [attempt.task for attempt in self._attempts.values() if attempt.task] + list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(engine.stop() for engine in list(self.engines)), return_exceptions=True)

    async def _look(self) -> None:
        try:
            self.wanted = await asyncio.to_thread(self._read)
        except FactoryError as error:
            self._tell(
                Message(
                    "serving.ledger_unreadable",
                    "The ledger cannot be read, so the served release stays the same: {error}",
                    error=error,
                )
            )
        if self.current and self.current.ended.done():
            await self.is_usable(self.current)
        if watch := self._watch:
            changed: bool = await asyncio.to_thread(watch.has_new_problem)
            if changed:
                self._say(watch.problem)
        await self._retarget("mend", self.serving if self.current is None else None)
        await self._retarget("swap", self.wanted if self.wanted != self.serving else None)
        self._looked.set()

    async def _retarget(self, name: str, target: Champion | None) -> None:
        """Let the task ``name`` start an engine for ``target``, and end its work for another champion. None: the task has no work."""
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
            self.trouble = Message(
                "serving.not_served",
                "Release {release} is not served: {why}",
                release=attempt.champion.release,
                why=why,
            )
            stays = (
                Message(
                    "serving.still_served", " Release {release} is still served.", release=self.current.champion.release
                )
                if self.current
                else ""
            )
            self._tell(
                Message(
                    "serving.tried_again",
                    "{trouble}.{stays} The server tries again in {seconds:.0f} s.",
                    trouble=self.trouble.rstrip("."),
                    stays=stays,
                    seconds=pause,
                )
            )
            await self._record("serving_failed", attempt.champion.release, {"why": why, "failures": attempt.failures})
        finally:
            attempt.task = None
            async with self._changed:
                self._changed.notify_all()
            self._wake.set()

    # -- one swap -------------------------------------------------------------------------------------------------------
    async def _bring_up(self, champion: Champion, mends: bool) -> None:
        """Start an engine and make it current. With ``mends``, the new engine is discarded if another engine became current meanwhile.

        Raises: FactoryError, httpx.HTTPError, OSError; then nothing has changed.
        """
        stage, engine, began = "started", None, time.monotonic()
        try:
            await asyncio.to_thread(champion.check_export)
            engine = await Engine.start(self.kind, champion, self._logs)
            self.engines.append(engine)
            await self._passed(stage, engine)
            stage = "healthy"
            await engine.wait_until_ready()
            await self._passed(stage, engine)
            stage = "verified"
            watch = ExportWatch(champion)
            await asyncio.to_thread(
                watch.check_export
            )  # the engine read the files that are there now: the judged export
            await self._passed(stage, engine)
            stage = "parity"
            expected = await self._fixture(champion)
            await parity_fixture.check_parity(engine.client, expected, self.kind.tolerance)
            await self._passed(stage, engine)
            stage = "warm"
            await _warm_up(engine, expected)
            await self._passed(stage, engine)
            stage = "flipped"
            if not await engine.is_usable():
                raise EngineError(engine.problem)
        except BaseException as error:
            if isinstance(error, Exception):
                self.metrics.add_to_counter("factory_serve_failures_total", stage=stage)
            if engine:
                self.engines.remove(engine)
                ended = (
                    await engine.wait_for_end()
                    if isinstance(error, (httpx.HTTPError, parity_fixture.ParityError))
                    else ""
                )
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
        """Send every new request to ``engine``. It is one assignment, so no request sees an intermediate state."""
        old, self.current = self.current, engine
        again = self.serving == engine.champion
        self.serving, self.trouble, self._said = engine.champion, "", ""
        self.metrics.add_to_counter("factory_serve_swaps_total", release=engine.champion.release)
        if old:
            self._start(self._retire(old))
        self._start(self._record("serving", engine.champion.release, {"engine": engine.kind.name, "again": again}))

    async def _retire(self, engine: Engine) -> None:
        """Let an engine finish its requests, then stop it. If it ends earlier, its requests are retried or get an error."""
        while engine.in_flight and not engine.ended.done():
            await asyncio.wait([engine.ended], timeout=0.1)
        await self._passed("drained", engine)
        await asyncio.shield(engine.stop())
        self.engines.remove(engine)
        await self._passed("stopped", engine)

    async def _lose(self, engine: Engine) -> None:
        """Replace the current engine, which can no longer be used."""
        self.current = None
        self.trouble = engine.problem
        self.metrics.add_to_counter("factory_serve_engine_ends_total")
        soon = time.monotonic() - self._flipped_at < SHORT_LIFE_TIMES * self._seconds_to_start
        self._short_lives = self._short_lives + 1 if soon else 0
        pause = _pause(self._short_lives - 1)
        self._tell(
            Message(
                "serving.engine_replaced",
                "The engine that answered requests failed: {problem}. The server starts another engine of release "
                "{release}{delay}.",
                problem=engine.problem.rstrip("."),
                release=engine.champion.release,
                delay=f" in {pause:.0f} s" if pause else "",
                seconds=pause,
            )
        )
        if pause and self.serving and "mend" not in self._attempts:
            self._attempts["mend"] = _Attempt(self.serving, next_at=time.monotonic() + pause)
        self._start(self._record("serving_failed", engine.champion.release, {"why": engine.problem}))
        self._start(self._discard(engine))
        await self._retarget("mend", self.serving)  # at once, or after the pause above, because requests wait
        self._wake.set()

    async def _discard(self, engine: Engine) -> None:
        """Stop an engine that gets no more requests. Another engine answers its open requests."""
        await asyncio.shield(engine.stop())
        self.engines.remove(engine)

    async def _fixture(self, champion: Champion) -> dict[str, Any]:
        """The parity fixture of an export. It is made once, in another process. Raises: ParityError."""
        if champion.export_sha256 not in self._fixtures:
            self._fixtures = {
                champion.export_sha256: await parity_fixture.make_parity_fixture_in_process(champion.export)
            }
        return self._fixtures[champion.export_sha256]

    async def _passed(self, stage: str, engine: Engine) -> None:
        if self._on_stage:
            await self._on_stage(stage, engine)
        if stage in ("started", "flipped", "stopped"):
            named = {"release": engine.champion.release, "engine": engine.kind.name}
            self._say(
                Message("serving.starts", "The {engine} engine of release {release} starts.", **named)
                if stage == "started"
                else Message("serving.served", "Release {release} is served by a {engine} engine.", **named)
                if stage == "flipped"
                else Message(
                    "serving.stopped", "Release {release} is no longer served, and its {engine} engine ended.", **named
                )
            )

    async def _watch_health(self) -> None:
        """Notice an engine that ends (at once), is unhealthy, or hangs (by its answers)."""
        while True:
            engine = self.current
            if engine is None:
                await asyncio.sleep(POLL_SECONDS)
                continue
            began = time.monotonic()
            limit = max(NO_ANSWER_SECONDS, NO_ANSWER * self._slowest_answer)
            answer = asyncio.ensure_future(self.is_usable(engine))
            await asyncio.wait([answer, engine.ended], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                self._slowest_answer = max(self._slowest_answer, time.monotonic() - began)
            else:
                answer.cancel()
                if not engine.ended.done() and not engine.problem:
                    engine.problem = Message(
                        "serving.engine_hung",
                        "the engine of release {release} did not answer for {seconds:.0f} s",
                        release=engine.champion.release,
                        seconds=limit,
                    )
                await self.is_usable(engine)
            await asyncio.wait([engine.ended], timeout=POLL_SECONDS)

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _record(self, event: str, release: int, detail: dict[str, Any]) -> None:
        try:
            await asyncio.to_thread(self._note, event, release, detail)
        except Exception as error:  # serving continues, for example when the ledger's disk is full
            self._say(
                Message(
                    "serving.not_recorded",
                    "The ledger could not record the event '{event}' of release {release}: {error}",
                    event=event,
                    release=release,
                    error=error,
                )
            )

    def _tell(self, message: str) -> None:
        """Report a message, but not twice in a row."""
        if message != self._said:
            self._said = message
            self._say(message)


def _pause(failures: int) -> float:
    """The seconds to wait after ``failures`` failures in a row: 0, 1, 2, 4 …"""
    return min(FIRST_PAUSE * 2 ** (failures - 1), LONGEST_PAUSE) if failures > 0 else 0.0


async def _warm_up(engine: Engine, expected: dict[str, Any]) -> None:
    """Send requests of several lengths at the same time, so that no user's request is the first. Raises: ParityError, httpx.HTTPError."""
    prompts = [row["prompt"] for row in expected["greedy"]]
    asks = [
        {"prompt": prompts[n % len(prompts)], "max_tokens": len(expected["greedy"][0]["tokens"])}
        for n in range(WARM_UP)
    ]
    for answer in await asyncio.gather(*(engine.client.post("/v1/completions", json=ask) for ask in asks)):
        if answer.status_code != 200:
            raise parity_fixture.ParityError(
                "serving.warm_up_failed", "The engine answered a warm-up request with status {status}: {text}", status=answer.status_code,
                text=answer.text[:300],
            )  # fmt: skip
