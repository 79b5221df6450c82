"""The description on a version's page in MLflow, as Markdown: the verdict, three deciding numbers, links, and one line per reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from factory.evals.statistics import read_confidence_interval
from factory.ledger.rows import IMPORT, CandidateRow, SegmentRow, VerdictRow
from kernels.contract.message import Message

NOT_MEASURED = "not measured"
LONGEST = 4900  # characters; MLflow accepts 5,000
PICTURES = "comparison"  # the folder among the artifacts
TRAINING_MODE = "workflowType=machine_learning"  # opens MLflow's pages for training; the default pages are for agents


@dataclass(frozen=True)
class RunAddress:
    """A run in MLflow, and the addresses of its pages."""

    run: str
    experiment: str

    def make_page_link(self, part: str = "") -> str:
        return f"#/experiments/{self.experiment}/runs/{self.run}{part}?{TRAINING_MODE}"

    def make_comparison_link(self, other: RunAddress) -> str:
        """The address of the page that compares this run with another."""
        runs, experiments = json.dumps([self.run, other.run]), json.dumps([self.experiment])
        return f"#/compare-runs?runs={quote(runs)}&experiments={quote(experiments)}&{TRAINING_MODE}"


@dataclass(frozen=True)
class VersionLinks:
    """Runs, files and facts that the page of a version links to or names."""

    candidate: RunAddress
    training: RunAddress | None = None
    champion: RunAddress | None = None  # the champion that the candidate was compared with
    release: int | None = None
    bundle: str | None = None  # its folder
    pictures: Mapping[str, str] = field(default_factory=dict)  # their titles by name
    overridden: str | None = None  # the person who released it although the gate held it, and the reason


def render_description(
    candidate: CandidateRow, segment: SegmentRow, verdict: VerdictRow, evidence: dict[str, Any], links: VersionLinks
) -> str:
    """The description of a version. Its first line has no markup, because a list of versions shows that line as it is."""
    floors = Message(
        "version_page.floors", "judged by absolute floors, because there is no champion to compare with yet"
    )
    imported = Message("version_page.imported", "imported, the baseline of later candidates")
    over = (
        f"over {verdict.against.replace(':', ' ')}"
        if verdict.against
        else imported
        if verdict.gate == IMPORT
        else floors
    )
    released = f", release {links.release}" if links.release is not None else ""
    share = evidence.get("releasable")
    deciding = {
        "gain in bits per byte": _words(evidence.get("target")),
        "worst guard": _worst(evidence.get("guards")),
        "releasable tokens": f"{share:.1%}" if isinstance(share, int | float) else NOT_MEASURED,
    }
    override = Message(
        "version_page.overridden",
        "**Released although the gate blocked it**, by {person}",
        person=_plain(links.overridden or ""),
    )
    lines = [
        f"{verdict.outcome.upper()}: candidate {candidate.id} {over}{released}",
        "",
        "| what decides | |",
        "|:---|:---|",
        *(f"| {name} &emsp; | {value} |" for name, value in deciding.items()),
        "",
        " · ".join(_links(segment, verdict, links)),
        "",
        *([override, ""] if links.overridden else []),
        *_to_do(verdict, links),
        "Why:",
        "",
        *(f"- {_plain(reason)}" for reason in verdict.reasons),
        "",
        *(
            f"**{title}**\n\n![{title}](get-artifact?path={PICTURES}/{name}&run_uuid={links.candidate.run})\n"
            for name, title in links.pictures.items()
        ),
    ]
    text = "\n".join(lines)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _links(segment: SegmentRow, verdict: VerdictRow, places: VersionLinks) -> list[str]:
    own, training, champion = places.candidate, places.training, places.champion
    made = (
        f"{segment.kind} branch, segment {segment.id}" if segment.has_steps else f"{segment.kind}, segment {segment.id}"
    )
    links = [
        f"[report]({own.make_page_link('/artifacts/report.html')})",
        f"[pictures]({own.make_page_link(f'/artifacts/{PICTURES}')})",
        f"[evaluation and samples]({own.make_page_link()})",
        f"[comparison with {verdict.against.replace(':', ' ')}]({own.make_comparison_link(champion)})"
        if champion and verdict.against
        else "",
        (f"[{made}]({training.make_page_link('/model-metrics')})" if training else made)
        + f", code `{segment.code_commit[:12]}`",
    ]
    if places.release is not None and verdict.gate != IMPORT:
        links.append(f"bundle `{places.bundle or f'factory release --bundle {places.release}'}`")
    return [link for link in links if link]


def _to_do(verdict: VerdictRow, places: VersionLinks) -> list[str]:
    if verdict.outcome != "promote" or places.release is not None:
        return []
    return [
        Message(
            "version_page.how_to_decide",
            "If this candidate waits for your decision, set the tag `approval` below to `approved` or `rejected`. You can add your name in "
            "`approval_by` and a reason in `approval_reason`. The factory answers in `approval_answer` within a minute.",
        ),
        "",
    ]


def _words(stored: Any) -> str:
    found = read_confidence_interval(stored)
    return f"{found[0]:+.3f} (95 %: {found[1]:+.3f} … {found[2]:+.3f})".replace("-", "−") if found else NOT_MEASURED


def _worst(guards: Any) -> str:
    measured = {name: found for name, stored in (guards or {}).items() if (found := read_confidence_interval(stored))}
    if not measured:
        return NOT_MEASURED
    name = min(measured, key=lambda one: measured[one][1])
    return f"{_plain(name)} {_words(guards[name])}"


def _plain(words: str) -> str:
    """Text with all Markdown escaped, because names come from data."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|#!" else letter for letter in " ".join(words.split()))
