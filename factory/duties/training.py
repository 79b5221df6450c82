"""Duties that plan and train the trunk, its anneals and their replicas."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from factory.audit.kept_checkpoints import keep_checkpoints_while_training, keep_window_checkpoints_while_training
from factory.duties.duty import Duty, DutyState
from factory.gates.release.policy import ReleasePolicy
from factory.ledger.anomalies import CLOSED, DOCUMENTS_FREED, DOCUMENTS_QUARANTINED
from factory.ledger.plant import Plant
from factory.ledger.removals import REMOVED, RETURNED, SHARD_ERASED
from factory.ledger.rows import SegmentRow
from factory.ledger.status import describe_average
from factory.ledger.writing import record_event_once
from factory.repairs.repairing import repair_segment_inputs
from factory.replicas.train_replicas import find_anneal_with_unfinished_replicas, train_next_replica
from factory.retention.cleaning import clean_after_segment
from factory.show.mlflow.runs import MlflowTracking
from factory.status.status import AHEAD
from factory.training.planning import TrunkForecast, forecast_trunk, plan_anneal, plan_trunk
from factory.training.rate_finder import find_rate_if_due
from factory.training.training import run_segment
from factory.training.tuning import tune_kernels_if_untuned
from kernels.contract.message import Message

_computed: dict[Path, tuple[Any, TrunkForecast]] = {}


def train_segment(plant: Plant, segment: int) -> None:
    """Train a planned segment and show its progress in MLflow. Afterwards, clean up."""
    row = SegmentRow.get(plant.ledger, segment)
    follower = MlflowTracking.open(plant).follow_segment(row, plant.progress.line)
    follower.make_run()
    try:
        with keep_window_checkpoints_while_training(plant, row), keep_checkpoints_while_training(plant.workspace, row):
            mend = lambda every: repair_segment_inputs(plant, segment, every)
            result = run_segment(plant, segment, follower, mend)
    finally:
        follower.finish()
    clean_after_segment(plant)
    loss = result.get("loss")
    if row.kind == "average":
        average = describe_average(result["averaged"])
        plant.print_line(
            Message("duties.average_made", "  segment {segment}: {average}", segment=segment, average=average)
        )
        return
    if not isinstance(loss, float):
        plant.print_line(Message("duties.segment_done", "  Segment {segment} is done.", segment=segment))
        return
    plant.print_line(
        Message(
            "duties.segment_trained",
            "  segment {segment} ({kind}): steps {first}–{last}, loss {loss:.3f}",
            segment=segment,
            kind=row.kind,
            first=row.first_step,
            last=row.last_step,
            loss=loss,
        )  # fmt: skip
    )


def _unannealed(state: DutyState) -> list[int]:
    """Return the newest finished trunk segment, if it has no anneal."""
    trunk = SegmentRow.find_first(state.db, "WHERE kind = 'trunk' AND state = 'done' ORDER BY id DESC")
    if trunk is None:
        return []
    which = "WHERE kind = 'anneal' AND parent = :trunk AND state NOT IN ('uncertified', 'rewound', 'abandoned')"
    return [] if SegmentRow.find_first(state.db, which, trunk=trunk.id) else [trunk.id]


def _unmeasured(state: DutyState) -> list[int]:
    """Return the anneal whose noise over data orders is not measured yet, if its first checkpoint exists."""
    workspace = state.plant.workspace
    found = find_anneal_with_unfinished_replicas(
        workspace, state.db, ReleasePolicy.load(workspace.policy_path("gates/release.yaml"))
    )
    return [] if found is None else [found]


def _trunk(state: DutyState) -> Iterable[None]:
    """Return ``(None,)`` if there is enough data for the next trunk segment and a reason to plan it: new shards, or an endless run."""
    if not state.db.read("SELECT id FROM token_shards WHERE tokens > 0 LIMIT 1"):
        return ()
    trunk = get_trunk_forecast(state)
    return (None,) if trunk.steps and (trunk.new_shards or (state.endless and trunk.steps == trunk.wanted)) else ()


def get_trunk_forecast(state: DutyState) -> TrunkForecast:
    """Return the result of ``forecast_trunk``. It is computed again only after an input has changed, because the computation opens every token shard.

    The result is recorded in the ledger, where ``factory status`` reads how many tokens are missing. Raises: ConfigError.
    """
    plant, follows_from = state.plant, _follows_from(state)
    known = _computed.get(plant.workspace.root)
    if known is None or known[0] != follows_from:
        trunk = forecast_trunk(plant)
        record_event_once(plant.ledger, AHEAD, "daemon", asdict(trunk))
        known = _computed[plant.workspace.root] = (follows_from, trunk)
    return known[1]


def _follows_from(state: DutyState) -> Any:
    """Return a value that changes when the token shards, the states of segments, the masked documents or the recipe change."""
    shards = state.db.read("SELECT COUNT(*) AS n, MAX(created_at) AS newest FROM token_shards WHERE tokens > 0")
    segments = state.db.read(
        "SELECT state, COUNT(*) AS n, MAX(id) AS newest FROM segments GROUP BY state ORDER BY state"
    )
    kinds = ", ".join(
        f"'{kind}'" for kind in (DOCUMENTS_QUARANTINED, DOCUMENTS_FREED, CLOSED, REMOVED, RETURNED, SHARD_ERASED)
    )
    masked = state.db.read(f"SELECT COUNT(*) AS n FROM events WHERE kind IN ({kinds})")
    return shards, segments, masked, hashlib.sha256(state.plant.workspace.recipe_path().read_bytes()).hexdigest()


def _plan_trunk(plant: Plant, _: None) -> None:
    tune_kernels_if_untuned(plant.workspace, plant.progress)
    find_rate_if_due(plant)
    plan_trunk(plant)


TRAIN = Duty(
    "train", Message("duties.train", "train a planned segment from its newest checkpoint"), lambda state: filter(None, [state.unfinished_segment]),
    train_segment,
    trains=True, fills_disk=True,
)  # fmt: skip
PLAN_ANNEAL = Duty(
    "plan_anneal", Message("duties.plan_anneal", "plan an anneal: a branch off the trunk with a decaying learning rate"), _unannealed,
    lambda plant, _: plan_anneal(plant), trains=True, fills_disk=True, plans=True,
)  # fmt: skip
REPLICATE = Duty(
    "replicate", Message("duties.replicate", "train a champion's anneal again with another data order, to measure its noise"), _unmeasured,
    train_next_replica,
    trains=True, fills_disk=True, plans=True,
)  # fmt: skip
PLAN_TRUNK = Duty(
    "plan_trunk", Message("duties.plan_trunk", "plan the next trunk segment when there is enough data"), _trunk, _plan_trunk,
    trains=True, fills_disk=True, plans=True,
)  # fmt: skip
