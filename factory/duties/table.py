"""The duties of the daemon in order. The daemon does the first duty that is due, then reads the list again.

The order is: duties at the start of each pass, arrived files, unfinished work, work on the newest checkpoint, new training. Duties that only improve
the factory come last.
"""

from __future__ import annotations

from factory.duties.anomalies import DIAGNOSE, WORD
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
from factory.duties.releasing import EXPORT, FINISH_RELEASE, JUDGE, MEASURE_IMPORT, RELEASE, RELEASE_IMPORT
from factory.duties.requests import ASKED
from factory.duties.training import PLAN_ANNEAL, PLAN_TRUNK, REPLICATE, TRAIN
from factory.duties.upkeep import (
    ANSWER_APPROVALS,
    BACK_UP,
    FINISH_REMOVALS,
    INGEST,
    INGEST_REPLAY,
    NOTIFY,
    PUBLISH_REPORTS,
    REPORT_RELEASABLE,
    UPDATE_INBOX,
    UPDATE_SERVED_FOLDER,
)

DUTIES: tuple[Duty, ...] = (
    NOTIFY,  # in the background
    ANSWER_APPROVALS,
    BACK_UP,  # once in each pass
    FINISH_REMOVALS,
    UPDATE_INBOX,
    UPDATE_SERVED_FOLDER,
    OPEN_REVERTS,
    FOLLOW_APPROVALS,
    JUDGE_MERGED_AGAIN,
    INGEST,
    REPORT_RELEASABLE,
    PUBLISH_REPORTS,
    INGEST_REPLAY,
    FINISH_RELEASE,
    TRAIN,
    EXPORT,
    RELEASE_IMPORT,
    MEASURE_IMPORT,  # before the first trunk segment
    DIAGNOSE,  # before JUDGE, because a candidate of a rewound segment is held
    RELEASE,
    JUDGE,
    ASKED,
    WORD,  # after the effects of a diagnosis, and before long work
    OVERDUE_AUDIT,
    PLAN_ANNEAL,
    REPLICATE,  # before the retention policy removes its first checkpoint
    PLAN_TRUNK,
    AUDIT,
    JUDGE_HELD_AGAIN,
    IMPROVE,
)
