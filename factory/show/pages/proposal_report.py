"""What a person reads of a proposal, ``proposal-N.html`` (from ``proposal.html.jinja``), and for programs ``proposal-N.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agents.core.pages import render
from agents.core.proposal import Proposal, gain_words
from factory.gates.release.judge import Verdict
from kernels.contract.files import write_atomically

TEMPLATE = Path(__file__).with_name("proposal.html.jinja")
NOT_MEASUREMENTS = ("state", "reasons", "stage_seconds")  # of a stage: they have columns of their own


def write(
    reports: Path, number: int, drafted: Proposal, verdict: Verdict, evidence: dict[str, Any], patch: str
) -> Path:
    """Write both files; returns the path of the HTML one."""
    facts = {
        "number": number,
        "agent": drafted.agent,
        "target": drafted.target,
        "title": drafted.title,
        "hypothesis": drafted.hypothesis,
        "predicted_gain": drafted.predicted_gain,
        "outcome": verdict.outcome,
        "reasons": list(verdict.reasons),
        "evidence": evidence,
        "patch": patch,
    }
    reports.mkdir(parents=True, exist_ok=True)
    write_atomically(reports / f"proposal-{number}.json", json.dumps(facts, indent=1, default=str))
    path = reports / f"proposal-{number}.html"
    write_atomically(path, page(facts))
    return path


def page(facts: Mapping[str, Any]) -> str:
    """The HTML page of what ``proposal-N.json`` holds."""
    predicted, evidence = facts["predicted_gain"], facts["evidence"]
    return render(
        TEMPLATE,
        **facts,
        head={
            "Agent": facts["agent"],
            "Target": facts["target"],
            "Predicted": gain_words(facts["target"], predicted) if predicted else "not given",
            "Measured": _gain(evidence),
        },
        stages=evidence["stages"],
        measurements={name: _measurements(stage) for name, stage in evidence["stages"].items()},
        others={name: value for name, value in evidence.items() if name != "stages"},
        lines=[(_kind(line), line) for line in facts["patch"].splitlines()],
    )


def _measurements(stage: Mapping[str, Any]) -> list[tuple[str, list[Any]]]:
    """(name, values): one value, or two where the stage measured ``again``."""
    again = stage.get("again", {})
    names = [name for name in {**stage, **again} if name not in (*NOT_MEASUREMENTS, "again")]
    empty: tuple[Any, ...] = (None, "", [], {}, "–")
    rows = [(name, [one.get(name, "–") for one in (stage, again)[: 1 + bool(again)]]) for name in names]
    return [(name, values) for name, values in rows if any(value not in empty for value in values)]


def _gain(evidence: Mapping[str, Any]) -> str:
    gain = evidence.get("gain")
    if not gain:
        return "not measured"
    if "bits_per_byte" in gain:
        by_domain = ", ".join(f"{name} {found['mean']:+.4f}" for name, found in gain["domains"].items())
        bounds = f"at least {gain['lower']:+.4f}, noise {gain['noise']:.4f}"
        return f"{gain['bits_per_byte']:+.4f} bits per byte ({bounds}; {by_domain})"
    return f"{gain['ratio']:.3f}× (at least {gain['lower']:.3f}, noise {gain['noise']:.3f})"


def _kind(line: str) -> str:
    """The CSS class of a line of a patch."""
    return "at" if line.startswith(("+++", "---", "@")) else {"+": "add", "-": "del"}.get(line[:1], "")
