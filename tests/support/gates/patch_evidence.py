"""Evidence as the patch gate gathers it, for tests of the judge."""

from __future__ import annotations

from typing import Any

from factory.gates.patch.judge import STAGES


def evidence(baseline: list[float], candidate: list[float], *, again: Any = (), **training: Any) -> dict[str, Any]:
    """``again``: the seconds of a measurement that repeats this one; (): the same; None: there is none."""
    stages: dict[str, Any] = {name: {"state": "passed", "reasons": [name]} for name in STAGES}
    stages["training"] |= {
        "baseline_seconds": baseline,
        "candidate_seconds": candidate,
        "drift": 0.01,
        "control_drift": 0.2,
        "new_code": False,
    }
    stages["training"] |= training
    if again is not None:
        repeated = stages["training"] | dict(zip(("baseline_seconds", "candidate_seconds"), again, strict=False))
        stages["training"]["again"] = {key: value for key, value in repeated.items() if key != "long"}
    stages["evals"]["gains"] = {"code": [0.001, -0.001, 0.0], "docs": [0.0, 0.0]}
    return {"stages": stages, "tries": 1}
