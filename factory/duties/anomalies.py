"""Duties about anomalies. An anomaly is diagnosed before its candidate is judged, because a candidate of a rewound segment is held.

A separate file, because each topic of duties is one file.
"""

from __future__ import annotations

from factory.diagnosis.diagnosing import diagnose_and_act
from factory.diagnosis.wording import describe_diagnosis
from factory.duties.duty import Duty, DutyState
from factory.gates.release.anomaly_policy import AnomalyPolicy
from factory.ledger.anomalies import find_next_undiagnosed_anomaly, find_next_unexplained_episode
from factory.ledger.plant import Plant
from kernels.contract.message import Message


def _undiagnosed(state: DutyState) -> list[int]:
    policy = AnomalyPolicy.load(state.plant.workspace.policy_path("anomalies.yaml"))
    found = (
        find_next_undiagnosed_anomaly(state.db, policy.kinds, state.list_waiting_subjects("diagnose"))
        if policy.diagnose == "automatic"
        else None
    )
    return [] if found is None else [found]


def _diagnose(plant: Plant, anomaly: int, replayed_steps: int | None = None) -> None:
    """Diagnose an anomaly. ``replayed_steps``: the budget, instead of the policy's."""
    diagnose_and_act(plant, anomaly, replayed_steps)


def _unworded(state: DutyState) -> list[int]:
    found = find_next_unexplained_episode(state.db, state.list_waiting_subjects("word"))
    return [] if found is None else [found]


DIAGNOSE = Duty(
    "diagnose", Message("duties.diagnose", "replay an anomaly to find its cause, and act on the cause"), _undiagnosed, _diagnose,
    trains=True, fills_disk=True,
)  # fmt: skip
WORD = Duty("word", Message("duties.word", "let a language model describe a diagnosis"), _unworded, describe_diagnosis)
