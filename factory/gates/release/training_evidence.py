"""Reads the evidence that people can change after a verdict: the current licences and anomalies of a candidate's training."""

from __future__ import annotations

from typing import Any

from factory.gates.release.anomaly_policy import AnomalyPolicy
from factory.gates.release.trained_licences import (
    NONE,
    compute_unreleasable_shares,
    count_disputed_tokens,
    count_tokens_by_licence,
)
from factory.ingest.rules.policy import DataPolicy
from factory.ledger.anomalies import list_open_anomalies_of_lineage, list_rewound_segments_of_lineage
from factory.ledger.imported_model import find_imported_licence
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow
from kernels.contract.message import Message


def read_training_evidence(plant: Plant, candidate_id: int) -> dict[str, Any]:
    """Return values of ``ReleaseEvidence`` by name, read from the ledger and the policies. Raises: ConfigError."""
    licences = DataPolicy.load(plant.workspace.policy_path("data.yaml")).licences
    segment = CandidateRow.get(plant.ledger, candidate_id).segment
    tokens = count_tokens_by_licence(plant.ledger, segment, licences)
    other = compute_unreleasable_shares(licences, tokens)
    imported = find_imported_licence(plant.ledger, segment)
    if imported is not None:
        name, allowed = licences.find_model_licence(imported.name)
        if not allowed.release:
            other = {f"{name or NONE} (imported model)": 1.0, **other}  # all of the model descends from it
    return {
        "anomalies": _open_anomalies(plant, candidate_id),
        "releasable": 1 - min(1.0, sum(other.values())) if any(tokens.values()) else None,
        "not_releasable": other,
        "disputed": count_disputed_tokens(plant.ledger, segment, licences) / max(1, sum(tokens.values()))
        if other
        else None,
    }


def _open_anomalies(plant: Plant, candidate_id: int) -> tuple[str, ...]:
    """Return messages about the open anomalies and the rewound segments of a candidate's training."""
    kinds = AnomalyPolicy.load(plant.workspace.policy_path("anomalies.yaml")).kinds
    segment = CandidateRow.get(plant.ledger, candidate_id).segment
    anomalies = [
        Message(
            "release.open_anomaly",
            "{kind} at step {step} of segment {segment} (anomaly {anomaly} is still open)",
            kind=row.kind, step=row.step, segment=row.segment, anomaly=row.id,
        )
        for row in list_open_anomalies_of_lineage(plant.ledger, segment, kinds)
    ]  # fmt: skip
    rewound = [
        Message("release.rewound", "segment {segment} was rewound", segment=number)
        for number in list_rewound_segments_of_lineage(plant.ledger, segment)
    ]
    return (*anomalies, *rewound)
