"""A segment's deaths are counted from its newest checkpoint, and a person decides about a parked segment.

Rows and folders are real. ``test_dying_trainers`` has real trainers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from factory.core.errors import InputError
from factory.ledger.ledger import Ledger
from factory.ledger.rows import SegmentRow
from factory.retrying import trainer_deaths
from factory.retrying.trainer_deaths import (
    abandon_segment,
    classify_trainer_ending,
    find_newest_checkpoint_step,
    find_parked_segment,
    record_trainer_death,
    refuse_while_parked,
    request_retry,
)
from tests.support.failing.deaths import plan_row
from tests.support.messages import codes, refused

ENDING = trainer_deaths.TrainerFailure(trainer_deaths.REFUSED, "ended with exit 1")


def save(row: SegmentRow, step: int) -> Path:
    """Write a checkpoint that is whole by its manifest."""
    folder = Path(row.folder) / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_text("{}")
    (folder / "manifest.json").write_text(json.dumps({"files": {"state.json": {"bytes": 2}}}))
    return folder


def die(ledger: Ledger, row: SegmentRow, checkpoint: int | None, *, final: bool = False) -> tuple[int, str]:
    """(tries, state) after a death with that newest checkpoint."""
    if checkpoint is not None:
        save(row, checkpoint)
    after = record_trainer_death(ledger, SegmentRow.get(ledger, row.id), ENDING, 1, 3, final)
    return after.attempts, after.state


def test_a_segment_with_progress_is_never_parked(ledger: Ledger, tmp_path: Path) -> None:
    row = plan_row(ledger, folder=str(tmp_path))
    assert [die(ledger, row, step) for step in (None, 10, 20, 20, 30, 40, 50, 60)] == [
        (tries, "planned") for tries in (1, 1, 1, 2, 1, 1, 1, 1)
    ]
    assert die(ledger, row, 60) == (2, "planned")
    assert die(ledger, row, 60) == (3, "failed")
    assert find_parked_segment(ledger) == SegmentRow.get(ledger, row.id)


def test_a_removed_checkpoint_does_not_count_as_progress(ledger: Ledger, tmp_path: Path) -> None:
    row = plan_row(ledger, folder=str(tmp_path))
    assert die(ledger, row, 20) == (1, "planned")
    (tmp_path / "checkpoints" / "step-00000020").rename(tmp_path / "checkpoints" / "bad-step-00000020")
    (tmp_path / "checkpoints" / "step-of-nothing").mkdir()
    assert find_newest_checkpoint_step(row) is None
    assert [die(ledger, row, step) for step in (10, 20)] == [(2, "planned"), (3, "failed")]


def forged(row: SegmentRow, step: int, kind: str) -> None:
    """Write a forged checkpoint, with which a trainer could try to be restarted forever."""
    folder = save(row, step)
    if kind == "a name alone":
        (folder / "manifest.json").unlink()
    if kind == "files that are not there":
        (folder / "state.json").unlink()
    if kind == "no files":
        (folder / "manifest.json").write_text('{"files": {}}')
    if kind == "a name that is none":
        (folder / "manifest.json").write_text(json.dumps({"files": {"\0": {"bytes": 2}}}))
    if kind == "files that are none":
        (folder / "manifest.json").write_text('{"files": [1]}')


@pytest.mark.parametrize(
    "kind",
    [
        "a name alone",
        "files that are not there",
        "no files",
        "a name that is none",
        "files that are none",
        "a step of another segment",
    ],
)
def test_a_forged_checkpoint_does_not_count_as_progress(ledger: Ledger, tmp_path: Path, kind: str) -> None:
    row = plan_row(ledger, folder=str(tmp_path))
    states = []
    for step in (10, 20, 30):
        forged(row, step + (1000 if kind == "a step of another segment" else 0), kind)
        states.append(die(ledger, row, None))
    assert states == [(1, "planned"), (2, "planned"), (3, "failed")] and find_newest_checkpoint_step(row) is None


def test_a_final_failure_parks_the_segment_at_once(ledger: Ledger, tmp_path: Path) -> None:
    assert die(ledger, plan_row(ledger, folder=str(tmp_path)), 10, final=True) == (1, "failed")


def test_a_person_retries_or_abandons_a_parked_segment(ledger: Ledger, tmp_path: Path) -> None:
    row = plan_row(ledger, folder=str(tmp_path), parent=7, first_step=60, last_step=120)
    with refused("retrying.cannot_abandon", InputError, segment=row.id, state="planned"):
        abandon_segment(ledger, row.id, "ada")
    for _ in range(3):
        die(ledger, row, 90)
    with refused("retrying.parked_to_do", InputError, segment=row.id, step=90) as raised:
        refuse_while_parked(ledger)
    parked = raised.value.data["parked"]
    assert (parked.code, parked.data["step"], parked.data["first"], parked.data["last"]) == (
        "retrying.parked",
        90,
        60,
        120,
    )
    assert "ended with exit 1" in parked and f"'factory retry {row.id}'" in str(raised.value)
    assert f"'factory abandon {row.id}'" in str(raised.value)
    retried = request_retry(ledger, row.id, "ada")
    assert (retried.code, retried.data) == ("retrying.retried", {"segment": row.id, "start": "step 90", "step": 90})
    refuse_while_parked(ledger)
    again = SegmentRow.get(ledger, row.id)
    assert (again.state, again.attempts, again.finished_at) == ("planned", 0, None)
    assert [die(ledger, row, 90) for _ in range(3)] == [(1, "planned"), (2, "planned"), (3, "failed")], (
        "the count starts again"
    )
    abandoned = abandon_segment(ledger, row.id, "ada")
    assert abandoned.code == "retrying.abandoned"
    assert abandoned.data == {"segment": row.id, "lost": 30, "first": 60, "folder": str(tmp_path)}
    refuse_while_parked(ledger)
    with refused("retrying.cannot_retry", InputError, segment=row.id, state="abandoned"):
        request_retry(ledger, row.id, "ada")
    told = [
        event["detail"]["by"]
        for event in ledger.read("SELECT detail FROM events WHERE kind LIKE 'segment_%ed' AND detail LIKE '%by%'")
    ]
    assert told == ["ada", "ada"]


TORCHRUN = """
[rank0]:[W1] gloo
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 4711)
  traceback : Signal 9 (SIGKILL) received by PID 4711
