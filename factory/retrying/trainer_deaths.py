"""Finds out how a trainer ended, and counts the tries of a segment.

The exit code, the log and the kernel's count of OOM kills show whether a trainer crashed, was killed, ran out of memory, or hung. After a
death, the trainer starts again from its newest checkpoint. Each new checkpoint sets the count of deaths to zero. A segment without progress is
parked. Nothing else is planned while a segment is parked, until a person runs ``factory retry`` or ``factory abandon``.
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
from factory.core.faults import is_machine_fault_unrelated_to_files
from factory.core.launching import EXIT_DISK_FULL, EXIT_STOPPED
from factory.core.untrusted_trainer_files import read_json_object
from factory.ledger.rows import SegmentRow, SqlReader, Subject
from factory.retrying.daemon_requests import refuse_rewound_segment
from kernels.contract.message import Message

if TYPE_CHECKING:
    from factory.ledger.ledger import Ledger


HUNG, OUT_OF_MEMORY, KILLED, CRASHED, REFUSED = "hung", "out of memory", "killed", "crashed", "failed"
# Patterns for lines of torchrun. Untrusted code can write such lines too. Signals and exit codes have at most three digits.
RANK_SIGNAL = re.compile(r"Signal\s(\d{1,3})\s\(SIG\w+\)\sreceived\sby\sPID\s\d+|exitcode\s*: -(\d{1,3}) ")
RANK_EXIT_CODE = re.compile(r"exitcode\s*: (-?\d{1,3}) ")
OUT_OF_MEMORY_TEXT = re.compile(
    r"out\sof\smemory|OutOfMemoryError|(can't|Cannot)\sallocate\smemory|MemoryError|bad_alloc"
)


@dataclass(frozen=True)
class TrainerFailure:
    """How a trainer ended."""

    kind: str  # HUNG, OUT_OF_MEMORY, KILLED, CRASHED or REFUSED
    says: str  # a predicate, to follow 'the trainer of segment 3'


def count_oom_kills() -> int | None:
    """Return how many processes the kernel's OOM killer has killed since the machine started; None if the kernel does not count them."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None


def classify_trainer_ending(code: int, log_line: str, log: str, kills_before: int | None) -> TrainerFailure:
    """Return how a trainer ended.

    ``code``: its exit code, −n after signal n. ``log_line``: the most helpful line of its log. ``log``: the end of its log. ``kills_before``: the
    result of ``count_oom_kills`` before the trainer started.

    >>> classify_trainer_ending(1, "trainer: no", "", None)
    TrainerFailure(kind='failed', says='ended with exit 1: trainer: no')
    """
    cause = f": {log_line}" if log_line else ""
    if code == EXIT_STOPPED:
        if all(int(other) in (EXIT_STOPPED, -signal.SIGTERM) for other in RANK_EXIT_CODE.findall(log)):
            return TrainerFailure(
                KILLED,
                Message(
                    "retrying.ended.stopped",
                    "received SIGTERM from another process, not from this factory, and stopped{cause}",
                    cause=cause,
                ),
            )
        code = 1  # torchrun stopped the other ranks because one had failed
    if code == EXIT_DISK_FULL:
        return TrainerFailure(
            REFUSED,
            Message(
                "retrying.ended.disk_not_full",
                "reported a full disk, but the disk has room for a checkpoint{cause}",
                cause=cause,
            ),
        )
    if code == -signal.SIGTERM:
        return TrainerFailure(
            KILLED,
            Message("retrying.ended.terminated", "was ended by SIGTERM from another process, not from this factory"),
        )
    number = _signal(code, log)
    if number == signal.SIGKILL:
        kills = count_oom_kills()
        if kills is not None and kills_before is not None and kills > kills_before:
            return TrainerFailure(
                OUT_OF_MEMORY,
                Message(
                    "retrying.ended.oom_killer",
                    "was killed by the kernel's OOM killer (SIGKILL): the machine or the process's control group has too little memory",
                ),
            )
        return TrainerFailure(
            KILLED,
            Message(
                "retrying.ended.killed", "was killed by another process (SIGKILL), not by this machine's OOM killer"
            ),
        )
    if code > 0 and OUT_OF_MEMORY_TEXT.search(log_line):
        return TrainerFailure(
            OUT_OF_MEMORY,
            Message(
                "retrying.ended.out_of_memory",
                "ran out of memory and ended with exit {code}{cause}",
                code=code,
                cause=cause,
            ),
        )
    if number:
        return TrainerFailure(
            CRASHED,
            Message("retrying.ended.signal", "ended with signal {signal}{cause}", signal=_name(number), cause=cause),
        )
    return TrainerFailure(
        REFUSED, Message("retrying.ended.exit", "ended with exit {code}{cause}", code=code, cause=cause)
    )


