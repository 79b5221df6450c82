"""Writes the page of a candidate or release: one self-contained file (``release.html.jinja``) with numbers from the ledger only."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from agents.core.pages import format_number, render_page
from factory.ledger.decisions import find_override
from factory.ledger.ledger import Ledger, releases, shards, token_shards
from factory.ledger.plant import Plant
from factory.ledger.removals import describe_removed_training_data, list_releases_with_removed_data
from factory.ledger.rows import CandidateRow, EvaluationRow, ReleaseRow, SegmentRow, VerdictRow
from factory.show.pages.candidate_summary import summarise_candidate
from factory.show.pages.release_pictures import (
    ChampionComparison,
    dict_or_empty,
    draw_bits_per_byte,
    draw_gains,
    draw_loss_by_domain,
)
from kernels.contract.files import write_atomically

Row = dict[str, Any]
SAMPLES_SHOWN = 8
TEMPLATE = Path(__file__).with_name("release.html.jinja")


def write_report(plant: Plant, candidate_id: int) -> Path:
    """Write ``reports/candidate-N.html``, and record its path in the candidate's release, if there is one. Returns the path."""
    path = report_path(plant, candidate_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render_report(plant.ledger, candidate_id))
    missing = (releases.c.candidate == candidate_id) & releases.c.report.is_(None)
    with plant.ledger.begin() as tx:
        tx.execute(releases.update().where(missing).values(report=plant.ledger.to_stored_path(path)))
    return path


def report_path(plant: Plant, candidate_id: int) -> Path:
    return plant.workspace.reports / f"candidate-{candidate_id}.html"


def render_report(ledger: Ledger, candidate_id: int) -> str:
    """The page, with verdict, measurements, samples, data and lineage. A missing measurement is left out or shown as ``–``."""
    candidate = CandidateRow.get(ledger, candidate_id)
    verdict = VerdictRow.find_newest_on_candidate(ledger, candidate_id)
    release = ReleaseRow.find_first(ledger, "WHERE candidate = :candidate", candidate=candidate_id)
    compared = ChampionComparison.read_newest(ledger, candidate_id)
    evaluation, summary, champion = (
        compared.evaluation,
        compared.candidate_evaluation_summary,
        compared.champion_summary,
    )
    lineage = SegmentRow.read_lineage(ledger, candidate.segment)
    trained, quarantined = _data(ledger, lineage[-1])
    against = verdict.against if verdict else None
    found, cloze = summary.get("samples"), dict_or_empty(summary.get("cloze"))
    over = find_override(ledger, verdict) if verdict else None
    return render_page(
        TEMPLATE,
        name=f"Release {release.number}" if release else f"Candidate {candidate_id}",
        verdict=verdict,
        head={
            "Candidate": candidate_id,
            "Compared with": against.replace(":", " ") if against else "the absolute floors",
            "Judged": _date(verdict.created_at) if verdict else "not yet",
            "Approved by": (release and release.approved_by) or "–",
            **({"Overridden by": f"{over['by']}: {over['why']}"} if over else {}),
            "Export": candidate.export_sha256[:16],
        },
        bits_per_byte=draw_bits_per_byte(ledger, compared),
        gains=draw_gains(compared),
        cloze=_cloze(summary, champion),
        cloze_size=f"{format_number(cloze.get('items'))} items, chance {_share(cloze.get('chance'))}",
        checks={
            name: check if isinstance(check, dict) else {"ok": check}
            for name, check in dict_or_empty(summary.get("parity")).items()
        },
        samples=found[:SAMPLES_SHOWN] if isinstance(found, list) else [],
        loss=draw_loss_by_domain(lineage),
        glance=summarise_candidate(ledger, compared, verdict, release),
        trained=trained,
        quarantined=quarantined,
        removed=[
            describe_removed_training_data(mark)
            for mark in list_releases_with_removed_data(ledger)
            if release and mark["release"] == release.number
        ],
        lineage=[vars(row) | {"tokens": dict_or_empty(row.result).get("tokens")} for row in lineage],
        measured=_how(verdict, evaluation) if evaluation else {},
        held_out=_held_out(summary),
    )


# -- verdict and measurements -------------------------------------------------------------------------------------------
def _share(value: object) -> str:
    return format_number(value * 100, 1) + " %" if isinstance(value, int | float) else "–"


def _cloze(summary: Row, champion: Row) -> list[list[str]]:
    mine, theirs = dict_or_empty(summary.get("cloze")), dict_or_empty(champion.get("cloze"))
    before = dict_or_empty(theirs.get("by_domain"))
    rows = [[d, _share(v), _share(before.get(d))] for d, v in sorted(dict_or_empty(mine.get("by_domain")).items())]
    if "share_right" in mine:
        rows.append(["all", _share(mine["share_right"]), _share(theirs.get("share_right"))])
    return rows


def _how(verdict: VerdictRow | None, evaluation: EvaluationRow) -> dict[str, str]:
    return {
        "Evaluation": f"{evaluation.id}, {_date(evaluation.created_at)}",
        "Suite": evaluation.suite_sha256[:16],
        "Verdict": f"{verdict.id} by policy {verdict.policy_sha256[:16]}" if verdict else "–",
    }


def _held_out(summary: Row) -> list[list[str]]:
    sizes, noise = dict_or_empty(summary.get("bytes")), dict_or_empty(summary.get("noise_floor"))
    counts = sorted(dict_or_empty(summary.get("documents")).items())
    return [[d, format_number(n), format_number(sizes.get(d), 0), format_number(noise.get(d), 4)] for d, n in counts]


# -- training and data --------------------------------------------------------------------------------------------------
def _data(ledger: Ledger, segment: SegmentRow) -> tuple[list[list[object]], list[Row]]:
    """A row of each shard in the segment's data plan, and the quarantined shards."""
    plan = ledger.read("SELECT plan FROM data_plans WHERE id = :id", id=segment.data_plan)
    entries = plan[0]["plan"].get("token_shards") or [] if plan else []
    used = {row["id"]: row["shard"] for row in ledger.select_rows(sa.select(token_shards.c.id, token_shards.c.shard))}
    trained = {used[entry["id"]] for entry in entries if entry.get("id") in used}
    rows: list[list[object]] = []
    quarantined = []
    for shard in ledger.select_rows(sa.select(shards).order_by(shards.c.ingested_at, shards.c.name)):
        counts = dict_or_empty(shard["counts"])
        dropped = ", ".join(
            f"{rule} {format_number(n)}" for rule, n in sorted(dict_or_empty(counts.get("dropped")).items()) if n
        )
        if shard["state"] == "quarantined":
            quarantined.append(shard)
        elif shard["sha256"] in trained:
            used_of = [format_number(counts.get("train")), format_number(counts.get("held_out"))]
            rows.append(
                [
                    shard["name"],
                    format_number(shard["rows"]),
                    *used_of,
                    format_number(shard["tokens"]),
                    dropped or "nothing",
                ]
            )
    return rows, quarantined


# -- reading ------------------------------------------------------------------------------------------------------------
def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
