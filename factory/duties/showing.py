"""What people see, and what they say there: MLflow, the folder that is served, receivers of notifications."""

from __future__ import annotations

from functools import lru_cache

from factory.duties.duty import Duty, always
from factory.notifying.delivery import Notifier
from factory.release.answering import ApprovalAnswers
from factory.release.releases import reconcile
from factory.tracking.missed import show_missed

# One each in a process: waits after failures are kept in it, and what waits already is said once.
_notifier, _answers = lru_cache(maxsize=1)(Notifier), lru_cache(maxsize=1)(ApprovalAnswers)

PUBLISH = Duty(
    "publish", "bring MLflow's registry and the served folder up to date", always, lambda plant, _: reconcile(plant), each="pass"
)  # fmt: skip
CATCH_UP_MLFLOW = Duty(
    "catch_up_mlflow", "show in MLflow what it missed", always, lambda plant, _: show_missed(plant, plant.progress.line), each="pass"
)  # fmt: skip
NOTIFY = Duty(
    "notify", "tell the receivers of notifications", always, lambda plant, _: _notifier(plant).look(), beside=2.0, at_end=True
)  # fmt: skip
ANSWER_APPROVALS = Duty(
    "answer_approvals", "hear what people say of candidates in MLflow", always, lambda plant, _: _answers(plant).look_and_ask(), beside=15.0
)  # fmt: skip
