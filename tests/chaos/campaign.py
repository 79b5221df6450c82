"""Injects faults one by one, runs again without a fault, and compares the result with an undisturbed run."""

from __future__ import annotations

import json
import os
import pickle
import select
import shutil
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos import power
from tests.chaos.crashes import Crashes, copy, left_aside, used
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.shim import ERRORS, Control, Effect, environment, places, read_log, unknown
from tests.chaos.state import State, broken, differences, lost, state_of
from tests.support.paths import ROOT

MOST_PASSES = 4  # a daemon would be started again more often
PATIENCE_S = 900.0
END = "the end"  # the place after the last effect
POLL_SECONDS = 0.0002  # a held run waits at most so long at each effect


KILLED, AGAIN, TEAR = "killed", "killed again", "tear"
IN_A_RUN = {AGAIN: "kill before", TEAR: TEAR} | {
    mode: mode for mode in ERRORS
}  # injections during a run, by the shim's mode


@dataclass(frozen=True)
class Injection:
    """KILLED before an effect, a power cut after it (``power.LOSSES``), or one of ``IN_A_RUN`` at an effect of the run from ``state``."""

    mode: str
    number: int
    state: int = 0  # the run starts from the state after a kill before this effect; 0: from the scenario's start


@dataclass
class Result:
    scenario: str
    mode: str
    number: int
    state: int = 0
    effect: str = ""
    fired: bool = True
    wrong: list[str] = field(default_factory=list)  # differences to the undisturbed run
    passes: int = 0
    seconds: float = 0.0  # of the recovery
    steps: int = 0  # training steps that were repeated
    said: str = ""
    alike: int = 1  # how many effects of the run have this crash state
    digest: str = ""  # digest of the disk when the recovery started
    run: str = ""  # the undisturbed run to which the numbers belong

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Straight:
    """The undisturbed run of a scenario."""

    effects: list[Effect]
    state: State
    crashes: Crashes | None  # its crash states; None: not kept
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    recovered: set[str] = field(
        default_factory=set
    )  # digests of crash states from which a recovery ended like this run


