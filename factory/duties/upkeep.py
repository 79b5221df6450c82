"""Quick duties about arrived files, order in the workspace, and pages for people. They are done in each pass or in the background."""

from __future__ import annotations

from functools import lru_cache

from factory.backups.backups import back_up_daily
from factory.core.errors import FactoryError
from factory.core.faults import LOCKED, find_fault_in
from factory.duties.duty import Duty, always_due
from factory.erasing.erasing import finish_pending_removals
from factory.ingest.inbox import ingest_inbox_file, list_complete_files, update_inbox
from factory.ingest.replay_corpus import find_waiting_replay_corpus, ingest_replay_corpus
from factory.ledger.plant import Plant
from factory.releasable.recorded_report import update_report_if_stale
from factory.release.releases import finish_interrupted_releases
from factory.show.mlflow.approval_answers import ApprovalResponder
from factory.show.notifications.delivery import Notifier
from factory.show.unshown_items import show_unshown_items
from kernels.contract.message import Message

UPDATE_INBOX = Duty(
    "update_inbox",
    Message(
        "duties.update_inbox",
        "move files back to the inbox if they changed or if a quarantined file may be readable now, and report which files "
        "wait and why",
    ),
    due=lambda state: (state.settle,),
    do=update_inbox,
    each="pass",
)
INGEST = Duty(
    "ingest",
    Message("duties.ingest", "ingest a file of the inbox"),
    due=lambda state: list_complete_files(state.plant, state.settle),
    do=ingest_inbox_file,
    recurs=True,
)
INGEST_REPLAY = Duty(
    "ingest_replay",
    Message(
        "duties.ingest_replay",
        "ingest the replay_corpus of data.yaml: documents like those that an imported model knew",
    ),
    due=lambda state: filter(None, [find_waiting_replay_corpus(state.plant)]),
    do=ingest_replay_corpus,
)


def _back_up(plant: Plant, _: None) -> None:
    """Make the daily backup. A full disk fails only this duty and does not end the pass, because later duties free space."""
    try:
        said = back_up_daily(plant)
    except Exception as error:
        fault = find_fault_in(error)
        if fault is None or fault == LOCKED:
            raise
        raise FactoryError(
            "duties.no_backup",
            "The daemon made no backup: {fault}. To continue, {to_do}.",
            fault=fault.description,
            to_do=fault.remedy.rstrip(", "),
        ) from None
    if said:
        plant.print_line(f"  {said}")


BACK_UP = Duty("back_up", Message("duties.back_up", "make a backup once a day"), always_due, _back_up, each="pass")
FINISH_REMOVALS = Duty(
    "finish_removals", Message("duties.finish_removals", "erase documents that a person removed, and mark the releases that were trained on "
                                                         "them"), always_due,
    lambda plant, _: finish_pending_removals(plant), each="pass",
)  # fmt: skip
REPORT_RELEASABLE = Duty(
    "report_releasable", Message("duties.report_releasable", "after a change, check whether the data allow a release"), always_due,
    lambda plant, _: update_report_if_stale(plant), each="look",
)  # fmt: skip


# One object of each in a process: it keeps the waits after failures, and reports each waiting item once.
_notifier, _answers = lru_cache(maxsize=1)(Notifier), lru_cache(maxsize=1)(ApprovalResponder)

UPDATE_SERVED_FOLDER = Duty(
    "publish",
    Message("duties.publish", "update the folder of the served release"),
    always_due,
    lambda plant, _: finish_interrupted_releases(plant),
    each="pass",
)
PUBLISH_REPORTS = Duty(
    "show", Message("duties.show", "add new results to MLflow and to reports/"), always_due, lambda plant, _: show_unshown_items(plant), each="look"
)  # fmt: skip
NOTIFY = Duty(
    "notify", Message("duties.notify", "send notifications to their receivers"), always_due, lambda plant, _: _notifier(plant).deliver_new_events(),
    in_background=2.0, at_end=True,
)  # fmt: skip
ANSWER_APPROVALS = Duty(
    "answer_approvals", Message("duties.answer_approvals", "read people's decisions about candidates from MLflow"), always_due,
    lambda plant, _: _answers(plant).answer_and_announce_decisions(), in_background=15.0,
)  # fmt: skip
