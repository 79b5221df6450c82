"""The page of a candidate or release: one self-contained file (``release.html.jinja``), every number read from the ledger."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from agents.core.pages import number, render
from factory.evals.statistics import Gain
from factory.ledger.ledger import Ledger, shards, token_shards
from factory.ledger.removals import mark_in_words, marks
from factory.ledger.rows import CandidateRow, EvaluationRow, ReleaseRow, SegmentRow, Subject, VerdictRow
from factory.reports.pictures import bars, curves, intervals

Row = dict[str, Any]
CANDIDATE, CHAMPION, TRIGRAM, BIGRAM = "candidate", "champion", "byte trigram", "byte bigram"
SAMPLES_SHOWN = 8
TEMPLATE = Path(__file__).with_name("release.html.jinja")


def release_report(ledger: Ledger, candidate_id: int) -> str:
    """The page: verdict, measurements, samples, data, lineage. What was not measured is left out or shown as ``–``."""
    candidate = CandidateRow.get(ledger, candidate_id)
    verdict = VerdictRow.newest(ledger, "release", Subject("candidate", candidate_id))
    evidence = verdict.evidence(ledger) if verdict else {}
    release = ReleaseRow.first(ledger, "WHERE candidate = :candidate", candidate=candidate_id)
    evaluation = EvaluationRow.newest(ledger, candidate_id)
    summary = evaluation.summary if evaluation else {}
    champion = _champion_summary(ledger, verdict, evidence)
    lineage = SegmentRow.lineage(ledger, candidate.segment)
    trained, quarantined = _data(ledger, lineage[-1])
    against = verdict.against if verdict else None
    found = summary.get("samples")
    return render(
        TEMPLATE,
        name=f"Release {release.number}" if release else f"Candidate {candidate_id}",
        verdict=verdict,
        head={
            "Candidate": candidate_id,
            "Compared with": against.replace(":", " ") if against else "absolute floors (no champion yet)",
            "Judged": _date(verdict.created_at) if verdict else "not yet",
            "Approved by": (release and release.approved_by) or "–",
            "Export": candidate.export_sha256[:16],
        },
        bits_per_byte=_bits_per_byte(summary, champion),
        gains=_gains(evidence),
        cloze=_cloze(summary, champion),
        cloze_size=_cloze_size(_mapping(summary.get("cloze"))),
        checks={
            name: check if isinstance(check, dict) else {"ok": check}
            for name, check in _mapping(summary.get("parity")).items()
        },
        samples=found[:SAMPLES_SHOWN] if isinstance(found, list) else [],
        loss=_loss(lineage),
        trained=trained,
        quarantined=quarantined,
        removed=[mark_in_words(mark) for mark in marks(ledger) if release and mark["release"] == release.number],
        lineage=[vars(row) | {"tokens": _mapping(row.result).get("tokens")} for row in lineage],
        measured=_how(verdict, evaluation) if evaluation else {},
        held_out=_held_out(summary),
    )


# -- verdict and measurements -------------------------------------------------------------------------------------------
def _bits_per_byte(summary: Row, champion: Row) -> str:
    groups: dict[str, dict[str, float | None]] = {}
    for domain, value in sorted(_mapping(summary.get("bpb")).items()):
        base = _mapping(_mapping(summary.get("baselines")).get(domain))
        groups[domain] = {
            CANDIDATE: value,
            CHAMPION: _mapping(champion.get("bpb")).get(domain),
            TRIGRAM: base.get("trigram"),
            BIGRAM: base.get("bigram"),
        }
    return bars(groups, [CANDIDATE, CHAMPION, TRIGRAM, BIGRAM])


def _gains(evidence: Row) -> str:
    found = {"target": evidence.get("target"), **_mapping(evidence.get("guards"))}
    shown = {}
    for name, stored in found.items():
        gain = (
            Gain(**{key: stored.get(key) for key in ("gain", "error", "clusters", "effective")})
            if isinstance(stored, dict)
            else Gain()
        )
        low, high = gain.bound(0.025), gain.bound(0.025, above=True)
        if gain.gain is not None and low is not None and high is not None:
            shown[name] = (gain.gain, low, high)
    return intervals(shown)


def _share(value: object) -> str:
    return number(value * 100, 1) + " %" if isinstance(value, int | float) else "–"


def _cloze(summary: Row, champion: Row) -> list[list[str]]:
    mine, theirs = _mapping(summary.get("cloze")), _mapping(champion.get("cloze"))
    before = _mapping(theirs.get("by_domain"))
    rows = [[d, _share(v), _share(before.get(d))] for d, v in sorted(_mapping(mine.get("by_domain")).items())]
    if "share_right" in mine:
        rows.append(["all", _share(mine["share_right"]), _share(theirs.get("share_right"))])
    return rows


def _cloze_size(cloze: Row) -> str:
    return f"{number(cloze.get('items'))} items, chance {_share(cloze.get('chance'))}"


def _how(verdict: VerdictRow | None, evaluation: EvaluationRow) -> dict[str, object]:
    pairs: dict[str, object] = {
        "Evaluation": f"{evaluation.id}, {_date(evaluation.created_at)}",
        "Suite": evaluation.suite_sha256[:16],
        "Verdict": f"{verdict.id} by policy {verdict.policy_sha256[:16]}" if verdict else "–",
    }
    if seconds := _mapping(evaluation.summary.get("seconds")):
        pairs["Took"] = f"{sum(v for v in seconds.values() if isinstance(v, int | float)):.0f} s"
    return pairs


def _held_out(summary: Row) -> list[list[str]]:
    sizes, noise = _mapping(summary.get("bytes")), _mapping(summary.get("noise_floor"))
    counts = sorted(_mapping(summary.get("documents")).items())
    return [[d, number(n), number(sizes.get(d), 0), number(noise.get(d), 4)] for d, n in counts]


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
    return curves(lines, marks=[(row.first_step, row.kind) for row in lineage[1:]])


def _metrics(path: Path) -> list[tuple[float, dict[str, float]]]:
    """(step, losses by domain) of a metrics.jsonl, the last line of each step; lines that cannot be read are left out."""
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


def _data(ledger: Ledger, segment: SegmentRow) -> tuple[list[list[object]], list[Row]]:
    """A row of each shard in the segment's data plan, and the quarantined shards."""
    plan = ledger.read("SELECT plan FROM data_plans WHERE id = :id", id=segment.data_plan)
    entries = plan[0]["plan"].get("token_shards") or [] if plan else []
    used = {row["id"]: row["shard"] for row in ledger.rows(sa.select(token_shards.c.id, token_shards.c.shard))}
    trained = {used[entry["id"]] for entry in entries if entry.get("id") in used}
    rows: list[list[object]] = []
    quarantined = []
    for shard in ledger.rows(sa.select(shards).order_by(shards.c.ingested_at, shards.c.name)):
        counts = _mapping(shard["counts"])
        dropped = ", ".join(f"{rule} {number(n)}" for rule, n in sorted(_mapping(counts.get("dropped")).items()) if n)
        if shard["state"] == "quarantined":
            quarantined.append(shard)
        elif shard["sha256"] in trained:
            used_of = [number(counts.get("train")), number(counts.get("held_out"))]
            rows.append([shard["name"], number(shard["rows"]), *used_of, number(shard["tokens"]), dropped or "nothing"])
    return rows, quarantined


# -- reading ------------------------------------------------------------------------------------------------------------
def _champion_summary(ledger: Ledger, verdict: VerdictRow | None, evidence: Row) -> Row:
    """The evaluation of the champion that the verdict compared with, on the same suite; empty when there was none."""
    if not verdict or not verdict.against:
        return {}
    if known := _mapping(evidence.get("evaluations")).get("champion"):
        return EvaluationRow.get(ledger, known).summary
    newest = EvaluationRow.newest(ledger, Subject.parse(verdict.against).number)
    return newest.summary if newest else {}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