class Site:
    """A folder for runs of scenarios, with their start states and a server.

    With ``crashes``, the undisturbed run of each scenario stops before each effect, and its crash states are kept.
    """

    def __init__(self, work: Path, crashes: bool = False) -> None:
        self.work, self.site, self.crashes = work, work / "site", crashes
        work.mkdir(parents=True, exist_ok=True)
        self.control = Control(Path("/dev/shm") / f"factory-chaos-{os.getpid()}-{abs(hash(str(work)))}")
        self.log, self.output, self.kept = work / "effects.log", work / "output.log", work / "kept"
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI_", "FACTORY_"))}
        variables |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.server"], cwd=ROOT, env=variables | environment(self.control.path),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.server.stdout is not None
        assert self.server.stdout.readline() == "ready\n", "the server did not start"
        self.undisturbed: dict[str, Straight] = {}

    def close(self) -> None:
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait()
        self.control.path.unlink(missing_ok=True)

    # -- runs -----------------------------------------------------------------------------------------------------------
    def run(
        self,
        scenario: str,
        mode: str = "record",
        target: int = 0,
        store: Path | None = None,
        look: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        """Run the scenario in one process. The shim counts effects and acts on ``target`` by ``mode``. ``look`` is called before each effect."""
        self.control.arm(self.site, self.log, mode, target, store)
        request = {"scenario": scenario, "site": str(self.site), "output": str(self.output), "patience": PATIENCE_S}
        assert self.server.stdin is not None and self.server.stdout is not None
        self.output.unlink(missing_ok=True)
        print(json.dumps(request), file=self.server.stdin, flush=True)
        while look and not select.select([self.server.stdout], [], [], POLL_SECONDS)[0]:
            if held := self.control.held:
                look(held)
                self.control.release(held)
        answer = self.server.stdout.readline()
        assert answer, "the server ended"
        self.control.disarm()
        return dict(json.loads(answer))

    def said(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    # -- states ---------------------------------------------------------------------------------------------------------
    def start(self, scenario: str) -> None:
        """Restore the site to the scenario's start, which is made once, with the scenario before it."""
        self._restore(self._made(scenario, "start"))

    def _made(self, scenario: str, which: str) -> Path:
        folder = self.work / f"{scenario}.{which}"
        if folder.exists():
            return folder
        if which == "start":
            after = SCENARIOS[scenario].after
            if after:
                self._restore(self._made(after, "end"))
            else:
                shutil.rmtree(self.site, ignore_errors=True)
                self.site.mkdir()
            self._must(self.run(f"prepare {scenario}"))
            if not SCENARIOS[scenario].live_log:
                settle(self.site)
        else:
            self.start(scenario)
            self._must(self.run(scenario))
        copy(self.site, folder)
        return folder

    def _must(self, answer: dict[str, Any]) -> None:
        assert answer["code"] == 0 and not answer["left"], f"{answer}\n{self.said()}"

    def _restore(self, folder: Path) -> None:
        shutil.rmtree(self.site, ignore_errors=True)
        copy(folder, self.site)

    def straight(self, scenario: str) -> Straight:
        """Return the undisturbed run, made once in this folder. The content of each flushed file is kept."""
        note = self.work / f"{scenario}.straight"
        if scenario not in self.undisturbed and note.exists():
            self.undisturbed[scenario] = pickle.loads(note.read_bytes())
        if scenario not in self.undisturbed:
            made = self.undisturbed[scenario] = self._straight(scenario)
            if self.crashes:
                aside = note.with_suffix(".part")
                aside.write_bytes(pickle.dumps(made))
                aside.rename(note)
        return self.undisturbed[scenario]

    def _straight(self, scenario: str) -> Straight:
        self.start(scenario)
        store = self.kept / scenario
        shutil.rmtree(store, ignore_errors=True)
        store.mkdir(parents=True)
        crashes = Crashes(self.work / f"{scenario}.crashes") if self.crashes else None
        if crashes:
            self._must(self.run(scenario, "hold", store=store, look=lambda number: crashes.look(self.site, number)))
        else:
            self._must(self.run(scenario, store=store))
        effects, state = read_log(self.log), state_of(self.site)
        if crashes:
            crashes.look(self.site, len(effects) + 1)
        if odd := unknown(effects, self.site):
            raise AssertionError(f"{scenario}: effects that tests/chaos/shim.py does not know: {', '.join(odd)}")
        assert not (wrong := broken(self.site)), wrong
        if not (end := self.work / f"{scenario}.end").exists():
            copy(self.site, end)
        assert not SCENARIOS[scenario].alike or not (wrong := self._changed(scenario, state)), wrong
        return Straight(effects, state, crashes)

    def _changed(self, scenario: str, state: State) -> list[str]:
        """Return the differences that a scenario without effect made all the same. The site is changed afterwards."""
        self._restore(self._made(SCENARIOS[scenario].after, "end"))
        return differences(state_of(self.site), state)

    # -- one injection --------------------------------------------------------------------------------------------------
    def inject(self, scenario: str, injection: Injection) -> Result:
        straight = self.straight(scenario)
        result = Result(scenario, injection.mode, injection.number, injection.state, run=straight.run)
        if injection.mode in power.LOSSES:
            self.start(scenario)
            done = self.cut(scenario, injection.number, injection.mode)
            result.wrong += lost(self.site, scenario)
            if straight.crashes:
                result.digest = straight.crashes.digest(self.site)
        else:
            done = self.killed(scenario, injection.number if injection.mode == KILLED else injection.state)
            if injection.mode == KILLED and straight.crashes:
                state = straight.crashes.of(injection.number)
                result.alike, result.digest = len(state.effects), state.digest
        result.steps = steps_in(done)
        known = places(straight.effects, self.site) | places(done, self.site)
        if injection.mode in IN_A_RUN:
            answer, known = self._next(scenario, result, IN_A_RUN[injection.mode], injection.number)
            result.fired = self.control.fired
            if not answer["dead"]:
                result.wrong += _clear(answer, self.said())
            result.said = self.said()[-2000:]
        result.effect = known.get(injection.number, END)
        if result.digest in straight.recovered:  # an earlier recovery from the same state of the disk succeeded
            return result
        while result.passes < MOST_PASSES:
            result.passes += 1
            answer, _ = self._next(scenario, result)
            result.seconds += answer["seconds"]
            if injection.mode == KILLED and result.passes == 1:
                shutil.copyfile(self.log, self._recovery(scenario, injection.number))
            if answer["left"]:
                result.wrong.append(f"processes were left: {answer['left']}")
            if answer["code"] == 0:
                break
        else:
            result.wrong.append(f"{MOST_PASSES} passes did not finish it")
            result.said = self.said()[-2000:]
        result.steps = max(0, result.steps - steps_in(straight.effects))
        result.wrong += differences(straight.state, state_of(self.site)) + broken(self.site)
        if result.digest and not result.wrong:
            straight.recovered.add(result.digest)
        return result

    def killed(self, scenario: str, number: int) -> list[Effect]:
        """Restore the site to the state after a kill before an effect (0: the scenario's start). Returns the effects until then."""
        straight = self.straight(scenario)
        if number and straight.crashes:
            self._restore(straight.crashes.folder / str(straight.crashes.of(number).number))
            return [effect for effect in straight.effects if effect.number < number]
        self.start(scenario)
        if not number:
            return []
        last = len(straight.effects)
        self.run(scenario, *(("kill before", number) if number <= last else ("kill after", last)))
        return read_log(self.log)

    def _next(
        self, scenario: str, result: Result, mode: str = "record", target: int = 0
    ) -> tuple[dict[str, Any], dict[int, str]]:
        """Run again on the present site. Returns the answer and the places of its effects. It may open no unfinished file of another process."""
        left = left_aside(self.site)
        answer = self.run(scenario, mode, target)
        done = read_log(self.log)
        result.steps += steps_in(done)
        result.wrong += used(left, read_log(self.log, opened=True), self.site)
        return answer, places(done, self.site)

    def _recovery(self, scenario: str, number: int) -> Path:
        """Return the path of the log of the recovery from a crash state."""
        folder = self.work / f"{scenario}.recoveries"
        folder.mkdir(exist_ok=True)
        return folder / f"{number}.log"

    def shortest(self, scenario: str, seconds: dict[int, float]) -> dict[str, list[tuple[int, int]]]:
        """Return, for each place, the crash states whose recovery reaches it, shortest first, and the number of the effect in that recovery.

        ``seconds``: how long the recovery from each crash state took.
        """
        found = dict[str, list[tuple[int, int]]]()
        for state in sorted(seconds, key=lambda number: seconds[number]):
            met = dict[str, int]()
            for number, place in places(read_log(self._recovery(scenario, state)), self.site).items():
                met.setdefault(place, number)
            for place, number in met.items():
                found.setdefault(place, []).append((state, number))
        return found

    def cut(self, scenario: str, number: int, loss: str) -> list[Effect]:
        """Restore the site to the state after a power cut behind an effect. Returns the effects until then."""
        effects = self.straight(scenario).effects
        done = [e for e in effects if e.number <= number]
        power.cut(self.work / f"{scenario}.start", self.site, done, self.kept / scenario, loss)
        return done


def _clear(answer: dict[str, Any], said: str) -> list[str]:
    """Return what is wrong with the end of a command that met an injected error."""
    wrong = [f"processes were left: {answer['left']}"] if answer["left"] else []
    if answer["code"] and "Traceback" in said:
        wrong.append("a traceback in place of a message")
    return wrong


def steps_in(effects: list[Effect]) -> int:
    """Return the number of training steps: the number of lines of metrics."""
    return sum(
        e.kind == "write" and not e.error and e.path.endswith("/metrics.jsonl") and "/segments/" in e.path
        for e in effects
    )


def settle(site: Path) -> None:
    """Write the databases' logs into their files, so that the next process need not."""
    for path in ((site / "plant" / name) for name in ("ledger.db", "index.db", "mlflow.db")):
        if path.exists():
            with (
                closing(sqlite3.connect(path)) as db,
                suppress(sqlite3.DatabaseError),
            ):  # a scenario may have damaged it
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
