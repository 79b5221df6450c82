"""What a person reads before and after a release or a patch: one self-contained page, every number read from the ledger."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from agents.core.proposal import gain_words, is_quality
from factory.ledger.ledger import Ledger, data_plans, shards, token_shards
from factory.ledger.rows import CandidateRow, EvaluationRow, ReleaseRow, SegmentRow, Subject, VerdictRow
from factory.reports.report_page import (
    bars,
    code,
    curves,
    facts,
    intervals,
    mark,
    number,
    page,
    pill,
    section,
    table,
    text,
)

Row = dict[str, Any]
CANDIDATE, CHAMPION, TRIGRAM, BIGRAM = "candidate", "champion", "byte trigram", "byte bigram"
SAMPLES_SHOWN = 8


def release_report(ledger: Ledger, candidate_id: int) -> str:
    """The page of a candidate: verdict, measurements, samples, data, lineage. What was not measured is left out or ``–``."""
    candidate = CandidateRow.get(ledger, candidate_id)
    verdict = VerdictRow.newest(ledger, "release", Subject("candidate", candidate_id))
    evidence = verdict.evidence(ledger) if verdict else {}
    release = ReleaseRow.first(ledger, "WHERE candidate = :candidate", candidate=candidate_id)
    evaluation = EvaluationRow.newest(ledger, candidate_id)
    summary = evaluation.summary if evaluation else {}
    other = _champion_summary(ledger, verdict, evidence)
    lineage = SegmentRow.lineage(ledger, candidate.segment)
    name = f"Release {release.number}" if release else f"Candidate {candidate_id}"
    against = verdict.against if verdict else None
    head = {
        "Candidate": candidate_id,
        "Compared with": against.replace(":", " ") if against else "absolute floors (no champion yet)",
        "Judged": _date(verdict.created_at) if verdict else "not yet",
        "Approved by": (release and release.approved_by) or "–",
        "Export": candidate.export_sha256[:16],
    }
    return page(
        name,
        [
            f"<h1>{text(name)}{pill(verdict.outcome if verdict else 'not judged')}</h1>",
            _reasons(verdict.reasons if verdict else []),
            facts(head),
            _bits_per_byte(summary, other),
            _gains(evidence),
            _cloze(summary, other),
            _checks(summary),
            _samples(summary),
            _loss(lineage),
            _data(ledger, lineage),
            _history(lineage),
            _how(verdict, evaluation),
        ],
    )


def proposal_report(proposal: Mapping[str, Any], verdict: Mapping[str, Any] | None, diff: str = "") -> str:
    """The page of a proposal: what was tried and why, the patch, what each stage of the gate found, the verdict."""
    name = f"Proposal {proposal['number']}: {proposal['title']}"
    gain = proposal["predicted_gain"]
    evidence = verdict["evidence"] if verdict else {}
    head = {
        "Agent": proposal["agent"],
        "Target": proposal["target"],
        "Predicted": _predicted(str(proposal["target"]), gain) if isinstance(gain, int | float) else "–",
        "Branch": proposal["branch"],
        "Base": str(proposal["base_commit"])[:12],
        "Commit": str(proposal["commit"] or "–")[:12],
    }
    return page(
        name,
        [
            f"<h1>{text(name)}{pill(verdict['outcome'] if verdict else proposal['state'])}</h1>",
            _reasons(verdict["reasons"] if verdict else []),
            facts(head),
            section("Hypothesis", f"<p>{text(proposal['hypothesis'])}</p>"),
            *(_stage(str(stage), found) for stage, found in _stages(evidence)),
            section("Patch", _diff(diff)),
        ],
    )


def _predicted(target: str, gain: float) -> str:
    return gain_words(target, gain) if is_quality(target) else f"{gain:.3f} × faster"


# -- verdict and measurements -------------------------------------------------------------------------------------------
def _reasons(reasons: list[str]) -> str:
    return '<ul class="why">' + "".join(f"<li>{text(reason)}</li>" for reason in reasons) + "</ul>" if reasons else ""


def _bits_per_byte(summary: Row, other: Row) -> str:
    groups: dict[str, dict[str, float | None]] = {}
    for domain, value in sorted(_mapping(summary.get("bpb")).items()):
        base = _mapping(_mapping(summary.get("baselines")).get(domain))
        champion = _mapping(other.get("bpb")).get(domain)
        groups[domain] = {
            CANDIDATE: value,
            CHAMPION: champion,
            TRIGRAM: base.get("trigram"),
            BIGRAM: base.get("bigram"),
        }
    lead = "On held-out documents; fewer is better. The byte models were fitted to the same training data."
    return section("Bits per byte", bars(groups, [CANDIDATE, CHAMPION, TRIGRAM, BIGRAM]), lead=lead)


def _gains(evidence: Row) -> str:
    found = {"target": evidence.get("target"), **_mapping(evidence.get("guards"))}
    rows = {
        name: (gain["gain"], gain["low95"], gain["high95"])
        for name, gain in found.items()
        if isinstance(gain, dict) and {"gain", "low95", "high95"} <= gain.keys()
    }
    lead = "Paired on the same held-out items, 95 % intervals clustered by source document; right of zero is better."
    return section("Gain over the champion", intervals(rows), lead=lead)


def _cloze(summary: Row, other: Row) -> str:
    mine, theirs = _mapping(summary.get("cloze")), _mapping(other.get("cloze"))
    share = lambda value: number(value * 100, 1) + " %" if isinstance(value, int | float) else "–"
    before = _mapping(theirs.get("by_domain"))
    rows = [[d, share(v), share(before.get(d))] for d, v in sorted(_mapping(mine.get("by_domain")).items())]
    if "share_right" in mine:
        rows.append(["all", share(mine["share_right"]), share(theirs.get("share_right"))])
    lead = f"Choosing how a held-out passage goes on; {number(mine.get('items'))} items, chance {share(mine.get('chance'))}."
    return section("Cloze", table(["domain", CANDIDATE, CHAMPION], rows, numeric=(1, 2)), lead=lead)


def _checks(summary: Row) -> str:
    rows = []
    for name, found in _mapping(summary.get("parity")).items():
        good, detail = (found.get("ok"), found.get("detail", "")) if isinstance(found, dict) else (found, "")
        rows.append([mark(bool(good), name.replace("_", " ")), detail])
    return section("Checks", table(["check", "what was found"], rows))


def _samples(summary: Row) -> str:
    found = summary.get("samples")
    cards = []
    for sample in found[:SAMPLES_SHOWN] if isinstance(found, list) else []:
        notes = ["" if sample.get("ended", True) else "did not stop by itself"]
        parses = sample.get("parses")
        notes.append("" if parses is None else "its code parses" if parses else "its code does not parse")
        note = "; ".join(word for word in notes if word)
        cards.append(
            f'<div class="sample"><div class="ask">{text(sample.get("question", ""))}</div>'
            f"<pre>{text(sample.get('answer', '')) or '(nothing)'}</pre>"
            + (f'<div class="note small soft">{text(note)}</div>' if note else "")
            + "</div>"
        )
    return section("Chat samples", *cards, lead="Greedy answers to held-out questions, first ones first.")


def _how(verdict: VerdictRow | None, evaluation: EvaluationRow | None) -> str:
    if not evaluation:
        return ""
    summary = evaluation.summary
    pairs: dict[str, object] = {
        "Evaluation": f"{evaluation.id}, {_date(evaluation.created_at)}",
        "Suite": evaluation.suite_sha256[:16],
        "Verdict": f"{verdict.id} by policy {verdict.policy_sha256[:16]}" if verdict else "–",
    }
    documents, seconds = _mapping(summary.get("documents")), _mapping(summary.get("seconds"))
    rows = [
        [
            d,
            number(n),
            number(_mapping(summary.get("bytes")).get(d), 0),
            number(_mapping(summary.get("noise_floor")).get(d), 4),
        ]
        for d, n in sorted(documents.items())
    ]
    if seconds:
        pairs["Took"] = f"{sum(v for v in seconds.values() if isinstance(v, int | float)):.0f} s"
    lead = (
        "By trusted reference code from the exported weights alone, on documents split off by content hash at ingest."
    )
    columns = ["domain", "held-out documents", "bytes", "noise floor (bits per byte)"]
    return section("How it was measured", table(columns, rows, numeric=(1, 2, 3)), facts(pairs), lead=lead)


# -- training and data --------------------------------------------------------------------------------------------------
def _loss(lineage: list[SegmentRow]) -> str:
    lines: dict[str, list[tuple[float, float]]] = {"all": []}
    for row, child in zip(lineage, [*lineage[1:], None]):
        end = child.first_step if child else row.last_step
        for step, losses in _metrics(Path(row.folder) / "metrics.jsonl"):
            if step <= end:
                for name, loss in losses.items():
                    lines.setdefault(name, []).append((step, loss))
    if len(lines) == 2:  # a single domain is the whole
        lines.pop("all")
    marks = [(row.first_step, row.kind) for row in lineage[1:]]
    return section("Training loss", curves(lines, marks=marks), lead="Nats a supervised token, over steps, by domain.")


def _metrics(path: Path) -> list[tuple[float, dict[str, float]]]:
    """(step, losses by domain) of a metrics.jsonl, each step's last word; lines that cannot be read are left out."""
    found: dict[float, dict[str, float]] = {}
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    row = json.loads(line)
                    losses = {"all": float(row["loss"])}
                    losses |= {k.removeprefix("loss/"): float(v) for k, v in row.items() if k.startswith("loss/")}
                    found[float(row["step"])] = losses
                except (ValueError, KeyError, TypeError, AttributeError):
                    continue
    except OSError:
        return []
    return sorted(found.items())


