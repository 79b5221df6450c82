"""The daemon's duties, one at a time."""

from __future__ import annotations

from factory.duties.duty import DutyState, DutyTask
from factory.duties.runner import find_next_duty_tasks
from factory.duties.table import DUTIES
from factory.ledger.plant import Plant


def next_due(plant: Plant, settle: float = 0.0, endless: bool = False) -> str:
    """What a pass would do first, as text; empty: nothing."""
    with plant.ledger.snapshot() as db:
        found = find_next_duty_tasks(DutyState(plant, db, DUTIES, settle=settle, endless=endless))
    return next((str(errand) for errand in found if not errand.duty.each), "")


def due_of(plant: Plant, name: str) -> list[object]:
    """The subjects for which a duty is due, whatever comes before it."""
    duty = next(one for one in DUTIES if one.name == name)
    return list(duty.due(DutyState(plant, plant.ledger, DUTIES)))


def do(plant: Plant, words: str) -> None:
    """``do(plant, "judge 3")``"""
    DutyTask.parse(words, DUTIES).do(plant)


def stuck(plant: Plant) -> int | None:
    """The segment after which training waits for a person."""
    return DutyState(plant, plant.ledger).stuck_segment