"""


@pytest.mark.parametrize(
    ("code", "line", "log", "kills", "kind", "ended", "data"),
    [
        (-9, "step 4", "", 0, trainer_deaths.KILLED, "killed", {}),
        (-9, "", "", -1, trainer_deaths.OUT_OF_MEMORY, "oom_killer", {}),
        (-9, "", "", None, trainer_deaths.KILLED, "killed", {}),
        (1, "[rank0]: peer closed", TORCHRUN, 0, trainer_deaths.KILLED, "killed", {}),
        (1, "[rank0]: peer closed", TORCHRUN, -1, trainer_deaths.OUT_OF_MEMORY, "oom_killer", {}),
        (-11, "step 4", "", 0, trainer_deaths.CRASHED, "signal", {"signal": "SIGSEGV", "cause": ": step 4"}),
        (1, "CUDA out of memory.", "", 0, trainer_deaths.OUT_OF_MEMORY, "out_of_memory", {"code": 1, "cause": ": CUDA out of memory."}),
        (1, "torch.OutOfMemoryError", "", 0, trainer_deaths.OUT_OF_MEMORY, "out_of_memory", {"code": 1, "cause": ": torch.OutOfMemoryError"}),
        (1, "Cannot allocate memory", "", 0, trainer_deaths.OUT_OF_MEMORY, "out_of_memory", {}),
        (1, "can't allocate memory", "", 0, trainer_deaths.OUT_OF_MEMORY, "out_of_memory", {}),
        (1, "RuntimeError: x", "", -1, trainer_deaths.REFUSED, "exit", {"code": 1, "cause": ": RuntimeError: x"}),
        (2, "trainer: no domain", TORCHRUN, 0, trainer_deaths.REFUSED, "exit", {"code": 2, "cause": ": trainer: no domain"}),
        (0, "", "", 0, trainer_deaths.REFUSED, "exit", {"code": 0, "cause": ""}),
    ],
)  # fmt: skip
def test_the_ways_in_which_a_trainer_can_end_are_distinguished(
    code: int, line: str, log: str, kills: int | None, kind: str, ended: str, data: dict[str, object]
) -> None:
    """``kills``: the OOM killer's count at the start, less its count now; None: unknown."""
    now = trainer_deaths.count_oom_kills()
    before = None if kills is None or now is None else now + kills
    if kills == -1 and now is None:
        pytest.skip("this kernel does not count")
    found = classify_trainer_ending(code, line, log, before)
    assert found.kind == kind and codes([found.says]) == [f"retrying.ended.{ended}"], found
    assert {name: found.says.data[name] for name in data} == data  # type: ignore[attr-defined]
