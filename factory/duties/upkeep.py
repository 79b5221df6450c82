"""What arrives, what is kept in order and what people see: quick, and done in each pass or beside all else.

Apart because a duty is an entry here or a file, and one line of the table.
"""

from __future__ import annotations

from functools import lru_cache

from factory.backups.backups import back_up_daily
from factory.core.errors import FactoryError
from factory.core.faults import LOCKED, fault_of
from factory.duties.duty import Duty, always
from factory.erasing.erasing import finish_removals
from factory.ingest.inbox import arrived, take, update_inbox
from factory.ledger.plant import Plant
from factory.releasable.recorded import refresh
from factory.release.releases import reconcile
from factory.show.catching_up import catch_up
from factory.show.mlflow.answering import ApprovalAnswers
from factory.show.telling.delivery import Notifier

UPDATE_INBOX = Duty(
    "update_inbox",
    "return to the inbox what may be readable by now, and say what waits there and why",
    due=lambda look: (look.settle,),
    do=update_inbox,
    each="pass",
)
INGEST = Duty(
    "ingest", "ingest a file of the inbox", due=lambda look: arrived(look.plant, look.settle), do=take, recurs=True
)


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


# One each in a process: waits after failures are kept in it, and what waits already is said once.
_notifier, _answers = lru_cache(maxsize=1)(Notifier), lru_cache(maxsize=1)(ApprovalAnswers)

PUBLISH = Duty("publish", "bring the served folder up to date", always, lambda plant, _: reconcile(plant), each="pass")
SHOW = Duty(
    "show", "show in MLflow and in reports/ what they do not show yet", always, lambda plant, _: catch_up(plant), each="look"
)  # fmt: skip
NOTIFY = Duty(
    "notify", "tell the receivers of notifications", always, lambda plant, _: _notifier(plant).look(), in_background=2.0, at_end=True
)  # fmt: skip
ANSWER_APPROVALS = Duty(
    "answer_approvals", "hear what people say of candidates in MLflow", always, lambda plant, _: _answers(plant).look_and_ask(), in_background=15.0
)  # fmt: skip
