"""What went wrong while training: its cause is found before its candidate is judged, which is held if the segment is rewound."""

from __future__ import annotations

from factory.duties.duty import Duty, Look
from factory.ledger.plant import Plant


def _undiagnosed(look: Look) -> list[int]:
    from factory.gates.release.anomaly_policy import AnomalyPolicy
    from factory.ledger.anomalies import undiagnosed

    policy = AnomalyPolicy.load(look.plant.workspace.policy("anomalies.yaml"))
    if policy.diagnose != "automatic":
        return []
    found = undiagnosed(look.db, policy.kinds, look.rests("diagnose"))
    return [] if found is None else [found]


def _diagnose(plant: Plant, anomaly: int, replayed_steps: int | None = None) -> None:
    """``replayed_steps``: the budget, in place of the policy's."""
    from factory.diagnosis.diagnosing import diagnose_and_act

    diagnose_and_act(plant, anomaly, replayed_steps)


def _unworded(look: Look) -> list[int]:
    from factory.ledger.anomalies import unworded

    found = unworded(look.db, look.rests("word"))
    return [] if found is None else [found]


def _word(plant: Plant, anomaly: int) -> None:
    from factory.diagnosis.wording import word_diagnosis

    word_diagnosis(plant, anomaly)


DIAGNOSE = Duty(
    "diagnose",
    "replay an anomaly until its cause is known, and act on it",
    _undiagnosed,
    _diagnose,
    trains=True,
    fills_disk=True,
)
WORD = Duty("word", "have a language model say what a diagnosis shows", _unworded, _word)
