"""Draws the pictures of a candidate's report, which compare it with the champion. They are also artifacts of its MLflow run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from agents.core.pages import make_svg_file_text
from factory.core.untrusted_trainer_files import LinesMemory, iterate_lines, open_regular_file, parse_json
from factory.evals.statistics import compare_items, read_confidence_interval
from factory.evals.tasks import EvalItem
from factory.ledger.ledger import Ledger, eval_items
from factory.ledger.rows import CandidateRow, EvaluationRow, SegmentRow, Subject, VerdictRow
from factory.show.pages.svg_charts import draw_bars, draw_curves, draw_intervals
from kernels.contract.message import Message

CANDIDATE, CHAMPION, TRIGRAM, BIGRAM = "candidate", "champion", "byte trigram", "byte bigram"
GAIN, LEVELS, LOSS = "gain.svg", "bits_per_byte.svg", "loss.svg"
TITLES = {
    GAIN: Message(
        "release_pictures.gain",
        "Paired gain over the champion, with 95 % intervals; a gain to the right of zero is an improvement",
    ),
    LEVELS: Message(
        "release_pictures.levels",
        "Bits per byte on held-out documents, each with its own 95 % interval; lower is better",
    ),
    LOSS: Message("release_pictures.loss", "Training loss over steps, in nats per supervised token"),
}


@dataclass(frozen=True)
class ChampionComparison:
    """A candidate's evaluation, and the champion's evaluation on the same documents, if there was a champion."""

    candidate: CandidateRow
    evaluation: EvaluationRow | None
    evidence: dict[str, Any]
    against: int | None  # the champion's candidate
    champion: EvaluationRow | None

    @classmethod
    def read_newest(cls, ledger: Ledger, candidate_id: int) -> ChampionComparison:
        verdict = VerdictRow.find_newest(ledger, "release", Subject("candidate", candidate_id))
        evidence = verdict.read_evidence(ledger) if verdict else {}
        against = Subject.parse(verdict.against).number if verdict and verdict.against else None
        known = dict_or_empty(evidence.get("evaluations")).get("champion")
        champion = EvaluationRow.get(ledger, known) if known else None
        if against and not champion:
            champion = EvaluationRow.find_newest(ledger, against)
        newest = EvaluationRow.find_newest(ledger, candidate_id)
        return cls(CandidateRow.get(ledger, candidate_id), newest, evidence, against, champion)

    @property
    def candidate_evaluation_summary(self) -> dict[str, Any]:
        return self.evaluation.summary if self.evaluation else {}

    @property
    def champion_summary(self) -> dict[str, Any]:
        return self.champion.summary if self.champion else {}


def draw_release_pictures(ledger: Ledger, candidate_id: int) -> dict[str, str]:
    """The pictures for which something was measured, as SVG by file name."""
    found = ChampionComparison.read_newest(ledger, candidate_id)
    drawn = {
        GAIN: draw_gains(found),
        LEVELS: draw_bits_per_byte(ledger, found),
        LOSS: draw_loss_comparison(ledger, found),
    }
    return {name: make_svg_file_text(svg) for name, svg in drawn.items() if svg}


def draw_bits_per_byte(ledger: Ledger, found: ChampionComparison) -> str:
    """Bits per byte by domain. Each bar has its own interval; the interval of the paired difference is narrower."""
    groups: dict[str, dict[str, float | None]] = {}
    theirs = dict_or_empty(found.champion_summary.get("bpb"))
    for domain, value in sorted(dict_or_empty(found.candidate_evaluation_summary.get("bpb")).items()):
        base = dict_or_empty(dict_or_empty(found.candidate_evaluation_summary.get("baselines")).get(domain))
        measured = {CANDIDATE: value, CHAMPION: theirs.get(domain)}
        groups[domain] = measured | {TRIGRAM: base.get("trigram"), BIGRAM: base.get("bigram")}
    between = {}
    for name, row in ((CANDIDATE, found.evaluation), (CHAMPION, found.champion)):
        for domain, ends in _levels(ledger, row).items() if row else ():
            between[domain, name] = ends
    return draw_bars(groups, [CANDIDATE, CHAMPION, TRIGRAM, BIGRAM], between)


def _levels(ledger: Ledger, row: EvaluationRow) -> dict[str, tuple[float, float]]:
    """The 95 % interval of each domain's bits per byte, computed as the gain of a model that needs zero bits."""
    columns = [eval_items.c[name] for name in ("task", "item", "domain", "cluster", "value", "weight")]
    chosen = sa.select(*columns).where(eval_items.c.evaluation == row.id, eval_items.c.task == "bpb")
    items = [EvalItem(**item) for item in ledger.select_rows(chosen)]
    measured = compare_items(items, [replace(item, value=0.0) for item in items], {}) if items else None
    ends = {name: read_confidence_interval(vars(gain)) for name, gain in measured[1].items()} if measured else {}
    return {name: (-found[2], -found[1]) for name, found in ends.items() if found}


def draw_gains(found: ChampionComparison) -> str:
    stored = {"target": found.evidence.get("target"), **dict_or_empty(found.evidence.get("guards"))}
    return draw_intervals({name: gain for name, one in stored.items() if (gain := read_confidence_interval(one))})


def draw_loss_by_domain(lineage: list[SegmentRow]) -> str:
    lines = _losses(lineage)
    if len(lines) == 2:  # a single domain is the whole
        lines.pop("all")
    return draw_curves(lines, marks=[(row.first_step, row.kind) for row in lineage[1:]])


def draw_loss_comparison(ledger: Ledger, found: ChampionComparison) -> str:
    """The training loss of champion and candidate over all their segments. Where the lines coincide, the candidate's is on top."""
    mine = SegmentRow.read_lineage(ledger, found.candidate.segment)
    lines = {}
    if found.against:
        theirs = SegmentRow.read_lineage(ledger, CandidateRow.get(ledger, found.against).segment)
        lines[f"champion, candidate {found.against}"] = _losses(theirs)["all"]
    lines[f"candidate {found.candidate.id}"] = _losses(mine)["all"]
    return draw_curves(lines, marks=[(row.first_step, row.kind) for row in mine[1:]])


def _losses(lineage: list[SegmentRow]) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {"all": []}
    for row, child in zip(lineage, [*lineage[1:], None]):
        end = child.first_step if child else row.last_step
        for step, losses in _metrics(Path(row.folder) / "metrics.jsonl"):
            if step <= end:
                for name, loss in losses.items():
                    lines.setdefault(name, []).append((step, loss))
    return lines


def _metrics(path: Path) -> list[tuple[float, dict[str, float]]]:
    """(step, losses by domain) of a metrics.jsonl, from the last line of each step. Unreadable lines are left out."""
    found: dict[float, dict[str, float]] = {}
    memory = LinesMemory()
    try:
        with open_regular_file(path) as file:
            for line in iterate_lines(file):
                try:
                    memory.add(line)
                except ValueError:
                    break
                try:
                    row = parse_json(line)
                    losses = {"all": float(row["loss"])}
                    losses |= {k.removeprefix("loss/"): float(v) for k, v in row.items() if k.startswith("loss/")}
                    found[float(row["step"])] = losses
                except (ValueError, KeyError, TypeError, AttributeError):
                    continue
    except OSError:
        return []
    return sorted(found.items())


def dict_or_empty(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
