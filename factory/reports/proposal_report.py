"""What a person reads of a proposal: ``proposal-N.html`` and, for programs, ``proposal-N.json``."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from agents.core.proposal import Proposal, gain_words
from factory.gates.release.judge import Verdict
from kernels.contract.files import write_atomically

COLOURS = {"promote": "#2a7d3f", "hold": "#a06a00", "reject": "#a02c2c"}
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #ddd;"
    "vertical-align:top}pre{background:#f6f6f6;padding:1rem;overflow:auto;font-size:13px}.add{color:#2a7d3f}.del{color:#a02c2c}"
)


def write(
    reports: Path, number: int, drafted: Proposal, verdict: Verdict, evidence: dict[str, Any], patch: str
) -> Path:
    """Write both files; returns the HTML one. Everything an agent wrote is escaped: it is text, never markup."""
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
    write_atomically(path, _page(facts))
    return path


def _page(facts: dict[str, Any]) -> str:
    e = lambda value: html.escape(str(value))
    stages = "".join(
        f"<tr><td>{e(name)}</td><td>{e(stage['state'])}</td><td>{'<br>'.join(e(r) for r in stage['reasons'])}</td>"
        f"<td>{e(stage.get('stage_seconds', ''))}</td></tr>"
        for name, stage in facts["evidence"]["stages"].items()
    )
    reasons = "".join(f"<li>{e(reason)}</li>" for reason in facts["reasons"])
    predicted = gain_words(facts["target"], facts["predicted_gain"]) if facts["predicted_gain"] else "not given"
    colour = COLOURS.get(facts["outcome"], "#222")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Proposal {facts['number']}</title><style>{STYLE}</style>"
        f"<h1>Proposal {facts['number']}: {e(facts['title'])}</h1>"
        f"<p><b style='color:{colour}'>{e(facts['outcome']).upper()}</b></p><ul>{reasons}</ul>"
        f"<p>{e(facts['hypothesis'])}</p><p>By {e(facts['agent'])}, on {e(facts['target'])}. Predicted: {predicted}. "
        f"Measured: {_measured(facts['evidence'])}.</p>"
        f"<h2>Evidence</h2><table><tr><th>stage<th>state<th>what it found<th>seconds</tr>{stages}</table>"
        f"<h2>Patch</h2><pre>{_coloured(facts['patch'])}</pre>"
        f"<h2>All measurements</h2><pre>{e(json.dumps(facts['evidence'], indent=1, default=str))}</pre></html>"
    )


def _measured(evidence: dict[str, Any]) -> str:
    gain = evidence.get("gain")
    if gain and "bits_per_byte" in gain:
        by_domain = ", ".join(f"{html.escape(name)} {found['mean']:+.4f}" for name, found in gain["domains"].items())
        bounds = f"{gain['lower']:+.4f} at least, noise {gain['noise']:.4f}"
        return f"{gain['bits_per_byte']:+.4f} bits per byte ({bounds}; {by_domain})"
    return f"{gain['ratio']:.3f}× ({gain['lower']:.3f} at least, noise {gain['noise']:.3f})" if gain else "not measured"


def _coloured(patch: str) -> str:
    kinds = {"+": "add", "-": "del"}
    lines = patch.encode("utf-8", "replace").decode().splitlines()
    return "\n".join(f"<span class={kinds.get(line[:1], 'ctx')}>{html.escape(line)}</span>" for line in lines)