def _data(ledger: Ledger, lineage: list[SegmentRow]) -> str:
    plan = ledger.one(sa.select(data_plans.c.plan).where(data_plans.c.id == lineage[-1].data_plan))
    entries = _mapping(plan and plan["plan"]).get("token_shards") or []
    used = {row["id"]: row["shard"] for row in ledger.rows(sa.select(token_shards.c.id, token_shards.c.shard))}
    trained = {used[entry["id"]] for entry in entries if entry.get("id") in used}
    rows, quarantined = [], []
    for shard in ledger.rows(sa.select(shards).order_by(shards.c.ingested_at, shards.c.name)):
        counts = _mapping(shard["counts"])
        dropped = ", ".join(f"{rule} {number(n)}" for rule, n in sorted(_mapping(counts.get("dropped")).items()) if n)
        if shard["state"] == "quarantined":
            quarantined.append([shard["name"], mark(False, shard["reason"] or "quarantined")])
        elif shard["sha256"] in trained:
            kept = [number(counts.get("train")), number(counts.get("held_out"))]
            rows.append([shard["name"], number(shard["rows"]), *kept, number(shard["tokens"]), dropped or "nothing"])
    columns = ["shard", "rows", "trained on", "held out", "tokens", "dropped, by rule"]
    return section(
        "Data",
        table(columns, rows, numeric=(1, 2, 3, 4)),
        table(["quarantined shard", "why"], quarantined),
        lead=f"{len(rows)} shards in the data plan." if rows else "",
    )


