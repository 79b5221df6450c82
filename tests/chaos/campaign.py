"""Injects one fault after the other, runs again without it, compares with the run that nothing disturbed."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos import power
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.shim import Control, Effect, environment, places, read_log, unknown
from tests.chaos.state import State, broken, differences, lost, state_of
from tests.support.paths import ROOT

MOST_PASSES = 4  # a daemon that is started again and again would go on
PATIENCE_S = 900.0


@dataclass(frozen=True)
class Injection:
    mode: str  # of ``shim.MODES``, or 'power cut' (``power.LOSSES``)
    number: int
    again: int = 0  # the effect of the recovery at which that is killed too; 0: it is not


@dataclass
class Result:
    scenario: str
    mode: str
    number: int
    again: int = 0
    effect: str = ""
    fired: bool = False
    wrong: list[str] = field(default_factory=list)  # empty: as the run that nothing disturbed
    passes: int = 0
    seconds: float = 0.0  # of the recovery
    steps: int = 0  # of training, done again
    said: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Site:
    """A folder in which scenarios are run, its start states, and a server."""

    def __init__(self, work: Path) -> None:
        self.work, self.site = work, work / "site"
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
        self.undisturbed: dict[str, tuple[list[Effect], State]] = {}

    def close(self) -> None:
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait()
        self.control.path.unlink(missing_ok=True)

    # -- runs -----------------------------------------------------------------------------------------------------------
    def run(self, scenario: str, mode: str = "record", target: int = 0, store: Path | None = None) -> dict[str, Any]:
        """One process of the scenario; the shim counts, and does what ``mode`` says at ``target``."""
        self.control.arm(self.site, self.log, mode, target, store)
        request = {"scenario": scenario, "site": str(self.site), "output": str(self.output), "patience": PATIENCE_S}
        assert self.server.stdin is not None and self.server.stdout is not None
        self.output.unlink(missing_ok=True)
        print(json.dumps(request), file=self.server.stdin, flush=True)
        answer = self.server.stdout.readline()
        assert answer, "the server ended"
        self.control.disarm()
        return dict(json.loads(answer))

    def said(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    # -- states ---------------------------------------------------------------------------------------------------------
    def start(self, scenario: str) -> None:
        """The site as the scenario starts; made once, with what it goes on from."""
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

    def straight(self, scenario: str) -> tuple[list[Effect], State]:
        """The log and the end of the run that nothing disturbed; what each flushed file held is kept."""
        if scenario not in self.undisturbed:
            self.start(scenario)
            store = self.kept / scenario
            shutil.rmtree(store, ignore_errors=True)
            store.mkdir(parents=True)
            self._must(self.run(scenario, store=store))
            effects, state = read_log(self.log), state_of(self.site)
            if odd := unknown(effects, self.site):
                raise AssertionError(f"{scenario}: effects that tests/chaos/shim.py does not know: {', '.join(odd)}")
            assert not (wrong := broken(self.site)), wrong
            self.undisturbed[scenario] = effects, state
            if not (end := self.work / f"{scenario}.end").exists():
                copy(self.site, end)
            assert not SCENARIOS[scenario].alike or not (wrong := self._changed(scenario, state)), wrong
        return self.undisturbed[scenario]

    def _changed(self, scenario: str, state: State) -> list[str]:
        """Where a scenario that is to leave all as it was does not. The site is another one afterwards."""
        self._restore(self._made(SCENARIOS[scenario].after, "end"))
        return differences(state_of(self.site), state)

    # -- one injection --------------------------------------------------------------------------------------------------
    def inject(self, scenario: str, injection: Injection) -> Result:
        effects, want = self.straight(scenario)
        result = Result(scenario, injection.mode, injection.number, injection.again)
        steps = steps_in(effects)
        if injection.mode in power.LOSSES:
            self.start(scenario)
            done = self.cut(scenario, injection.number, injection.mode)
            result.wrong += lost(self.site, scenario)
        else:
            self.start(scenario)
            answer = self.run(scenario, injection.mode, injection.number)
            done = read_log(self.log)
            result.fired = self.control.fired
            if not answer["dead"]:
                result.wrong += _clear(answer, self.said())
            result.said = self.said()[-2000:]
        known = places(effects, self.site) | places(done, self.site)
        result.effect = known.get(injection.number, "")
        result.fired = result.fired or injection.mode in power.LOSSES
        trained = steps_in(done)
        while result.passes < MOST_PASSES:
            result.passes += 1
            again = injection.again if result.passes == 1 else 0
            answer = self.run(scenario, "kill before" if again else "record", again)
            trained += steps_in(read_log(self.log))
            result.seconds += answer["seconds"]
            if again and not answer["dead"]:  # the recovery was shorter
                result.fired = False
            if answer["dead"]:
                continue
            if answer["left"]:
                result.wrong.append(f"processes were left: {answer['left']}")
            if answer["code"] == 0:
                break
        else:
            result.wrong.append(f"{MOST_PASSES} passes did not finish it")
            result.said = self.said()[-2000:]
        result.steps = max(0, trained - steps)
        result.wrong += differences(want, state_of(self.site)) + broken(self.site)
        return result

    def cut(self, scenario: str, number: int, loss: str) -> list[Effect]:
        """The site after a power cut behind that effect; returns the effects until then."""
        effects, _ = self.straight(scenario)
        done = [e for e in effects if e.number <= number]
        power.cut(self.work / f"{scenario}.start", self.site, done, self.kept / scenario, loss)
        return done


def _clear(answer: dict[str, Any], said: str) -> list[str]:
    """What is wrong with how a command ended that was given an error."""
    wrong = [f"processes were left: {answer['left']}"] if answer["left"] else []
    if answer["code"] and "Traceback" in said:
        wrong.append("a traceback in place of a message")
    return wrong


def steps_in(effects: list[Effect]) -> int:
    """Steps of training: a line of metrics each."""
    return sum(
        e.kind == "write" and not e.error and e.path.endswith("/metrics.jsonl") and "/segments/" in e.path
        for e in effects
    )


def settle(site: Path) -> None:
    """Put what the databases have in their logs into their files: the next process need not begin with that."""
    for path in ((site / "plant" / name) for name in ("ledger.db", "mlflow.db")):
        if path.exists():
            with closing(sqlite3.connect(path)) as db, suppress(sqlite3.DatabaseError):  # one that a scenario damaged
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def copy(source: Path, target: Path) -> None:
    aside = target.with_name(f".{target.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    subprocess.run(["cp", "-a", "--reflink=auto", str(source), str(aside)], check=True)
    aside.rename(target)
