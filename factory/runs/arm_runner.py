"""Trains the arms of one task, each when it is requested, and keeps a row for each in the ledger."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from factory.core.path_removal import remove_path
from factory.core.time_formats import format_duration
from factory.ledger.ledger import runs
from factory.ledger.plant import Plant
from factory.ledger.rows import RunRow, SqlReader, Subject
from factory.retrying.watchdog import UsualDurations
from factory.runs import sandboxed_training
from factory.runs.arm import Arm, check_arms
from factory.runs.live_code import LiveCode
from factory.runs.live_training import NO_USUAL_TIMES, TrainerExit, train_arms_with_live_code
from factory.runs.sandboxed_training import ArmRunEnd
from factory.runs.trace import RunTrace
from kernels.contract.files import write_atomically
from kernels.contract.message import Message

PROCESS_PREFIX = "process "  # in the row of a running arm, ``ended`` is this prefix, the process and the machine
CLOCK_SLACK_SECONDS = 60.0  # a machine's clock may be set back by this much
SHOWN = ("purpose", "subject", "state", "folder", "started_at", "finished_at", "ended")  # columns of a run's JSON
MAX_SILENCE_SECONDS = 3600.0  # a run on another machine counts as stopped after this time without a write


@dataclass(frozen=True)
class ArmRunner:
    """Trains the arms of one task in folders below ``home``, named by the arms' keys. An arm with a result there is not trained again."""

    plant: Plant
    home: Path
    purpose: str  # 'certificate', 'preflight', 'audit', 'diagnosis', 'patch gate', 'recipe gate'
    subject: Subject  # subject of the task, such as a segment

    def find_arm_folder(self, arm: Arm) -> Path:
        """Return the folder in which an arm is trained."""
        return self.home / arm.key

    def open_arm_trace(self, arm: Arm) -> RunTrace:
        """Return the trace of an arm that was trained to its end."""
        return RunTrace(self.find_arm_folder(arm), arm.first_step, arm.last_step)

    def train_with_live_code(
        self, code: LiveCode, arms: Sequence[Arm], title: str, usual: UsualDurations = NO_USUAL_TIMES
    ) -> TrainerExit:
        """Train arms of one commit and one number of ranks with live code (``factory.runs.live_training``).

        Returns how the first failed trainer ended. Raises: InputError for arms that cannot be trained; PausedError or SegmentError if training was
        stopped. A second call then continues it.
        """
        check_arms(arms)
        folders = {self.find_arm_folder(arm): arm for arm in arms}
        with self.record_arm_states(folders) as ends:
            done = train_arms_with_live_code(self.plant, code, self.home, folders, title, usual)
            for folder, arm in folders.items():
                ends[arm.key] = "" if (folder / "result.json").exists() else done.line or "it did not begin"
        return done

    def train_sandboxed(
        self, output: Path, code: Path, arms: Mapping[Path, Arm], wall_seconds: float
    ) -> Generator[ArmRunEnd, None, None]:
        """Train arms in the sandbox, as ``sandboxed_training.train_sandboxed`` does. The caller must close the iterator.

        Raises: InputError for an arm that cannot be trained; IsolationError.
        """
        check_arms(list(arms.values()))  # this also computes their keys, before untrusted code runs
        with closing(sandboxed_training.train_sandboxed(output, code, arms, wall_seconds)) as trained:
            for folder, arm in arms.items():
                with self.record_arm_states({folder: arm}) as ends:
                    ended = next(trained)
                    ends[arm.key] = ended.failed
                yield ended
                if ended.failed:
                    return

    def train_in_own_sandbox(self, arm: Arm, code: Path, name: str, wall_seconds: float) -> ArmRunEnd:
        """Train one arm in a sandbox of its own, in a folder called ``name``, unless it has already ended well. Raises: IsolationError."""
        output, done = self.find_arm_folder(arm), self.home / f"{arm.key}.json"
        if done.exists():
            return ArmRunEnd(output / name, **json.loads(done.read_text()))
        remove_path(output)  # left by a killed process
        (found,) = self.train_sandboxed(output, code, {output / name: arm}, wall_seconds)
        if not found.failed:
            write_atomically(done, json.dumps({"seconds": found.seconds}))
        return found

    @contextmanager
    def record_arm_states(self, arms: Mapping[Path, Arm]) -> Iterator[dict[str, str]]:
        """Keep the rows of ``arms`` in the ledger: running during the block, stopped if the block raises.

        Yields a dict. The block sets in it why each arm failed, by key; '' means done.
        """
        self._note(arms)
        ends: dict[str, str] = {}
        try:
            yield ends
        except BaseException as error:
            _finish(
                self.plant, {arm.key: ("stopped", str(error)[:400] or type(error).__name__) for arm in arms.values()}
            )
            raise
        _finish(self.plant, {key: ("failed", why[:400]) if why else ("done", None) for key, why in ends.items()})

    def _note(self, arms: Mapping[Path, Arm]) -> None:
        """Write a row for each arm that is not done, before it begins."""
        now, ledger = time.time(), self.plant.ledger
        with ledger.begin() as tx:
            for folder, arm in arms.items():
                values: dict[str, Any] = {
                    "purpose": self.purpose, "subject": str(self.subject), "arm": arm.to_json(), "state": "running",
                    "folder": ledger.to_stored_path(folder), "started_at": now, "finished_at": None,
                    "ended": f"{PROCESS_PREFIX}{os.getpid()} of {socket.gethostname()}",
                }  # fmt: skip
                known = tx.execute(sa.select(runs.c.state, runs.c.folder).where(runs.c.id == arm.key)).first()
                if known is None:
                    tx.execute(runs.insert().values(id=arm.key, **values))
                elif tuple(known) != ("done", values["folder"]) or not folder.exists():
                    tx.execute(runs.update().where(runs.c.id == arm.key).values(**values))


