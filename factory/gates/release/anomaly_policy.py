"""``policies/anomalies.yaml``: the anomalies to diagnose, the cost of a diagnosis, and its consequences. No patch can change this policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from agents.loss_doctor.curves import KINDS
from factory.core.policy_file import StrictPolicy, load_policy
from factory.ledger.anomalies import REPLICAS_DIFFER

WhoActs = Literal["automatic", "ask"]


class AnomalyPolicy(StrictPolicy):
    """Every key is optional."""

    kinds: list[str] = [
        "non_finite", "loss_spike", "loss_drop", "divergence", "domain_spike", "domain_drop", "skipped_outlier", REPLICAS_DIFFER
    ]  # fmt: skip
    """The kinds of anomalies to diagnose. A candidate with an open anomaly of these kinds is not released. Other kinds are only recorded."""
    steps: Annotated[int, Field(ge=0)] = 1000
    """The budget of one diagnosis, in replayed steps."""
    previous_python: str = ""
    """The Python interpreter of the environment before a change of libraries. Replays of the segment can run in it. '': there is none."""
    wall_seconds: Annotated[float, Field(gt=0)] = 3600.0
    """Time limit of one replay."""
    quarantine: WhoActs = "automatic"
    """automatic: documents that caused an anomaly are masked in every later segment, and the spoiled segment is rewound. ask: a person decides."""
    rate: WhoActs = "ask"
    """automatic: if the learning rate is the cause, the segment is rewound and trained again, with the remedy for ``rate_steps`` steps after the
    anomaly. This happens once at one place; after that, a person decides. ask: a person decides from the start, because no gate has judged that
    recipe."""
    rate_steps: Annotated[int, Field(gt=0)] = 100
    diagnose: WhoActs = "automatic"
    """automatic: the daemon diagnoses. ask: a person runs 'factory diagnose'."""

    @field_validator("kinds")
    @classmethod
    def _known(cls, kinds: list[str]) -> list[str]:
        possible = (*KINDS, REPLICAS_DIFFER)
        if unknown := sorted(set(kinds) - set(possible)):
            raise ValueError(f"no diagnosis is about {unknown[0]!r}; possible: {', '.join(possible)}")
        return kinds

    @classmethod
    def load(cls, path: Path) -> AnomalyPolicy:
        """Raises: ConfigError naming the file and the key."""
        return load_policy(cls, path)
