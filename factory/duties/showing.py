"""What people see, and what they say there: MLflow, the folder that is served, receivers of notifications."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from factory.duties.duty import Duty, always
from factory.ledger.plant import Plant

if TYPE_CHECKING:
    from factory.show.mlflow.answering import ApprovalAnswers
    from factory.show.telling.delivery import Notifier


def _publish(plant: Plant, _: None) -> None:
    from factory.release.releases import reconcile

    reconcile(plant)


def _show(plant: Plant, _: None) -> None:
    from factory.show.catching_up import catch_up

    catch_up(plant)


@lru_cache(maxsize=1)  # waits after failures are kept in the process
def _notifier(plant: Plant) -> Notifier:
    from factory.show.telling.delivery import Notifier

    return Notifier(plant)


@lru_cache(maxsize=1)  # it says once what waits already
def _answers(plant: Plant) -> ApprovalAnswers:
    from factory.show.mlflow.answering import ApprovalAnswers

    return ApprovalAnswers(plant)


PUBLISH = Duty("publish", "bring the served folder up to date", always, _publish, each="pass")
SHOW = Duty("show", "show in MLflow and in reports/ what they do not show yet", always, _show, each="look")
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