def _finish(plant: Plant, ends: dict[str, tuple[str, str | None]]) -> None:
    with plant.ledger.begin() as tx:
        for key, (state, ended) in ends.items():
            going = (runs.c.id == key) & (runs.c.state == "running")
            tx.execute(runs.update().where(going).values(state=state, ended=ended, finished_at=time.time()))


# -- for people --------------------------------------------------------------------------------------------------------
def correct_run_state(row: RunRow) -> RunRow:
    """Return the row with its actual state: a run whose process has ended counts as stopped. On another machine, the times of the files decide."""
    import psutil

    if row.state != "running":
        return row
    number, _, host = (row.ended or "").removeprefix(PROCESS_PREFIX).partition(" of ")
    if host not in ("", socket.gethostname()):
        if time.time() - max(row.started_at, _last_written(Path(row.folder))) < MAX_SILENCE_SECONDS:
            return replace(row, ended=None)
        return replace(
            row,
            state="stopped",
            ended=Message(
                "runs.silent",
                "the run has written nothing for {time} on {host}",
                time=format_duration(MAX_SILENCE_SECONDS),
                host=host,
            ),
        )
    try:
        lives = psutil.Process(int(number)).create_time() < row.started_at + CLOCK_SLACK_SECONDS
    except (psutil.Error, ValueError):  # an older factory recorded no process
        lives = False
    return replace(row, ended=None) if lives else replace(row, state="stopped", ended="its process ended")


def _last_written(folder: Path) -> float:
    """Return the time of the last change in a trainer's folder; 0 if the folder is missing."""
    found = [0.0]
    with suppress(OSError):
        for path in (folder, *folder.iterdir()):
            with suppress(OSError):  # replaced at this moment
                found.append(path.stat().st_mtime)
    return max(found)


def list_runs(db: SqlReader, newest: int | None = None) -> list[dict[str, Any]]:
    """Return the newest runs as JSON, in the order of their start. Lists, pages and MLflow use it."""
    limit = "" if newest is None else f" LIMIT {newest}"
    return [run_to_json(row) for row in reversed(RunRow.select(db, f"ORDER BY started_at DESC, id{limit}"))]


def run_to_json(row: RunRow) -> dict[str, Any]:
    """Return a run as JSON, with its duration and, while its folder exists, the number of its recorded steps."""
    from factory.core.untrusted_trainer_files import count_lines

    row = correct_run_state(row)
    took = None if row.finished_at is None else row.finished_at - row.started_at
    there = Path(row.folder).is_dir()
    return {
        "key": row.id, **row.select_fields(" ".join(SHOWN)), "seconds": took,
        "there": there, "steps": count_lines(Path(row.folder) / "metrics.jsonl") if there else None, "arm": row.arm,
    }  # fmt: skip


def format_run(run: dict[str, Any]) -> Message:
    """Return a run as one line of a list.

    >>> arm = {"name": "old code, again", "code": "c0ffee" * 6, "first": 20, "last": 40, "repeat": 1}
    >>> run = {"key": "ab12", "purpose": "certificate", "subject": "segment:3", "state": "done", "seconds": 4.25, "ended": None}
    >>> format_run(run | {"steps": 20, "arm": arm})
    'ab12  certificate of segment 3: old code, again (steps 20–40): done in 4.2 s'
    """
    arm: dict[str, Any] = run["arm"]
    kind, _, number = run["subject"].partition(":")
    took = f" in {run['seconds']:.1f} s" if run["state"] == "done" and run["seconds"] is not None else ""
    after = f" after {run['steps']} steps" if run["state"] == "running" and run["steps"] else ""
    why = f": {run['ended']}" if run["ended"] else ""
    return Message(
        "runs.line",
        "{key}  {purpose} of {kind} {number}: {arm} (steps {first}–{last}): {state}{took}{after}{why}",
        key=run["key"], purpose=run["purpose"], kind=kind, number=number, arm=arm["name"], first=arm["first"], last=arm["last"],
        state=run["state"], took=took, after=after, why=why, seconds=run["seconds"], steps=run["steps"],
    )  # fmt: skip