def _history(lineage: list[SegmentRow]) -> str:
    rows = []
    for row in lineage:
        tokens = number(_mapping(row.result).get("tokens"))
        steps = f"{row.first_step:,} → {row.last_step:,}"
        hashes = [code(sha256[:10]) for sha256 in (row.recipe_sha256, row.code_commit, row.data_plan)]
        rows.append([f"{row.kind} {row.id}", row.generation, steps, tokens, row.recipe, *hashes])
    columns = ["segment", "generation", "steps", "tokens", "recipe", "recipe hash", "code", "data plan"]
    return section("Lineage", table(columns, rows, numeric=(1, 2, 3)))


# -- proposals ----------------------------------------------------------------------------------------------------------
def _stages(evidence: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The stages in the order of the gate: a list of named stages, or a mapping by name."""
    stages = evidence.get("stages", evidence)
    if isinstance(stages, list):
        named = enumerate(stage for stage in stages if isinstance(stage, dict))
        return [(str(stage.get("name", stage.get("stage", i + 1))), stage) for i, stage in named]
    return list(stages.items()) if isinstance(stages, Mapping) else []


def _stage(name: str, found: Any) -> str:
    if not isinstance(found, Mapping):
        return section(_title(name), f"<p>{text(found)}</p>")
    passed = found.get("passed", found.get("ok"))
    words = mark(passed, "passed" if passed else "failed") if isinstance(passed, bool) else ""
    rows = [
        [_title(key), f"{value:.5g}" if isinstance(value, float) else _leaf(value)]
        for key, value in found.items()
        if key not in ("passed", "ok", "name", "stage") and value not in (None, "", [], {})
    ]
    return section(_title(name), f"<p>{words}</p>" if words else "", table([], rows))


def _leaf(value: Any) -> object:
    return code(json.dumps(value, ensure_ascii=False, default=str)[:2000]) if isinstance(value, dict | list) else value


def _title(name: str) -> str:
    words = name.replace("_", " ").strip()
    return words[:1].upper() + words[1:]


def _diff(diff: str) -> str:
    kinds = {"+": "add", "-": "del", "@": "at"}
    of = lambda line: "at" if line.startswith(("+++", "---")) else kinds.get(line[:1], "")
    lines = [f'<span class="{of(line)}">{text(line) or " "}</span>' for line in diff.splitlines()]
    return f'<pre class="diff">{"".join(lines)}</pre>' if lines else ""


# -- reading ------------------------------------------------------------------------------------------------------------
def _champion_summary(ledger: Ledger, verdict: VerdictRow | None, evidence: Row) -> Row:
    """The evaluation of the champion that the verdict compared with, on the same suite; empty when there was none."""
    if not verdict or not verdict.against:
        return {}
    known = _mapping(evidence.get("evaluations")).get("champion")
    if known:
        return EvaluationRow.get(ledger, known).summary
    newest = EvaluationRow.newest(ledger, Subject.parse(verdict.against).number)
    return newest.summary if newest else {}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
