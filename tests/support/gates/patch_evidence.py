"""Evidence as the patch gate gathers it, for tests of the judge."""

from __future__ import annotations

from typing import Any

from factory.gates.patch.judge import STAGES


def evidence(baseline: list[float], candidate: list[float], **training: Any) -> dict[str, Any]:
    """Evidence with the seconds of a step in each run of the sides. The pairs are in two rounds, as equal as can be."""
    stages: dict[str, Any] = {name: {"state": "passed", "reasons": [name]} for name in STAGES}
    stages["training"] |= {
        "baseline_seconds": baseline,
        "candidate_seconds": candidate,
        "round_pairs": [size for size in (len(baseline) - len(baseline) // 2, len(baseline) // 2) if size],
        "drift": 0.01,
        "control_drift": 0.2,
        "new_code": False,
    }
    stages["training"] |= training
    stages["evals"]["gains"] = {"code": [0.001, -0.001, 0.0], "docs": [0.0, 0.0]}
    return {"stages": stages, "tries": 1}
