"""Deaths are counted from the newest checkpoint; a person decides about what is parked. Rows and folders are real, trainers are in
``test_dying_trainers``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from factory.core.errors import InputError
from factory.ledger.ledger import Ledger
from factory.ledger.rows import SegmentRow
from factory.retrying import tries
from factory.retrying.tries import abandon, ending_of, newest_step, parked, record_death, refuse_parked, retry
from tests.support.failing.deaths import plan_row

ENDING = tries.Ending(tries.REFUSED, "ended with exit 1")


def save(row: SegmentRow, step: int) -> Path:
    """A whole checkpoint, by its manifest."""
    folder = Path(row.folder) / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_text("{}")
    (folder / "manifest.json").write_text(json.dumps({"files": {"state.json": {"bytes": 2}}}))
    return folder


def die(ledger: Ledger, row: SegmentRow, checkpoint: int | None, *, final: bool = False) -> tuple[int, str]:
    """(tries, state) after a death with that newest checkpoint."""
    if checkpoint is not None:
        save(row, checkpoint)
    after = record_death(ledger, SegmentRow.get(ledger, row.id), ENDING, 1, 3, final)
    return after.attempts, after.state


def test_what_makes_progress_is_never_parked(ledger: Ledger, tmp_path: Path) -> None:
    row = plan_row(ledger, folder=str(tmp_path))
    assert [die(ledger, row, step) for step in (None, 10, 20, 20, 30, 40, 50, 60)] == [
        (tries, "planned") for tries in (1, 1, 1, 2, 1, 1, 1, 1)
    ]
    assert die(ledger, row, 60) == (2, "planned")
    assert die(ledger, row, 60) == (3, "failed")
    assert parked(ledger) == SegmentRow.get(ledger, row.id)


def test_a_checkpoint_that_was_put_away_is_no_progress(ledger: Ledger, tmp_path: Path) -> None:
    row = plan_row(ledger, folder=str(tmp_path))
    assert die(ledger, row, 20) == (1, "planned")
    (tmp_path / "checkpoints" / "step-00000020").rename(tmp_path / "checkpoints" / "bad-step-00000020")
    (tmp_path / "checkpoints" / "step-of-nothing").mkdir()
    assert newest_step(row) is None
    assert [die(ledger, row, step) for step in (10, 20)] == [(2, "planned"), (3, "failed")]


def forged(row: SegmentRow, step: int, kind: str) -> None:
    """As a trainer may leave it that wants to be tried for ever."""
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
def test_what_is_no_checkpoint_of_the_segment_is_no_progress(ledger: Ledger, tmp_path: Path, kind: str) -> None:
    row = plan_row(ledger, folder=str(tmp_path))
    states = []
    for step in (10, 20, 30):
        forged(row, step + (1000 if kind == "a step of another segment" else 0), kind)
        states.append(die(ledger, row, None))
    assert states == [(1, "planned"), (2, "planned"), (3, "failed")] and newest_step(row) is None


def test_what_no_try_can_mend_is_parked_at_once(ledger: Ledger, tmp_path: Path) -> None:
    assert die(ledger, plan_row(ledger, folder=str(tmp_path)), 10, final=True) == (1, "failed")


def test_a_person_decides(ledger: Ledger, tmp_path: Path) -> None:
    row = plan_row(ledger, folder=str(tmp_path), parent=7, first_step=60, last_step=120)
    with pytest.raises(InputError, match=rf"segment {row.id} is planned, not parked: there is nothing to abandon"):
        abandon(ledger, row.id, "ada")
    for _ in range(3):
        die(ledger, row, 90)
    words = (
        rf"segment {row.id} \(trunk, steps 60–120\) is parked at step 90: it ended with exit 1\. Training waits: correct the cause, "
        rf"then 'factory retry {row.id}' goes on from step 90, with .* in it; 'factory abandon {row.id}' gives its steps up"
    )
    with pytest.raises(InputError, match=words):
        refuse_parked(ledger)
    assert retry(ledger, row.id, "ada") == f"segment {row.id} goes on from step 90 at the next pass"
    refuse_parked(ledger)
    again = SegmentRow.get(ledger, row.id)
    assert (again.state, again.attempts, again.finished_at) == ("planned", 0, None)
    assert [die(ledger, row, 90) for _ in range(3)] == [(1, "planned"), (2, "planned"), (3, "failed")], (
        "the count began again"
    )
    assert abandon(ledger, row.id, "ada") == (
        f"segment {row.id} is abandoned: 30 steps are given up, and the next one goes on from step 60. Its checkpoints stay in {tmp_path}"
    )
    refuse_parked(ledger)
    with pytest.raises(InputError, match=f"segment {row.id} is abandoned: only a parked segment"):
        retry(ledger, row.id, "ada")
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
    ("code", "line", "log", "kills", "kind", "says"),
    [
        (-9, "step 4", "", 0, tries.KILLED, "was killed by somebody else (SIGKILL)"),
        (-9, "", "", -1, tries.OUT_OF_MEMORY, "was ended by the kernel's OOM killer"),
        (-9, "", "", None, tries.KILLED, "was killed by somebody else"),
        (1, "[rank0]: peer closed", TORCHRUN, 0, tries.KILLED, "was killed by somebody else"),
        (1, "[rank0]: peer closed", TORCHRUN, -1, tries.OUT_OF_MEMORY, "OOM killer"),
        (-11, "step 4", "", 0, tries.CRASHED, "ended with signal SIGSEGV: step 4"),
        (
            1,
            "torch.OutOfMemoryError: CUDA out of memory.",
            "",
            0,
            tries.OUT_OF_MEMORY,
            "ended with exit 1, out of memory: torch.Out",
        ),
        (1, "RuntimeError: x", "", -1, tries.REFUSED, "ended with exit 1: RuntimeError: x"),
        (2, "trainer: no domain", TORCHRUN, 0, tries.REFUSED, "ended with exit 2: trainer: no domain"),
        (0, "", "", 0, tries.REFUSED, "ended with exit 0"),
    ],
)
def test_endings_are_told_apart(code: int, line: str, log: str, kills: int | None, kind: str, says: str) -> None:
    """``kills``: how many the OOM killer had ended at the start, less those it has ended now; None: unknown."""
    now = tries.oom_kills()
    before = None if kills is None or now is None else now + kills
    if kills == -1 and now is None:
        pytest.skip("this kernel does not count")
    found = ending_of(code, line, log, before)
    assert found.kind == kind and says in found.says
