"""What people see, and what they say there: MLflow, the folder that is served, receivers of notifications."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from factory.duties.duty import Duty, always
from factory.ledger.plant import Plant

if TYPE_CHECKING:
    from factory.notifying.delivery import Notifier
    from factory.release.answering import ApprovalAnswers


def _publish(plant: Plant, _: None) -> None:
    from factory.release.releases import reconcile

    reconcile(plant)


def _catch_up(plant: Plant, _: None) -> None:
    from factory.tracking.missed import show_missed

    show_missed(plant, plant.progress.line)


@lru_cache(maxsize=1)  # waits after failures are kept in the process
def _notifier(plant: Plant) -> Notifier:
    from factory.notifying.delivery import Notifier

    return Notifier(plant)


@lru_cache(maxsize=1)  # it says once what waits already
def _answers(plant: Plant) -> ApprovalAnswers:
    from factory.release.answering import ApprovalAnswers

    return ApprovalAnswers(plant)


PUBLISH = Duty("publish", "bring MLflow's registry and the served folder up to date", always, _publish, each="pass")
CATCH_UP_MLFLOW = Duty("catch_up_mlflow", "show in MLflow what it missed", always, _catch_up, each="pass")
NOTIFY = Duty(
    "notify",
    "tell the receivers of notifications",
    always,
    lambda plant, _: _notifier(plant).look(),
    beside=2.0,
    at_end=True,
)
ANSWER_APPROVALS = Duty(
    "answer_approvals",
    "hear what people say of candidates in MLflow",
    always,
    lambda plant, _: _answers(plant).look_and_ask(),
    beside=15.0,
)