def classify_exceeded_limit(code: int, says: str) -> TrainerFailure | None:
    """Return how a trainer ended that exceeded a limit of its sandbox; None if it did not. ``says``: ``RunningCommand.exceeded_limit``.

    Another try may need less, as after a leak, so such an end is a crash, and is repeated as one.
    """
    return TrainerFailure(CRASHED, says) if says and code else None


def _signal(code: int, log: str) -> int:
    """Return the signal that ended the trainer, or that ended the first rank in torchrun's report; 0: none."""
    if code < 0:
        return -code
    found = RANK_SIGNAL.search(log) if code == 1 else None
    return int(found.group(1) or found.group(2)) if found else 0


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


CHECKPOINT_NAME = re.compile(r"step-(\d{1,15})")
SEGMENT_STUMBLED, FAILED, SEGMENT_RETRIED, SEGMENT_ABANDONED, ASKED = (
    "segment_stumbled", "segment_failed", "segment_retried", "segment_abandoned", "retry_asked",
)  # fmt: skip


class TrainerDiedError(SegmentError):
    """A trainer ended before the end of its segment. ``tries``: deaths since the segment's newest checkpoint."""

    def __init__(self, message: str, tries: int, parked: bool) -> None:
        super().__init__(message)
        self.tries, self.parked = tries, parked


def find_newest_checkpoint_step(row: SegmentRow) -> int | None:
    """Return the step of a segment's newest complete checkpoint, or None. An incomplete folder with the name of a checkpoint does not count."""
    found = ((CHECKPOINT_NAME.fullmatch(path.name), path) for path in (Path(row.folder) / "checkpoints").glob("step-*"))
    steps = ((int(named.group(1)), path) for named, path in found if named)
    return max(
        (step for step, path in steps if row.first_step < step <= row.last_step and _is_whole(path)), default=None
    )


