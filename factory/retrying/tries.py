"""How a trainer ended, and the tries of a segment: a trainer that died is started again from its newest checkpoint, and parked when that makes no
progress.

It crashed, was killed, ran out of memory, or hung: so say its exit, its log, and the kernel's count of what it killed for memory. Deaths are
counted from the newest checkpoint: after one that was made since the last death the count begins again. Unfinished progress is never left
behind: nothing else is planned while a segment is parked, until a person says ``factory retry`` or ``factory abandon``.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from factory.core.errors import InputError, SegmentError
from factory.core.faults import is_of_no_file
from factory.core.launching import EXIT_DISK_FULL, EXIT_STOPPED
from factory.core.left_files import read_object
from factory.ledger.rows import Reads, SegmentRow, Subject
from factory.retrying.asking import refuse_rewound

if TYPE_CHECKING:
    from factory.ledger.ledger import Ledger


HUNG, OUT_OF_MEMORY, KILLED, CRASHED, REFUSED = "hung", "out of memory", "killed", "crashed", "failed"
# As torchrun writes them, or code that lies: no number is longer than that of a signal or an exit.
OF_A_RANK = re.compile(r"Signal (\d{1,3}) \(SIG\w+\) received by PID \d+|exitcode\s*: -(\d{1,3}) ")
CODE_OF_A_RANK = re.compile(r"exitcode\s*: (-?\d{1,3}) ")
NO_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|can't allocate memory|Cannot allocate memory|MemoryError|bad_alloc"
)


@dataclass(frozen=True)
class Ending:
    kind: str  # one of the above
    says: str  # follows 'segment 3'


def oom_kills() -> int | None:
    """How many processes of this machine the kernel's OOM killer has ended since it was started; None where the kernel doesn't tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None


def ending_of(code: int, line: str, log: str, kills_before: int | None) -> Ending:
    """code: of the trainer, −n after signal n. line: the one of its log that explains most. log: its end.

    >>> ending_of(1, "trainer: no", "", None)
    Ending(kind='failed', says='ended with exit 1: trainer: no')
    """
    cause = f": {line}" if line else ""
    if code == EXIT_STOPPED:
        if all(int(other) in (EXIT_STOPPED, -signal.SIGTERM) for other in CODE_OF_A_RANK.findall(log)):
            return Ending(KILLED, f"was stopped by somebody else (SIGTERM), and not by this factory{cause}")
        code = 1  # torchrun stopped the others because one had failed
    if code == EXIT_DISK_FULL:
        return Ending(REFUSED, f"says that the disk is full, but there is room for its checkpoints{cause}")
    if code == -signal.SIGTERM:
        return Ending(KILLED, "was ended by somebody else (SIGTERM), and not by this factory")
    number = _signal(code, log)
    if number == signal.SIGKILL:
        kills = oom_kills()
        if kills is not None and kills_before is not None and kills > kills_before:
            return Ending(
                OUT_OF_MEMORY,
                "was ended by the kernel's OOM killer (SIGKILL): the machine or its control group has too little memory",
            )
        return Ending(KILLED, "was killed by somebody else (SIGKILL), and not by this machine's OOM killer")
    if code > 0 and NO_MEMORY.search(line):
        return Ending(OUT_OF_MEMORY, f"ended with exit {code}, out of memory{cause}")
    if number:
        return Ending(CRASHED, f"ended with signal {_name(number)}{cause}")
    return Ending(REFUSED, f"ended with exit {code}{cause}")


def _signal(code: int, log: str) -> int:
    """That ended the trainer, or the first of its ranks as torchrun reports it; 0: none."""
    if code < 0:
        return -code
    found = OF_A_RANK.search(log) if code == 1 else None
    return int(found.group(1) or found.group(2)) if found else 0


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


CHECKPOINT = re.compile(r"step-(\d{1,15})")
STUMBLED, FAILED, RETRIED, ABANDONED, ASKED = (
    "segment_stumbled", "segment_failed", "segment_retried", "segment_abandoned", "retry_asked",
)  # fmt: skip


class TrainerDiedError(SegmentError):
    """A trainer ended before its segment did. ``tries``: how often since the segment's newest checkpoint; ``parked``: too often."""

    def __init__(self, says: str, tries: int, parked: bool) -> None:
        super().__init__(says)
        self.tries, self.parked = tries, parked


def newest_step(row: SegmentRow) -> int | None:
    """The step of a segment's newest whole checkpoint; None: there is none. A folder that only has the name of one is no progress."""
    found = ((CHECKPOINT.fullmatch(path.name), path) for path in (Path(row.folder) / "checkpoints").glob("step-*"))
    steps = ((int(named.group(1)), path) for named, path in found if named)
    return max(
        (step for step, path in steps if row.first_step < step <= row.last_step and _is_whole(path)), default=None
    )


