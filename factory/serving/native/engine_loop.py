"""Runs the steps of a ``DecodingBatch`` in a thread. Any thread may submit jobs. Each job has a listener, which gets its tokens.

A fatal error (log-probabilities that are not finite, an error of the device) ends all jobs and makes the engine unhealthy. The engine does not
recover: the supervisor starts another process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from factory.serving.native.batch import ComputedToken, DecodingBatch, DecodingJob
from kernels.contract.message import Message

TokenListener = Callable[
    [ComputedToken | None], None
]  # None: the job ended without another token; ``EngineLoop.problem`` has the reason
MOST_WAITING = 1024
HUNG_SECONDS, HUNG = 60.0, 50
NOT_FINITE = Message(
    "serving.not_finite",
    "The model's log-probabilities are not finite numbers. Its weights, or the memory that holds them, are damaged.",
)


class EngineLoop:
    """Owns the thread. Any thread may call ``submit`` and ``cancel``. The loop's thread calls the listeners, which must not block."""

    def __init__(self, batch: DecodingBatch) -> None:
        self._batch = batch
        self._listeners: dict[int, TokenListener] = {}
        self._added: list[DecodingJob] = []
        self._cancelled: list[int] = []
        self._wake = threading.Condition()
        self._next_key = 0
        self.problem = ""  # why the engine no longer works
        self._began: float | None = None  # start of the current step
        self._slowest = 0.0  # seconds of the slowest step so far
        self.tokens_written = self.prompt_tokens = self.steps = 0
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def submit_job(self, listener: TokenListener, make_job: Callable[[int], DecodingJob]) -> int | None:
        """Add the job ``make(key)``. Returns its key, or None if too many jobs wait or the engine has a ``problem``."""
        with self._wake:
            if self.problem or len(self._added) + self._batch.waiting_jobs >= MOST_WAITING:
                return None
            key = self._next_key = self._next_key + 1
            self._listeners[key] = listener
            self._added.append(make_job(key))
            self._wake.notify()
            return key

    @contextmanager
    def collect_submitted_jobs(self) -> Iterator[None]:
        """In the ``with`` block, collect jobs: one step takes all that were submitted, so that their batches do not depend on timing."""
        with self._wake:
            yield

    def cancel_job(self, key: int) -> None:
        """End a job whose tokens nobody needs. Does nothing if the job has already ended."""
        with self._wake:
            if self._listeners.pop(key, None):
                self._cancelled.append(key)
                self._wake.notify()

    @property
    def health_problem(self) -> str:
        """Return why the engine does not work; '' if it works.

        A step counts as hung when it has taken more than ``HUNG_SECONDS``, and more than ``HUNG`` times as long as the slowest earlier step.
        """
        began = self._began
        taken = time.monotonic() - began if began is not None else 0.0
        hung = self.steps and taken > max(HUNG_SECONDS, HUNG * self._slowest)
        return self.problem or (
            Message(
                "serving.step_hung", "The engine's current step has not ended after {seconds:.0f} s.", seconds=taken
            )
            if hung
            else ""
        )

    @property
    def metric_counts(self) -> dict[str, int]:
        """The numbers for the metrics page."""
        return {
            "running": self._batch.running_jobs,
            "waiting": self._batch.waiting_jobs + len(self._added),
            "steps_total": self.steps,
            "tokens_total": self.tokens_written,
            "prompt_tokens_total": self.prompt_tokens,
        }

    def _run(self) -> None:
        try:
            while not self.problem:
                self._take()
                self._began = time.monotonic()
                tokens = self._batch.run_step()
                self._slowest = max(self._slowest, time.monotonic() - self._began)
                self._began = None
                self.steps += 1
                self._tell(tokens)
        except Exception as error:
            self.problem = Message(
                "serving.engine_failed",
                "The engine failed with {type}: {error}",
                type=type(error).__name__,
                error=error,
            )
        with self._wake:
            listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener(None)

    def _take(self) -> None:
        with self._wake:
            while not (self._added or self._cancelled or self._batch.running_jobs or self._batch.waiting_jobs):
                self._wake.wait()
            added, self._added = self._added, []
            cancelled, self._cancelled = self._cancelled, []
        for job in added:
            self._batch.add_job(job)
            self.prompt_tokens += len(job.prompt)
        for key in cancelled:
            self._batch.cancel_job(key)

    def _tell(self, tokens: list[ComputedToken]) -> None:
        for token in tokens:
            if token.end == "failed":
                self.problem = NOT_FINITE
            with self._wake:
                listener = self._listeners.pop(token.key, None) if token.end else self._listeners.get(token.key)
            if listener:
                self.tokens_written += 1
                listener(token)
