"""``policies/anomalies.yaml``: which anomalies are diagnosed, how far, and what is done about them. No patch can change it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from agents.loss_doctor.curves import KINDS
from factory.core.policy_file import StrictPolicy, load_policy
from factory.ledger.anomalies import REPLICAS_APART

Act = Literal["automatic", "ask"]


class AnomalyPolicy(StrictPolicy):
    """Every key is optional."""

    kinds: list[str] = [
        "non_finite", "loss_spike", "loss_drop", "divergence", "domain_spike", "domain_drop", "skipped_outlier", REPLICAS_APART
    ]  # fmt: skip
    """That are diagnosed; while one of them is open, no candidate that contains it is released. Others are only recorded."""
    steps: Annotated[int, Field(ge=0)] = 1000
    """The budget of one diagnosis, in replayed steps."""
    previous_python: str = ""
    """Where libraries changed with a segment: the interpreter of the environment before, which a replay is made in; '': none is at hand."""
    wall_seconds: Annotated[float, Field(gt=0)] = 3600.0
    """Time limit of one replay."""
    quarantine: Act = "automatic"
    """Documents that are guilty: masked in every later segment, and the segment that they spoiled rewound. ask: a person decides."""
    rate: Act = "ask"
    """Where the cause is the rate: the segment rewound, and trained again with what cleared the anomaly for ``rate_steps`` steps after it.
    Once in one place; what is not enough then waits for a person. ask: a person decides, as the gate has not judged that recipe."""
    rate_steps: Annotated[int, Field(gt=0)] = 100
    diagnose: Act = "automatic"
    """Does the daemon diagnose by itself? ask: 'factory diagnose'."""

    @field_validator("kinds")
    @classmethod
    def _known(cls, kinds: list[str]) -> list[str]:
        possible = (*KINDS, REPLICAS_APART)
        if unknown := sorted(set(kinds) - set(possible)):
            raise ValueError(f"no diagnosis is about {unknown[0]!r}; possible: {', '.join(possible)}")
        return kinds

    @classmethod
    def load(cls, path: Path) -> AnomalyPolicy:
        """Raises: ConfigError naming the file and the key."""
        return load_policy(cls, path)