def _is_whole(checkpoint: Path) -> bool:
    """Are all files of its manifest there, each as long as it says? Their hashes are for whoever reads them."""
    try:
        files = read_object(checkpoint / "manifest.json")["files"]
        return bool(files) and all((checkpoint / name).stat().st_size == file["bytes"] for name, file in files.items())
    except (SegmentError, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        if is_of_no_file(error):
            raise
        return False


def record_death(ledger: Ledger, row: SegmentRow, ending: Ending, code: int, tries: int, final: bool) -> SegmentRow:
    """Write down how a trainer of a segment ended, and park the segment after ``tries`` without progress, or at once if ``final``;
    returns the row as it is now."""
    from factory.ledger.ledger import record, segments
    from factory.ledger.snapshot import Snapshot

    step = newest_step(row)
    before = _steps_at_deaths(ledger, row.id)
    progress = bool(before) and step is not None and step > max(before)
    attempts = 1 if progress else row.attempts + 1
    parked = final or attempts >= tries
    with ledger.begin() as tx:
        refuse_rewound(Snapshot(tx, ledger.root), row.id)
        outcome = {"state": "failed", "finished_at": time.time()} if parked else {}
        tx.execute(segments.update().where(segments.c.id == row.id).values(attempts=attempts, **outcome))
        detail = {"exit": code, "how": ending.kind, "said": ending.says, "step": step, "tries": attempts}
        record(tx, FAILED if parked else STUMBLED, Subject("segment", row.id), detail)
    return SegmentRow.get(ledger, row.id)


def _steps_at_deaths(db: Reads, segment: int) -> list[int]:
    """Of the newest checkpoint at each death since a person had the segment tried again; −1: there was none."""
    subject = str(Subject("segment", segment))
    rows = db.read("SELECT kind, detail FROM events WHERE subject = :subject ORDER BY id", subject=subject)
    steps: list[int] = []
    for row in rows:
        if row["kind"] == RETRIED:
            steps = []
        elif row["kind"] == STUMBLED:
            step = (row["detail"] or {}).get("step")
            steps.append(-1 if step is None else step)
    return steps


def open_segment(db: Reads) -> int | None:
    """The oldest that is planned and not done."""
    row = SegmentRow.first(db, "WHERE state = 'planned' ORDER BY id")
    return row.id if row else None


def parked(db: Reads) -> SegmentRow | None:
    """The newest segment that trains, if it is parked: a person decides about it before anything else trains."""
    newest = SegmentRow.first(db, "WHERE kind <> 'average' ORDER BY id DESC")
    return newest if newest is not None and newest.state == "failed" else None


def why_parked(db: Reads, row: SegmentRow) -> str:
    """What is parked, where and why."""
    step = newest_step(row)
    where = f"at step {step}" if step is not None else "before its first checkpoint"
    newest = db.read(
        f"SELECT detail FROM events WHERE subject = :subject AND kind = '{FAILED}' ORDER BY id DESC LIMIT 1",
        subject=str(Subject("segment", row.id)),
    )
    said = str(newest[0]["detail"].get("said") or "") if newest else ""
    name = f"segment {row.id} ({row.kind}, steps {row.first_step}–{row.last_step})"
    return f"{name} is parked {where}" + (f": it {said}" if said else "")


def ways_on(row: SegmentRow) -> str:
    """The commands that can help."""
    return f"factory retry {row.id}, or factory abandon {row.id}"


def describe_parked(db: Reads, row: SegmentRow) -> str:
    """``why_parked``, and the two commands to choose from."""
    step = newest_step(row)
    goes_on = f"goes on from step {step}" if step is not None else "begins it again"
    return (
        f"{why_parked(db, row)}. Training waits: correct the cause, then 'factory retry {row.id}' {goes_on}, with the recipe and the data that "
        f"are frozen in it; 'factory abandon {row.id}' gives its steps up and trains on from before them, with those that there are then"
    )


def refuse_parked(db: Reads) -> None:
    """Raises: InputError while a segment is parked."""
    if row := parked(db):
        raise InputError(describe_parked(db, row))


def newest_asked(db: Reads) -> int:
    """The number of the newest event that asks for another try; 0: none does."""
    return int(db.read("SELECT MAX(id) AS id FROM events WHERE kind = :kind", kind=ASKED)[0]["id"] or 0)


def retry(ledger: Ledger, segment: int | None, by: str) -> str:
    """Have the daemon try all at once that waits after a failure, and a parked segment again; returns a line for a person.

    Raises: InputError for a segment that is neither parked nor planned.
    """
    from factory.ledger.ledger import record, segments

    if segment is None:
        with ledger.begin() as tx:
            record(tx, ASKED, "daemon", {"by": by, "segment": None})
        return "the daemon tries again now what waits after a failure"
    row = SegmentRow.get(ledger, segment)
    with ledger.begin() as tx:
        changed = {"state": "planned", "attempts": 0, "finished_at": None}
        # The daemon may end it meanwhile.
        mine = (segments.c.id == segment) & segments.c.state.in_(("failed", "planned"))
        if not tx.execute(segments.update().where(mine).values(**changed)).rowcount:
            raise InputError(
                f"segment {segment} is {row.state}: only a parked segment, or one that waits, is tried again"
            )
        record(tx, ASKED, "daemon", {"by": by, "segment": segment})
        record(tx, RETRIED, Subject("segment", segment), {"by": by})
    step = newest_step(row)
    return f"segment {segment} goes on from {f'step {step}' if step is not None else 'its beginning'} at the next pass"


def abandon(ledger: Ledger, segment: int, by: str) -> str:
    """Give up what a parked segment trained: the next one goes on from what was done before it. Its folder stays.

    Raises: InputError for a segment that is not parked.
    """
    from factory.ledger.ledger import record, segments

    row = SegmentRow.get(ledger, segment)
    step = newest_step(row)
    with ledger.begin() as tx:
        mine = (segments.c.id == segment) & (segments.c.state == "failed")
        if not tx.execute(segments.update().where(mine).values(state="abandoned")).rowcount:
            raise InputError(f"segment {segment} is {row.state}, not parked: there is nothing to abandon")
        record(tx, ABANDONED, Subject("segment", segment), {"by": by, "step": step})
    begins = f"from step {row.first_step}" if row.parent else "anew, at step 0"
    lost = f"{step - row.first_step} steps are given up" if step is not None else "no step is lost"
    return f"segment {segment} is abandoned: {lost}, and the next one goes on {begins}. Its checkpoints stay in {row.folder}"
