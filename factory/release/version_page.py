"""What a person reads on a version's page in MLflow: the verdict, the three numbers that decide, where to look, one reason a line. Markdown."""

from __future__ import annotations

from typing import Any

from factory.evals.statistics import interval_of
from factory.ledger.rows import CandidateRow, SegmentRow, VerdictRow

NOT_MEASURED = "not measured"
LONGEST = 4900  # characters; MLflow takes 5,000


def page(
    candidate: CandidateRow,
    segment: SegmentRow,
    verdict: VerdictRow,
    evidence: dict[str, Any],
    run: str,
    experiment: str,
) -> str:
    """The description of a version."""
    over = f" over {verdict.against.replace(':', ' ')}" if verdict.against else ", by absolute floors (no champion yet)"
    at_run = f"#/experiments/{experiment}/runs/{run}"
    share = evidence.get("releasable")
    lines = [
        f"**{verdict.outcome.upper()}** – candidate {candidate.id}{over}",
        "",
        "| what decides | |",
        "|---|---|",
        f"| gain of the target, bits per byte | {_words(evidence.get('target'))} |",
        f"| the guard that did worst | {_worst(evidence.get('guards'))} |",
        f"| tokens whose licence allows a release | {f'{share:.1%}' if isinstance(share, int | float) else NOT_MEASURED} |",
        "",
        f"[report]({at_run}/artifacts/report.html) · [evaluation and samples]({at_run}) · `reports/candidate-{candidate.id}.html` · "
        f"segment {segment.id}, code `{segment.code_commit[:12]}`",
        "",
        "Why:",
        "",
        *(f"- {_plain(reason)}" for reason in verdict.reasons),
    ]
    text = "\n".join(lines)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


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
