"""Small things that keep a factory in order.

Apart because a duty is one file, and one line of the table.
"""

from __future__ import annotations

from factory.backups.backups import back_up_daily
from factory.core.errors import FactoryError
from factory.core.faults import LOCKED, fault_of
from factory.duties.duty import Duty, always
from factory.erasing.erasing import finish_removals
from factory.ledger.plant import Plant
from factory.releasable.recorded import refresh


def _back_up(plant: Plant, _: None) -> None:
    """A copy for which there is no room ends no pass: it is one duty that failed, and what frees some room comes after it."""
    try:
        said = back_up_daily(plant)
    except Exception as error:
        fault = fault_of(error)
        if fault is None or fault == LOCKED:
            raise
        raise FactoryError(f"no backup was made: {fault.says}: {fault.do}") from None
    if said:
        plant.say(f"  {said}")


BACK_UP = Duty("back_up", "make a backup, once a day", always, _back_up, each="pass")
FINISH_REMOVALS = Duty(
    "finish_removals", "erase what a person took out, and mark releases that saw it", always, lambda plant, _: finish_removals(plant), each="pass"
)  # fmt: skip
REPORT_RELEASABLE = Duty(
    "report_releasable", "look whether the data can be released, when something changed", always, lambda plant, _: refresh(plant), each="look"
)  # fmt: skip
