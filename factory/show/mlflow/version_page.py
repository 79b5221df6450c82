"""What a person reads on a version's page in MLflow: the verdict, the three numbers that decide, what to click, one reason a line. Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from factory.evals.statistics import interval_of
from factory.ledger.rows import CandidateRow, SegmentRow, VerdictRow

NOT_MEASURED = "not measured"
LONGEST = 4900  # characters; MLflow takes 5,000
PICTURES = "comparison"  # the folder among the artifacts
MODE = "workflowType=machine_learning"  # MLflow's pages for training; without it those for agents, with other names


@dataclass(frozen=True)
class Place:
    """A run in MLflow, as its pages are addressed."""

    run: str
    experiment: str

    def link(self, part: str = "") -> str:
        return f"#/experiments/{self.experiment}/runs/{self.run}{part}?{MODE}"

    def model_page(self, other: Place) -> str:
        """Both runs, side by side."""
        runs, experiments = json.dumps([self.run, other.run]), json.dumps([self.experiment])
        return f"#/compare-runs?runs={quote(runs)}&experiments={quote(experiments)}&{MODE}"


@dataclass(frozen=True)
class Places:
    candidate: Place
    training: Place | None = None
    champion: Place | None = None  # what it was compared with
    release: int | None = None
    bundle: str | None = None  # its folder
    pictures: Mapping[str, str] = field(default_factory=dict)  # their titles by name
    overridden: str | None = None  # who released it though it was held, and why


def page(
    candidate: CandidateRow, segment: SegmentRow, verdict: VerdictRow, evidence: dict[str, Any], places: Places
) -> str:
    """The description of a version. It opens in plain words: a list of versions shows its first ones, as they are."""
    over = f"over {verdict.against.replace(':', ' ')}" if verdict.against else "by absolute floors (no champion yet)"
    released = f", release {places.release}" if places.release else ""
    share = evidence.get("releasable")
    lines = [
        f"{verdict.outcome.upper()}: candidate {candidate.id} {over}{released}",
        "",
        "| what decides | |",
        "|:---|:---|",
        f"| gain of the target, bits per byte &emsp; | {_words(evidence.get('target'))} |",
        f"| the guard that did worst &emsp; | {_worst(evidence.get('guards'))} |",
        f"| tokens whose licence allows a release &emsp; | {f'{share:.1%}' if isinstance(share, int | float) else NOT_MEASURED} |",
        "",
        " · ".join(_links(segment, verdict, places)),
        "",
        *([f"**Released though it was held**, by {_plain(places.overridden)}", ""] if places.overridden else []),
        *_to_do(verdict, places),
        "Why:",
        "",
        *(f"- {_plain(reason)}" for reason in verdict.reasons),
        "",
        *(
            f"**{title}**\n\n![{title}](get-artifact?path={PICTURES}/{name}&run_uuid={places.candidate.run})\n"
            for name, title in places.pictures.items()
        ),
    ]
    text = "\n".join(lines)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _links(segment: SegmentRow, verdict: VerdictRow, places: Places) -> list[str]:
    own, training, champion = places.candidate, places.training, places.champion
    made = f"{segment.kind} branch, segment {segment.id}"
    links = [
        f"[report]({own.link('/artifacts/report.html')})",
        f"[pictures]({own.link(f'/artifacts/{PICTURES}')})",
        f"[evaluation and samples]({own.link()})",
        f"[beside {verdict.against.replace(':', ' ')}]({own.model_page(champion)})"
        if champion and verdict.against
        else "",
        (f"[{made}]({training.link('/model-metrics')})" if training else made) + f", code `{segment.code_commit[:12]}`",
    ]
    if places.release:
        links.append(f"bundle `{places.bundle or f'factory release --bundle {places.release}'}`")
    return [link for link in links if link]


def _to_do(verdict: VerdictRow, places: Places) -> list[str]:
    if verdict.outcome != "promote" or places.release:
        return []
    return [
        "To answer, where it waits: set the tag `approval` below to `approved` or `rejected`; `approval_by` and `approval_reason` say who and "
        "why; the answer stands in `approval_answer` within a minute.",
        "",
    ]


def _words(stored: Any) -> str:
    found = interval_of(stored)
    return f"{found[0]:+.3f} (95 %: {found[1]:+.3f} … {found[2]:+.3f})".replace("-", "−") if found else NOT_MEASURED


def _worst(guards: Any) -> str:
    measured = {name: found for name, stored in (guards or {}).items() if (found := interval_of(stored))}
    if not measured:
        return NOT_MEASURED
    name = min(measured, key=lambda one: measured[one][1])
    return f"{_plain(name)} {_words(guards[name])}"


def _plain(words: str) -> str:
    """Names come from data: nothing in them is markup."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|#!" else letter for letter in " ".join(words.split()))
