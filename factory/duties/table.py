"""The list: what the daemon does, in the order in which it looks. What is due first is done, then the list is read again.

First what each pass begins with, then what arrived, what is half done, what follows from the newest checkpoint, and new training; what only
improves the factory comes where nothing else is to be done.
"""

from __future__ import annotations

from factory.duties.anomalies import DIAGNOSE, WORD
from factory.duties.asked import ASKED
from factory.duties.duty import Duty
from factory.duties.patches import (
    AUDIT,
    FOLLOW_APPROVALS,
    IMPROVE,
    JUDGE_HELD_AGAIN,
    JUDGE_MERGED_AGAIN,
    OPEN_REVERTS,
    OVERDUE_AUDIT,
)
from factory.duties.releasing import EXPORT, FINISH_RELEASE, JUDGE, RELEASE
from factory.duties.training import PLAN_ANNEAL, PLAN_TRUNK, REPLICATE, TRAIN
from factory.duties.upkeep import (
    ANSWER_APPROVALS,
    BACK_UP,
    FINISH_REMOVALS,
    INGEST,
    NOTIFY,
    PUBLISH,
    REPORT_RELEASABLE,
    SHOW,
    UPDATE_INBOX,
)

DUTIES: tuple[Duty, ...] = (
    NOTIFY,  # beside all else
    ANSWER_APPROVALS,
    BACK_UP,  # once in each pass
    FINISH_REMOVALS,
    UPDATE_INBOX,
    PUBLISH,
    OPEN_REVERTS,
    FOLLOW_APPROVALS,
    JUDGE_MERGED_AGAIN,
    JUDGE_HELD_AGAIN,
    INGEST,
    REPORT_RELEASABLE,
    SHOW,
    FINISH_RELEASE,
    TRAIN,
    EXPORT,
    DIAGNOSE,  # before its candidate is judged, which is held if the segment is rewound
    RELEASE,
    JUDGE,
    ASKED,
    WORD,  # after what follows from the diagnosis, and before what lasts
    OVERDUE_AUDIT,
    PLAN_ANNEAL,
    REPLICATE,  # while the checkpoint is there that it begins at
    PLAN_TRUNK,
    AUDIT,
    IMPROVE,
)
