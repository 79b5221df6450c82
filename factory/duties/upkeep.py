"""Small things that keep a factory in order."""

from __future__ import annotations

from factory.core.errors import FactoryError
from factory.core.faults import LOCKED, fault_of
from factory.duties.duty import Duty, always
from factory.ledger.plant import Plant


def _back_up(plant: Plant, _: None) -> None:
    """A copy for which there is no room ends no pass: it is one duty that failed, and what frees some room comes after it."""
    from factory.backups.backups import back_up_daily

    try:
        said = back_up_daily(plant)
    except Exception as error:
        fault = fault_of(error)
        if fault is None or fault == LOCKED:
            raise
        raise FactoryError(f"no backup was made: {fault.says}: {fault.do}") from None
    if said:
        plant.say(f"  {said}")


def _finish_removals(plant: Plant, _: None) -> None:
    from factory.erasing.erasing import finish_removals

    finish_removals(plant)


def _report(plant: Plant, _: None) -> None:
    from factory.releasable.recorded import refresh

    refresh(plant)


BACK_UP = Duty("back_up", "make a backup, once a day", always, _back_up, each="pass")
FINISH_REMOVALS = Duty(
    "finish_removals",
    "erase what a person took out, and mark releases that saw it",
    always,
    _finish_removals,
    each="pass",
)
REPORT_RELEASABLE = Duty(
    "report_releasable", "look whether the data can be released, when something changed", always, _report, each="look"
)