def _is_whole(checkpoint: Path) -> bool:
    """Return whether all files of the manifest exist with the right length. Code that reads the files checks their hashes."""
    try:
        files = read_json_object(checkpoint / "manifest.json")["files"]
        return bool(files) and all((checkpoint / name).stat().st_size == file["bytes"] for name, file in files.items())
    except (SegmentError, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        if is_machine_fault_unrelated_to_files(error):
            raise
        return False


def record_trainer_death(
    ledger: Ledger, row: SegmentRow, ending: TrainerFailure, code: int, tries: int, park_now: bool
) -> SegmentRow:
    """Record how a segment's trainer ended. Returns the segment's new row.

    The segment is parked after ``tries`` deaths without progress; with ``park_now``, after this death.
    """
    from factory.ledger.ledger import record_event, segments
    from factory.ledger.snapshot import Snapshot

    step = find_newest_checkpoint_step(row)
    before = _steps_at_deaths(ledger, row.id)
    progress = bool(before) and step is not None and step > max(before)
    attempts = 1 if progress else row.attempts + 1
    parked = park_now or attempts >= tries
    with ledger.begin() as tx:
        refuse_rewound_segment(Snapshot(tx, ledger.root), row.id)
        outcome = {"state": "failed", "finished_at": time.time()} if parked else {}
        tx.execute(segments.update().where(segments.c.id == row.id).values(attempts=attempts, **outcome))
        detail = {"exit": code, "how": ending.kind, "said": ending.says, "step": step, "tries": attempts}
        record_event(tx, FAILED if parked else SEGMENT_STUMBLED, Subject("segment", row.id), detail)
    return SegmentRow.get(ledger, row.id)


def _steps_at_deaths(db: SqlReader, segment: int) -> list[int]:
    """Return, for each death since the last ``factory retry`` of the segment, the step of the newest checkpoint; −1: no checkpoint."""
    subject = str(Subject("segment", segment))
    rows = db.read("SELECT kind, detail FROM events WHERE subject = :subject ORDER BY id", subject=subject)
    steps: list[int] = []
    for row in rows:
        if row["kind"] == SEGMENT_RETRIED:
            steps = []
        elif row["kind"] == SEGMENT_STUMBLED:
            step = (row["detail"] or {}).get("step")
            steps.append(-1 if step is None else step)
    return steps


def find_open_segment(db: SqlReader) -> int | None:
    """Return the number of the oldest segment in the state 'planned', or None."""
    row = SegmentRow.find_first(db, "WHERE state = 'planned' ORDER BY id")
    return row.id if row else None


def find_parked_segment(db: SqlReader) -> SegmentRow | None:
    """Return the newest segment (averages do not count) if it is parked, else None. No other segment trains before a person decides about it."""
    newest = SegmentRow.find_first(db, "WHERE kind <> 'average' ORDER BY id DESC")
    return newest if newest is not None and newest.state == "failed" else None


def describe_parked_segment(db: SqlReader, row: SegmentRow) -> Message:
    """Return a line that says which segment is parked, at which step and why."""
    step = find_newest_checkpoint_step(row)
    begun = Message("retrying.before_first_checkpoint", "before its first checkpoint")
    where = f"at step {step}" if step is not None else begun
    newest = db.read(
        f"SELECT detail FROM events WHERE subject = :subject AND kind = '{FAILED}' ORDER BY id DESC LIMIT 1",
        subject=str(Subject("segment", row.id)),
    )
    said = str(newest[0]["detail"].get("said") or "") if newest else ""
    return Message(
        "retrying.parked", "Segment {segment} ({kind}, steps {first}–{last}) is parked {where}{why}", segment=row.id, kind=row.kind,
        first=row.first_step, last=row.last_step, where=where, step=step, why=f": its trainer {said}" if said else "",
    )  # fmt: skip


def format_commands_for_parked_segment(row: SegmentRow) -> Message:
    """Return the two commands for a parked segment: a person chooses one."""
    return Message("retrying.parked_commands", "factory retry {segment}, or factory abandon {segment}", segment=row.id)


def explain_parked_segment(db: SqlReader, row: SegmentRow) -> Message:
    """Return ``describe_parked_segment`` with the two commands and their effects."""
    step = find_newest_checkpoint_step(row)
    return Message(
        "retrying.parked_to_do", "{parked}. Training waits until a person decides. To continue the segment from {start} with its recipe and data, "
        "correct the cause and run 'factory retry {segment}'. To give up the segment's steps and train with the present recipe and data, run "
        "'factory abandon {segment}'.", parked=describe_parked_segment(db, row), start=format_segment_start(step), step=step, segment=row.id,
    )  # fmt: skip


def format_segment_start(step: int | None) -> str:
    """Return in words from where a segment continues.

    >>> format_segment_start(40), format_segment_start(None)
    ('step 40', 'its beginning')
    """
    return f"step {step}" if step is not None else "its beginning"


def refuse_while_parked(db: SqlReader) -> None:
    """Raises: InputError while a segment is parked."""
    if row := find_parked_segment(db):
        raise InputError(explain_parked_segment(db, row))


def find_newest_retry_request(db: SqlReader) -> int:
    """Return the number of the newest event in which a person asked for another try; 0 without one."""
    return int(db.read("SELECT MAX(id) AS id FROM events WHERE kind = :kind", kind=ASKED)[0]["id"] or 0)


def request_retry(ledger: Ledger, segment: int | None, by: str) -> Message:
    """Request that the daemon retries now: all work that waits after a failure, and ``segment`` if it is given. Returns a line for a person.

    Raises: InputError for a segment that is neither parked nor planned.
    """
    from factory.ledger.ledger import record_event, segments

    if segment is None:
        with ledger.begin() as tx:
            record_event(tx, ASKED, "daemon", {"by": by, "segment": None})
        return Message("retrying.retry_all", "The daemon now retries all work that waits after a failure.")
    row = SegmentRow.get(ledger, segment)
    with ledger.begin() as tx:
        changed = {"state": "planned", "attempts": 0, "finished_at": None}
        # The daemon may finish the segment meanwhile.
        mine = (segments.c.id == segment) & segments.c.state.in_(("failed", "planned"))
        if not tx.execute(segments.update().where(mine).values(**changed)).rowcount:
            raise InputError(
                "retrying.cannot_retry", "Segment {segment} is {state}. Only a parked or planned segment can be tried again.",
                segment=segment, state=row.state,
            )  # fmt: skip
        record_event(tx, ASKED, "daemon", {"by": by, "segment": segment})
        record_event(tx, SEGMENT_RETRIED, Subject("segment", segment), {"by": by})
    step = find_newest_checkpoint_step(row)
    return Message(
        "retrying.retried", "The daemon continues segment {segment} from {start} in its next pass.",
        segment=segment, start=format_segment_start(step), step=step,
    )  # fmt: skip


def abandon_segment(ledger: Ledger, segment: int, by: str) -> Message:
    """Give up the steps of a parked segment. The next segment starts where this one started. Its folder stays. Returns a line for a person.

    Raises: InputError for a segment that is not parked.
    """
    from factory.ledger.ledger import record_event, segments

    row = SegmentRow.get(ledger, segment)
    step = find_newest_checkpoint_step(row)
    with ledger.begin() as tx:
        mine = (segments.c.id == segment) & (segments.c.state == "failed")
        if not tx.execute(segments.update().where(mine).values(state="abandoned")).rowcount:
            raise InputError(
                "retrying.cannot_abandon",
                "Segment {segment} is {state}. Only a parked segment can be abandoned.",
                segment=segment,
                state=row.state,
            )
        record_event(tx, SEGMENT_ABANDONED, Subject("segment", segment), {"by": by, "step": step})
    return Message(
        "retrying.abandoned",
        "Segment {segment} is abandoned, so {lost:,|trained step is|trained steps are} given up. The next segment starts from step {first}. "
        "The checkpoints stay in {folder}.", segment=segment, lost=step - row.first_step if step is not None else 0,
        first=row.first_step if row.parent else 0, folder=row.folder,
    )  # fmt: skip
