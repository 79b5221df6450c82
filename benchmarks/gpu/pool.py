"""Outside of a part's processes: hands items to workers, takes their records, and ends what crashes, hangs or is out of time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.parts import Item, Part, Settings
from benchmarks.support.waits import is_ours

ROOT = Path(__file__).resolve().parents[2]
START_S = 90.0  # to import torch and to reach the device
STACK_S = 1.0  # that a process has to say where it is, before it is killed
GRACE = 1.5  # an item is told its seconds and stops by itself; what takes this many times as long hangs
GRACE_S = 10.0  # and so many seconds more
TOLD = 0.8  # of what an item may take at most, that it is told
SHARES = 2.5  # of its fair share that an item may take: most take less
Take = Callable[[dict[str, Any]], None]


class Worker:
    """A process of a part, alone in its session so that what it starts ends with it."""

    def __init__(self, part: Part, settings: Settings, environment: Mapping[str, str], log: IO[bytes]) -> None:
        read, write = os.pipe()
        self._stack = tempfile.TemporaryFile()  # noqa: SIM115 (closed by ``end``): where SIGUSR1 has it write what it does
        self.began = time.monotonic()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.worker", part.name, str(write), str(self._stack.fileno())],
                cwd=ROOT,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[write, self._stack.fileno()],
                start_new_session=True,
            )
        finally:
            os.close(write)
        self.out = os.fdopen(read, "rb", 0)
        self.ready = False  # it has named its items
        self.item: Item | None = None
        self.at = ""  # of the item, what it said last that it begins
        self.ours = False  # is that a kernel of this repository's?
        self.ends = self.began + START_S
        self._rest = b""
        self.ask(settings.to_json())

    def ask(self, what: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its own pipe says so next
            self.process.stdin.write(json.dumps(what).encode() + b"\n")
            self.process.stdin.flush()

    def give(self, item: Item, seconds: float, most: float) -> None:
        """``seconds`` is what it is told; after ``most`` it is killed."""
        self.item, self.began, self.at, self.ours = item, time.monotonic(), "", False
        self.ends = self.began + most
        self.ask({"item": item.name, "seconds": seconds})

    def read(self) -> list[dict[str, Any]] | None:
        """The messages that came; None: it has ended."""
        data = self.out.read(1 << 16)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def ask_where(self) -> None:
        """It writes its stacks; before it is ready the signal ends it, which is what comes next anyway."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)

    def where(self) -> str:
        """After ``ask_where``: the innermost line of this repository that its main thread is at, or of any file; '': it does not say."""
        deadline = time.monotonic() + STACK_S
        stack, whole = b"", False  # has it stopped writing?
        while not whole and time.monotonic() < deadline and self.process.poll() is None:
            time.sleep(0.05)
            before, stack = stack, os.pread(self._stack.fileno(), 1 << 16, 0)
            whole = bool(stack) and stack == before
        main = stack.decode(errors="replace").strip().split("\n\n")[-1]  # faulthandler has the newest thread first
        frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', main)
        own = [frame for frame in frames if is_ours(Path(frame[0]))] or frames
        if not own:
            return ""
        name, line, function = own[0]
        return f"{Path(name).relative_to(ROOT) if is_ours(Path(name)) else name}:{line} {function}"

    def end(self) -> int:
        """Kill it and its children; its exit code, or −n of signal n."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.out.close()
        self._stack.close()
        return code


def seconds_for(left: float, weight: float, others: float, workers: int) -> tuple[float, float]:
    """(seconds that an item is told, seconds after which it is killed), of a part that has ``left``: so that one that hangs leaves the
    others half of their shares.

    >>> seconds_for(100.0, 1.0, 9.0, 1), seconds_for(100.0, 1.0, 0.0, 4)
    ((25.0, 47.5), (80.0, 100.0))
    """
    left = max(0.0, left)
    fair = left * workers / (weight + others)
    most = max(0.0, min(left, left - fair * others / 2 / workers))
    told = min(SHARES * fair * weight, TOLD * most)
    return told, min(most, GRACE * told + GRACE_S)


@dataclass
class Outcome:
    """Of a part: 'done', 'timed out' (some items were not reached), 'failed' or 'not run' (none of its items was done) with ``why``, or 'cut'
    by a signal."""

    state: str
    why: str = ""


class Pool:
    """Runs one part. ``stopped()`` is asked all the time: a signal ends the part."""

    def __init__(
        self,
        part: Part,
        settings: Settings,
        environment: Mapping[str, str],
        log: IO[bytes],
        take: Take,
        stopped: Callable[[], bool],
    ) -> None:
        self.part, self.settings, self.environment, self.log = part, settings, environment, log
        self.take, self.stopped = take, stopped
        self.waiting: deque[Item] | None = None  # None: no worker has named them yet
        self.workers: list[Worker] = []
        self.states: dict[str, str] = {}  # of the items that ended
        self.selector = selectors.DefaultSelector()

    def run(self, seconds: float) -> Outcome:
        deadline = time.monotonic() + seconds
        try:
            for _ in range(self.part.workers):  # at once: each imports torch for some seconds
                self._start()
            while True:
                if self.stopped():
                    return Outcome("cut")
                outcome = self._fill(deadline)
                if outcome is not None:
                    return outcome
                if time.monotonic() >= deadline:
                    return self._out_of_time()
                self._listen(deadline)
        finally:
            for worker in self.workers:
                self._kill_and_wait(worker)
            self.selector.close()

    def _start(self) -> Worker:
        worker = Worker(self.part, self.settings, self.environment, self.log)
        self.workers.append(worker)
        self.selector.register(worker.out, selectors.EVENT_READ, worker)
        return worker

    def _kill_and_wait(self, worker: Worker) -> int:
        self.selector.unregister(worker.out)
        return worker.end()

    def _drop(self, worker: Worker) -> int:
        self.workers.remove(worker)
        return self._kill_and_wait(worker)

    def _fill(self, deadline: float) -> Outcome | None:
        """Give items to idle workers, and start workers; an outcome where nothing is left to do."""
        if self.waiting is None:
            return None if self.workers else Outcome("not run", self._unstarted)
        busy = [worker for worker in self.workers if worker.item is not None]
        if not self.waiting and not busy:
            return self._all_ended()
        while self.waiting and len(self.workers) < min(self.part.workers, len(self.waiting) + len(busy)):
            self._start()
        for worker in self.workers:
            if worker.ready and worker.item is None and self.waiting:
                item = self.waiting.popleft()
                others = sum(other.weight for other in self.waiting)
                worker.give(item, *seconds_for(deadline - time.monotonic(), item.weight, others, self.part.workers))
        return None

    def _all_ended(self) -> Outcome:
        states = {state: list(self.states.values()).count(state) for state in self.states.values()}
        if not states or "done" in states:
            return Outcome("done")
        why = "none of its items was done: " + ", ".join(f"{count} {state}" for state, count in states.items())
        return Outcome("not run" if set(states) == {"not run"} else "failed", why)

    def _listen(self, deadline: float) -> None:
        ends = min([deadline, *(worker.ends for worker in self.workers if worker.item or not worker.ready)])
        wait = max(0.0, min(0.5, ends - time.monotonic()))
        for key, _ in self.selector.select(wait):
            self._hear(key.data)
        now = time.monotonic()
        late = [w for w in self.workers if now > w.ends and (w.item is not None or not w.ready)]
        for worker in late:
            worker.ask_where()
        for worker in late:
            where = worker.where()
            self._drop(worker)
            if worker.item is None:
                self._unstarted = f"its process did not start within {START_S:.0f} s" + f", at {where}" * bool(where)
            else:
                why = f"hangs, or compiles for too long: killed after {now - worker.began:.0f} s"
                self._lost(worker, "hung", why + f", at {where}" * bool(where), at_limit=True)

    def _hear(self, worker: Worker) -> None:
        messages = worker.read()
        if messages is None:
            code = self._drop(worker)
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            if worker.item is not None:
                self._lost(worker, "crashed", f"its process ended with {how}; the log has its last words")
            elif self.waiting is None:
                self._unstarted = (
                    self._unstarted or f"its process ended with {how} before it began; the log has its last words"
                )
            return
        for message in messages:
            kind = message["kind"]
            if kind == "items":
                worker.ready = True
                if self.waiting is None:
                    names = [item["name"] for item in message["items"]]
                    self.take({"kind": "items", "part": self.part.name, "names": names})
                    self.waiting = deque(Item(**item) for item in message["items"])
            elif kind == "cannot":
                self._unstarted = message["why"]
            elif kind == "poisoned":
                self._lost(worker, "crashed", f"the device failed: {message['why']}")
                self._drop(worker)  # at once: it must not be given another item on its way out
                return
            elif kind == "at":
                worker.at, worker.ours = message["what"], message["ours"]
            else:
                self.take(message)
                if kind == "ended":
                    self.states[message["item"]] = message["state"]
                    worker.item = None
                    if self.part.fresh and not self.settings.dry:
                        self._drop(worker)
                        return

    def _lost(self, worker: Worker, state: str, why: str, at_limit: bool = False) -> None:
        """An item that will not end: by name, and the next one starts in a new process. ``at_limit``: it had all of its own time."""
        assert worker.item is not None
        why += f" (in: {worker.at})" if worker.at else ""
        about = {"part": self.part.name, "item": worker.item.name}
        if self.part.name == "right" and state == "crashed":
            self.take({"kind": "wrong", **about, "what": worker.item.name, "why": why})
        if self.part.name == "fast" and state == "crashed" and worker.ours:
            name, _, width = worker.at.partition(" at ")
            op, _, by = name.partition("/")
            self.take({"kind": "failed", **about, "op": op, "by": by, "width": int(width), "why": why})
        self.states[worker.item.name] = state
        self.take({"kind": "not run", **about, "what": worker.item.name, "why": why})
        seconds = time.monotonic() - worker.began
        ended = {"kind": "ended", **about, "state": state, "seconds": seconds, "says": why}
        self.take(ended | {"at": worker.at, "at_limit": at_limit})

    _unstarted = ""

    def _out_of_time(self) -> Outcome:
        if self.waiting is None:
            return Outcome("not run", "the time was up before its process had started")
        for worker in self.workers:
            if worker.item is not None:
                worker.ask_where()
        for worker in self.workers:
            if worker.item is not None:
                where = worker.where()
                why = f"the part's time was up after {time.monotonic() - worker.began:.0f} s of it"
                self._lost(worker, "hung", why + f", at {where}" * bool(where))
        for item in self.waiting:
            why = "the part's time was up"
            self.take({"kind": "not run", "part": self.part.name, "item": item.name, "what": item.name, "why": why})
        return Outcome("timed out")
