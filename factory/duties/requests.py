"""The duty that carries out requests of people, such as 'judge 3', once. It comes after unfinished work and before long work.

A separate file, because each topic of duties is one file.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from factory.core.errors import InputError
from factory.duties.duty import Duty, DutyState, DutyTask, always_due
from factory.ledger.plant import Plant
from factory.retrying.daemon_requests import list_open_requests, record_finished_request
from kernels.contract.message import Message


def _asked(state: DutyState) -> list[DutyTask]:
    """Return the requested errands, oldest first. Those that start no trainer come before the others."""
    return sorted(_errands(state), key=lambda errand: errand.duty.trains)


def _errands(state: DutyState) -> Iterator[DutyTask]:
    for request, one in list_open_requests(state.db).items():
        try:
            yield DutyTask.parse(request, state.duties)
        except InputError as error:
            yield DutyTask(Duty("refuse", "", always_due, partial(_refuse, str(error), one["event"])), request)


def _refuse(why: str, event: int, plant: Plant, request: str) -> None:
    plant.print_line(f"  {why}")
    record_finished_request(plant.ledger, request, event)


ASKED = Duty(
    "asked",
    Message("duties.asked", "do the errands that people requested"),
    _asked,
    lambda plant, subject: None,
    fills_disk=True,
)
