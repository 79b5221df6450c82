"""Writes the report of a proposal: ``proposal-N.html`` for people (from ``proposal.html.jinja``) and ``proposal-N.json`` for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agents.core.pages import render_page
from agents.core.proposal import format_gain
from factory.gates.stage_interface import read_reasons
from factory.git import repository
from factory.ledger.ledger import proposals
from factory.ledger.plant import Plant
from factory.ledger.rows import ProposalRow
from kernels.contract.files import write_atomically

TEMPLATE = Path(__file__).with_name("proposal.html.jinja")
NOT_MEASUREMENTS = ("state", "reasons", "stage_seconds")  # entries of a stage that have their own columns


def write_proposal_report(plant: Plant, number: int) -> Path:
    """Write both files of a judged proposal, and record the HTML file in the ledger. Returns the path of the HTML file."""
    row = ProposalRow.get(plant.ledger, number)
    code, reports = plant.workspace.repository, plant.workspace.reports
    facts = row.select_fields("number agent target title hypothesis predicted_gain outcome reasons") | {
        "evidence": row.read_evidence(plant.ledger),
        "patch": repository.read_patch(code, row.base_commit, row.commit) if row.commit else "",
    }
    reports.mkdir(parents=True, exist_ok=True)
    write_atomically(reports / f"proposal-{number}.json", json.dumps(facts, indent=1, default=str))
    path = reports / f"proposal-{number}.html"
    write_atomically(path, render_proposal(facts))
    with plant.ledger.begin() as tx:
        inside = plant.ledger.to_stored_path(path)
        tx.execute(proposals.update().where(proposals.c.number == number).values(report=inside))
    return path


def render_proposal(facts: Mapping[str, Any]) -> str:
    """The HTML page. ``facts``: the content of ``proposal-N.json``."""
    predicted, evidence = facts["predicted_gain"], {"stages": {}} | facts["evidence"]
    return render_page(
        TEMPLATE,
        **facts,
        head={
            "Agent": facts["agent"],
            "Target": facts["target"],
            "Predicted": format_gain(facts["target"], predicted) if predicted else "not given",
            "Measured": _gain(evidence),
        },
        stages={name: stage | {"reasons": read_reasons(stage)} for name, stage in evidence["stages"].items()},
        measurements={name: _measurements(stage) for name, stage in evidence["stages"].items()},
        others={name: value for name, value in evidence.items() if name != "stages"},
        lines=[(_kind(line), line) for line in facts["patch"].splitlines()],
    )


def _measurements(stage: Mapping[str, Any]) -> list[tuple[str, list[Any]]]:
    """(name, values) of each measurement of a stage: one value, or two if the stage measured ``again``."""
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
