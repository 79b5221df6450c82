"""What of the evidence people may change after a verdict: the licences and the anomalies of a candidate's training, as they are now."""

from __future__ import annotations

from typing import Any

from factory.gates.release.anomaly_policy import AnomalyPolicy
from factory.gates.release.licences import disputed_tokens, not_releasable, tokens_by_licence
from factory.ingest.rules.policy import DataPolicy
from factory.ledger.anomalies import open_in, rewound_in
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow


def training_now(plant: Plant, candidate_id: int) -> dict[str, Any]:
    """Values of ``ReleaseEvidence`` by name, by ledger and policies. Raises: ConfigError."""
    licences = DataPolicy.load(plant.workspace.policy("data.yaml")).licences
    segment = CandidateRow.get(plant.ledger, candidate_id).segment
    tokens = tokens_by_licence(plant.ledger, segment, licences)
    other = not_releasable(licences, tokens)
    return {
        "anomalies": _open_anomalies(plant, candidate_id),
        "releasable": 1 - min(1.0, sum(other.values())) if any(tokens.values()) else None,
        "not_releasable": other,
        "disputed": disputed_tokens(plant.ledger, segment, licences) / sum(tokens.values()) if other else None,
    }


def _open_anomalies(plant: Plant, candidate_id: int) -> tuple[str, ...]:
    """Of the training that a candidate comes from: what is open, and what was rewound."""
    kinds = AnomalyPolicy.load(plant.workspace.policy("anomalies.yaml")).kinds
    segment = CandidateRow.get(plant.ledger, candidate_id).segment
    found = open_in(plant.ledger, segment, kinds)
    words = [
        f"{row.kind} at step {row.step} of segment {row.segment} (anomaly {row.id}, which is open)" for row in found
    ]
    return (*words, *(f"segment {number} was rewound" for number in rewound_in(plant.ledger, segment)))
