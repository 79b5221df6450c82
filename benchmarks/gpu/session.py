"""One run: the parts in order, within the minutes, and the files."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.gpu import card_state
from benchmarks.gpu.headline import status
from benchmarks.gpu.parts import NAMES, PARTS, PLANT, Part, Settings
from benchmarks.gpu.pool import ROOT, Outcome, Pool
from benchmarks.gpu.records import Record, Records

DRY = "dry: tiny sizes on a CPU, tells nothing of speed"
LAST_S = 3.0  # of the minutes, kept for the files
FACTS_S = 60.0  # that 'facts' has at least: without the card's name there is no report


class Stop:
    """Ctrl-C and SIGTERM: the run ends, its files are complete as far as they are. A second one ends at once."""

    def __init__(self) -> None:
        self.signal = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            os._exit(128 + number)
        self.signal = number


def environment(settings: Settings, part: Part) -> dict[str, str]:
    """Of the processes: caches of their own, so that what is called cold is cold, and what one compiled the next has."""
    scratch = Path(settings.scratch)
    made = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
        "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
    }
    if part.workers > 1:  # torch starts as many compilers in each as there are cores
        made["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, (os.cpu_count() or 1) // part.workers))
    if settings.device.startswith("cuda:"):
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        number = settings.device.partition(":")[2]
        made["CUDA_VISIBLE_DEVICES"] = (
            visible[int(number)] if number.isdigit() and int(number) < len(visible) else number
        )
    if settings.dry:
        made |= {
            "TRITON_INTERPRET": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
    return made


class Session:
    def __init__(self, settings: Settings, out: Path, parts: Sequence[str], seconds: float, command: str) -> None:
        self.settings, self.records, self.parts, self.seconds = settings, Records(out), parts, seconds
        self.stop = Stop()
        self.began = time.monotonic()
        self._held: list[str] = []
        self._uuid = ""  # of the card, for nvidia-smi
        self.label = DRY if settings.dry else ""
        self.records.add(
            "run",
            command=command,
            began=datetime.now(UTC).isoformat(timespec="seconds"),
            limit_s=seconds,
            label=self.label,
            dry=settings.dry,
            planted=os.environ.get(PLANT, ""),
            device=settings.device,
            asked=list(parts),
        )

    @property
    def spent(self) -> float:
        return time.monotonic() - self.began

    def say(self, line: str) -> None:
        """For who watches; held back until a device is found, as the one line that says that there is none is enough."""
        self._held.append(f"[{self.spent:4.0f} of {self.seconds:.0f} s] {line}")
        if self.records.begun:
            print("\n".join(self._held), file=sys.stderr, flush=True)
            self._held.clear()

    def run(self) -> int:
        """The exit code: that of ``headline.status``, 2 where nothing could run, 128 + n where signal n cut it."""
        scratch = Path(tempfile.mkdtemp(prefix="bench-gpu-"))
        self.settings = replace(self.settings, scratch=str(scratch))
        try:
            with open(scratch / "log", "w+b") as log:
                outcome = self._parts(log)
                ended = {record["part"]: record["state"] for record in self.records.every if record["kind"] == "part"}
                self.records.finish(complete=ended == dict.fromkeys(NAMES, "done"))
                if self.records.begun:
                    shutil.copyfile(scratch / "log", self.records.lines.with_suffix(".log"))
        finally:
            self.records.render()
            self.records.close()
            shutil.rmtree(scratch, ignore_errors=True)
        if outcome is not None:
            return outcome
        code = status(self.records.every)
        return 128 + self.stop.signal if self.stop.signal and code != 1 else code

    def _parts(self, log: Any) -> int | None:
        """Run them; 2 where there is nothing to run on."""
        wanted = [part for part in PARTS if part.name in self.parts or part.name == "facts"]
        for number, part in enumerate(wanted):
            left = self.seconds - LAST_S - self.spent
            limit = left * part.share / sum(other.share for other in wanted[number:])
            if part.name == "facts":
                limit = max(FACTS_S, limit)
            outcome = self._part(part, limit, log)
            if part.name == "facts" and (refused := self._refused(outcome)):
                print(refused, file=sys.stderr)
                return 2
            self.records.render()
            if self.stop.signal:
                for other in wanted[number + 1 :]:
                    self._ended(other, Outcome("not run", f"the run was cut by {self._signal()}"), 0.0, 0.0)
                break
        return None

    def _part(self, part: Part, limit: float, log: Any) -> Outcome:
        self.say(f"{part.name}: {part.about} (at most {max(0.0, limit):.0f} s)")
        self._look(part, "before")
        began = time.monotonic()
        pool = Pool(
            part, self.settings, environment(self.settings, part), log, self._take, lambda: bool(self.stop.signal)
        )
        outcome = pool.run(limit) if limit > 0 else Outcome("not run", "the time was up")
        if limit > 0:
            self._look(part, "after")
        if outcome.state == "cut":
            outcome.why = f"by {self._signal()}"
        self._ended(part, outcome, time.monotonic() - began, limit)
        return outcome

    def _look(self, part: Part, when: str) -> None:
        """At the card, while nothing of this run is on it; which card it is, 'facts' tells."""
        if self._uuid and (seen := card_state.look(self._uuid)):
            self.records.add("look", part=part.name, when=when, **seen)

    def _ended(self, part: Part, outcome: Outcome, seconds: float, limit: float) -> None:
        self.records.add("part", part=part.name, state=outcome.state, why=outcome.why, seconds=seconds, limit_s=limit)
        self.say(f"{part.name}: {outcome.state}{': ' * bool(outcome.why)}{outcome.why} ({seconds:.0f} s)")

    def _signal(self) -> str:
        return signal.Signals(self.stop.signal).name

    def _take(self, record: Record) -> None:
        record = self.records.take(record)
        kind, what = record["kind"], f"{record.get('part')}/{record.get('item')}"
        if kind == "ended":
            state = "" if record["state"] == "done" else f"{record['state'].upper()}: "
            if record["part"] == "compile" and record.get("at_limit"):
                self.settings = replace(self.settings, hung=(*self.settings.hung, record["at"]))
            self.say(f"  {what}: {state}{record['says'] or 'done'} ({record['seconds']:.1f} s)")
        elif kind == "judged":
            name = f"{record['op']}/{record['implementation']}"
            if record["right"] and not record["wrong"]:
                self.settings = replace(self.settings, right=(*self.settings.right, name))
        elif kind == "failed":
            self.say(f"  FAILED: {record['op']}/{record['by']} at {record['width']}: {record['why']}")
        elif kind == "wrong":
            if record.get("part") == "right":
                self.settings = replace(self.settings, wrong=(*self.settings.wrong, record["item"]))
            self.say(f"  WRONG: {record['what']}: {record['why']}")
        elif kind == "not run":
            self.say(f"  not run: {record['what']}: {record['why']}")
        elif kind == "number" and record.get("part") == "facts":
            self._learn(record)

    def _learn(self, record: Record) -> None:
        """What the facts are for: the files' name, and the ceilings of the other parts."""
        name, value = record["name"], record["value"]
        if name == "slug":
            self.records.named(value)
        elif name == "uuid":
            self._uuid = value
        elif name == "memory free":
            self.settings = replace(self.settings, free=value)
        elif name == "copy bandwidth":
            self.settings = replace(self.settings, copy_rate=value)
        elif name == "bf16 product rate":
            self.settings = replace(self.settings, product_rate=value)

    def _refused(self, outcome: Outcome) -> str:
        """Why nothing can run, in one line; '': it can."""
        if self.records.begun or self.stop.signal:
            return ""
        lost = [record["why"] for record in self.records.every if record["kind"] == "not run"]
        return (lost or [outcome.why or "the device did not answer"])[0]


def dry_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="bench-gpu-dry-"))
