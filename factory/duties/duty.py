"""What a duty says of itself, what it is asked, and one thing to do now."""

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
from factory.ledger.rows import Reads, SegmentRow
from factory.retrying.asking import EVERYTHING, Pause, pause_of
from factory.retrying.tries import open_segment


@dataclass
class Look:
    """What there is to see at one moment. Each ``due`` is asked with one; what is read of the ledger is read once."""

    plant: Plant
    db: Reads  # the ledger, at one moment
    duties: tuple[Duty, ...] = ()  # the list, which a person's requests name
    low_on_disk: bool = False
    resting: frozenset[str] = frozenset()  # errands, as text, that failed and are not tried now
    failing: frozenset[str] = frozenset()  # and those that failed when they were last tried
    settle: float = SETTLE_SECONDS  # for so long a file of the inbox is unchanged
    endless: bool = False  # the trunk goes on without new shards too, while epochs are left

    @cached_property
    def pause(self) -> Pause | None:
        return pause_of(self.db)

    @cached_property
    def open_segment(self) -> int | None:
        """Planned, not done."""
        return open_segment(self.db)

    @cached_property
    def stuck_segment(self) -> int | None:
        """The newest segment that trains, when it is parked, or the code that is live was refused for it: training waits for a person."""
        row = SegmentRow.first(self.db, "WHERE kind <> 'average' ORDER BY id DESC")
        if row is None or row.state not in ("failed", "uncertified"):
            return None
        if row.state == "uncertified":
            from factory.git.repository import live_commit

            if live_commit(self.plant.workspace.repository) != row.code_commit:
                return None
        return row.id

    def rests(self, name: str) -> list[int]:
        """The numbers for which a duty is not to be tried now."""
        return [int(key.removeprefix(f"{name} ")) for key in self.resting if key.startswith(f"{name} ")]


def always(look: Look) -> Iterable[object]:
    """``due`` of what looks itself whether there is anything to do."""
    return (None,)


@dataclass(frozen=True)
class Duty:
    """Its rank is its place in ``factory.duties.table``."""

    name: str  # a verb and its object, in one word: a person asks for it so, and failures are told of it
    does: str  # a line for 'factory duties'
    # What waits, most urgent first: a number, a path, None, or an Errand of another duty.
    due: Callable[[Look], Iterable[object]]
    do: Callable[..., object]  # do(plant, subject): safe to repeat, and recorded by its own transaction
    trains: bool = False  # it starts trainers: waits while training is paused
    fills_disk: bool = False  # waits while the disk is below its floor
    plans: bool = False  # it plans a segment: waits while one is open, or is stuck until a person decides
    when_idle: bool = False  # waits while a segment is open
    recurs: bool = False  # the same subject may be due again at once, as a file of the same name: it is no sign that nothing was done
    # Done once in each pass, before all else; or before whatever follows it in the list.
    each: Literal["", "pass", "look"] = ""
    in_background: float = 0.0  # done every so many seconds, in a thread of its own, whatever else is done or paused
    at_end: bool = False  # of one beside: also before 'factory run --once' ends

    def held(self, look: Look) -> str:
        """Why it waits whatever is due, in a few words; empty: it does not."""
        if not self.in_background and look.pause and (self.trains or look.pause.what == EVERYTHING):
            return str(look.pause)
        if self.fills_disk and look.low_on_disk:
            return "the disk is below its floor"
        if (self.plans or self.when_idle) and look.open_segment is not None:
            return f"segment {look.open_segment} is not done"
        if self.plans and look.stuck_segment is not None:
            return f"segment {look.stuck_segment} waits for a person: see 'factory status'"
        return ""


@dataclass(frozen=True)
class Errand:
    """A duty to be done on one subject. As text it is what a person asks for, what rests and what is said to fail: 'judge 3'."""

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
    def parse(cls, words: str, duties: Iterable[Duty]) -> Errand:
        """What a person asked for, as an errand prints itself. Raises: InputError for a duty or a number that is none."""
        name, _, number = words.partition(" ")
        duty = next((one for one in duties if one.name == name and not one.in_background), None)
        if duty is None:
            raise InputError(f"{words!r} was asked for, and no duty is called {name!r}: 'factory duties' lists them")
        if number and not number.isdecimal():
            raise InputError(f"{words!r} was asked for, and {number!r} is no number")
        return cls(duty, int(number) if number else None)
