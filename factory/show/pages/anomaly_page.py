"""Writes the page of a diagnosis, ``anomaly-N.html``: loss curves of the window and of each arm, documents, the cause, an LLM's explanation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agents.core.pages import render_page
from factory.diagnosis.wording import read_shown_documents
from factory.ledger.anomalies import describe_explanation, draft_learning_rate_proposal, find_explanation
from factory.ledger.plant import Plant
from factory.show.pages.svg_charts import draw_curves
from kernels.contract.files import write_atomically

TEMPLATE = Path(__file__).with_name("anomaly.html.jinja")
SHOWN = ("kind", "segment", "onset", "last", "causes", "why", "steps", "budget", "guilty", "triggers")


def diagnosis_page_path(plant: Plant, detail: Mapping[str, Any]) -> Path:
    return (plant.ledger.root or Path()) / detail["report"]


def write_diagnosis_page(plant: Plant, detail: Mapping[str, Any]) -> Path:
    """Write the page of a diagnosis and return its path. ``detail``: the diagnosis, as ``read_newest_details_by_anomaly`` returns it.

    A diagnosis from before December 2026 has no curves in the ledger, so its existing page is kept.
    """
    path, lead = diagnosis_page_path(plant, detail), detail["lead"]
    if "drawn" not in detail and path.is_file():
        path.touch()
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = detail.get("drawn", {"loss": {}, "grad_norm": {}})
    marks = [(float(detail["onset"]), "onset")]
    loss, norms = (
        {name: [(x, y) for x, y in line if y is not None] for name, line in lines.items()} for lines in drawn.values()
    )
    words = {True: "there", False: "gone", None: "unclear"}
    said = find_explanation(plant.ledger, lead)
    write_atomically(
        path,
        render_page(
            TEMPLATE, lead=lead, **{key: detail[key] for key in SHOWN},
            loss=draw_curves(loss, marks=marks), norms=draw_curves(norms, marks=marks),
            arms=[{**arm, "shows": words[arm["fires"]]} for arm in detail["arms"]],
            documents=read_shown_documents(plant, detail["guilty"] or detail["triggers"]),
            state=describe_explanation(detail, said), claims=said["claims"] if said else [], draft=draft_learning_rate_proposal(detail),
        ),
    )  # fmt: skip
    return path
