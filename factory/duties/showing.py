"""What people see, and what they say there: MLflow, the folder that is served, receivers of notifications."""

from __future__ import annotations

from functools import lru_cache

from factory.duties.duty import Duty, always
from factory.release.releases import reconcile
from factory.show.catching_up import catch_up
from factory.show.mlflow.answering import ApprovalAnswers
from factory.show.telling.delivery import Notifier

# One each in a process: waits after failures are kept in it, and what waits already is said once.
_notifier, _answers = lru_cache(maxsize=1)(Notifier), lru_cache(maxsize=1)(ApprovalAnswers)

PUBLISH = Duty("publish", "bring the served folder up to date", always, lambda plant, _: reconcile(plant), each="pass")
SHOW = Duty(
    "show", "show in MLflow and in reports/ what they do not show yet", always, lambda plant, _: catch_up(plant), each="look"
)  # fmt: skip
NOTIFY = Duty(
    "notify", "tell the receivers of notifications", always, lambda plant, _: _notifier(plant).look(), beside=2.0, at_end=True
)  # fmt: skip
ANSWER_APPROVALS = Duty(
    "answer_approvals", "hear what people say of candidates in MLflow", always, lambda plant, _: _answers(plant).look_and_ask(), beside=15.0
)  # fmt: skip
