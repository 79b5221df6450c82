"""The classes of a duty, of the state that it looks at, and of an errand, which is a duty to be done on one subject."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from factory.core.errors import InputError
from factory.ingest.inbox import SETTLE_SECONDS
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, SqlReader
from factory.retrying.daemon_requests import EVERYTHING, Pause, find_current_pause
from factory.retrying.trainer_deaths import find_open_segment
from kernels.contract.message import Message


@dataclass
class DutyState:
    """The state of the factory at one moment, for each ``due``. Each value of the ledger is read once."""

    plant: Plant
    db: SqlReader  # the ledger, at one moment
    duties: tuple[Duty, ...] = ()  # the list of duties, for the requests of a person
    low_on_disk: bool = False
    resting: frozenset[str] = frozenset()  # failed errands, as text, that are not tried now
    failing: frozenset[str] = frozenset()  # errands that failed when they were last tried
    settle: float = SETTLE_SECONDS  # a file of the inbox is ready after this many seconds without a change
    endless: bool = False  # the trunk continues without new shards while epochs are left

    @cached_property
    def pause(self) -> Pause | None:
        return find_current_pause(self.db)

    @cached_property
    def unfinished_segment(self) -> int | None:
        """The segment that is planned and not done, or None."""
        return find_open_segment(self.db)

    @cached_property
    def stuck_segment(self) -> int | None:
        """The newest segment that trains, if it is parked or if the live code was refused for it; else None. Training then waits for a person."""
        row = SegmentRow.find_first(self.db, "WHERE kind <> 'average' ORDER BY id DESC")
        if row is None or row.state not in ("failed", "uncertified"):
            return None
        if row.state == "uncertified":
            from factory.git.repository import get_live_commit

            if get_live_commit(self.plant.workspace.repository) != row.code_commit:
                return None
        return row.id

    def list_waiting_subjects(self, name: str) -> list[int]:
        """Return the numbers of the subjects that a duty should not try now."""
        return [int(key.removeprefix(f"{name} ")) for key in self.resting if key.startswith(f"{name} ")]


def always_due(state: DutyState) -> Iterable[object]:
    """Return ``(None,)``: the ``due`` of a duty whose ``do`` finds out whether there is work."""
    return (None,)


@dataclass(frozen=True)
class Duty:
    """One kind of work of the daemon. Its rank is its place in ``factory.duties.table``."""

    name: str  # a verb and its object as one word, for requests of a person and messages about failures
    description: str  # a line for 'factory duties'
    # The subjects that wait, most urgent first: a number, a path, None, or a DutyTask of another duty.
    due: Callable[[DutyState], Iterable[object]]
    do: Callable[..., object]  # do(plant, subject): safe to repeat; its own transaction records it
    trains: bool = False  # starts trainers: waits while training is paused
    fills_disk: bool = False  # waits while the disk is below its floor
    plans: bool = False  # plans a segment: waits while a segment is open, or waits for a person
    when_idle: bool = False  # waits while a segment is open
    recurs: bool = False  # the same subject may be due again at once, for example a file with the same name
    # Done once in each pass before all others ("pass"), or before each later duty in the list ("look").
    each: Literal["", "pass", "look"] = ""
    in_background: float = 0.0  # seconds between two turns in a thread of its own, also while the daemon is paused
    at_end: bool = False  # a background duty that is also done before 'factory run --once' ends

    def find_reason_for_waiting(self, state: DutyState) -> str:
        """Return why the duty waits, whether or not it is due; empty if it does not wait."""
        if not self.in_background and state.pause and (self.trains or state.pause.what == EVERYTHING):
            return state.pause.message
        if self.fills_disk and state.low_on_disk:
            return Message(
                "duties.disk_low",
                "the disk has less free space than policies/retention.yaml requires (floor_bytes, floor_share)",
            )
        if (self.plans or self.when_idle) and state.unfinished_segment is not None:
            return Message("duties.segment_open", "segment {segment} is not done", segment=state.unfinished_segment)
        if self.plans and state.stuck_segment is not None:
            return Message(
                "duties.segment_stuck",
                "segment {segment} waits for a person's decision (run 'factory status')",
                segment=state.stuck_segment,
            )
        return ""

    @property
    def due_check_key(self) -> str:
        """The key of the errand that calls ``due`` again after ``due`` failed."""
        return f"check if {self.name} is due"


@dataclass(frozen=True)
class DutyTask:
    """An errand: a duty to be done on one subject. Its text, such as 'judge 3', is used in requests, for rests and in messages about failures."""

    duty: Duty
    subject: object = None

    def __str__(self) -> str:
        if self.duty.each or self.subject is None:
            return self.duty.name
        subject = self.subject
        if isinstance(subject, Path):
            subject = os.fsencode(subject.name).decode("utf-8", "backslashreplace")
        return f"{self.duty.name} {subject}"

    def do(self, plant: Plant) -> None:
        self.duty.do(plant, self.subject)

    @classmethod
    def parse(cls, text: str, duties: Iterable[Duty]) -> DutyTask:
        """Return the errand with this text. Raises: InputError for an unknown duty or an invalid number."""
        name, _, number = text.partition(" ")
        duty = next((one for one in duties if one.name == name and not one.in_background), None)
        if duty is None:
            raise InputError(
                "duties.unknown",
                "The request {request!r} does not name a known duty. Run 'factory duties' to list the duties.",
                request=text,
                duty=name,
            )
        if number and not number.isdecimal():
            raise InputError(
                "duties.no_number",
                "The request {request!r} has {number!r} where a number is expected.",
                request=text,
                number=number,
            )
        return cls(duty, int(number) if number else None)
