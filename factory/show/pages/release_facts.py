"""Facts about releases and candidates from the ledger, as JSON-ready data: a list of all, the details of one, or the difference between two."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from factory.core.errors import InputError
from factory.evals.statistics import compare_items, read_confidence_interval
from factory.git import repository
from factory.ledger.decisions import find_decision, find_override, list_undecided_verdicts
from factory.ledger.imported_model import read_import_plan
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import IMPORT, CandidateRow, EvaluationRow, ReleaseRow, SegmentRow, VerdictRow, find_champion
from factory.show.pages.provenance import read_training_data_of_segment

Facts = dict[str, Any]
TARGET = "target"
BETTER, WORSE, UNCLEAR = "better", "worse", "no difference shown"


def find_release_or_candidate(ledger: Ledger, name: str) -> tuple[CandidateRow, ReleaseRow | None]:
    """The candidate and the release of a name: '2' is release 2, 'c3' is candidate 3. Raises: InputError."""
    number = name.removeprefix("c")
    if not (number.isascii() and number.isdecimal() and len(number) < 10):
        raise InputError(
            "release_facts.bad_name",
            "{name!r} is neither a release, such as '2', nor a candidate, such as 'c3'. To see all of them: 'factory releases list'",
            name=name,
        )
    if number != name:
        candidate = CandidateRow.get(ledger, int(number))
        return candidate, ReleaseRow.find_first(ledger, "WHERE candidate = :candidate", candidate=candidate.id)
    release = ReleaseRow.get(ledger, int(number))
    return CandidateRow.get(ledger, release.candidate), release


def list_releases(ledger: Ledger) -> list[Facts]:
    """Every release, oldest first, then every other candidate. ``state``: the release's state, or 'waits for approval', 'rejected', 'held' …"""
    best = find_champion(ledger)
    waiting = {verdict.subject_number for verdict in list_undecided_verdicts(ledger)}
    released = {row.candidate: row for row in ReleaseRow.select(ledger)}
    rows = [
        _listed(ledger, candidate, released.get(candidate.id), waiting) for candidate in CandidateRow.select(ledger)
    ]
    for row in rows:
        row["champion"] = best is not None and row["release"] == best.number
    return sorted(rows, key=lambda row: (row["release"] is None, row["release"] or 0, row["candidate"]))


def _listed(ledger: Ledger, candidate: CandidateRow, release: ReleaseRow | None, waiting: set[int]) -> Facts:
    verdict = _verdict(ledger, candidate, release)
    evidence = verdict.read_evidence(ledger) if verdict else {}
    return {
        "release": release and release.number,
        "candidate": candidate.id,
        "state": release.state if release else _state(ledger, verdict, candidate.id in waiting),
        "at": release.created_at if release else verdict.created_at if verdict else candidate.created_at,
        "verdict": verdict and verdict.outcome,
        "against": verdict and verdict.against,
        "gain": compute_gain_with_interval(evidence.get(TARGET)),
        "approved_by": release and release.approved_by,
        "override": find_override(ledger, verdict) if verdict else None,
    }


def _state(ledger: Ledger, verdict: VerdictRow | None, waits: bool) -> str:
    if verdict is None:
        return "not judged yet"
    decision = find_decision(ledger, verdict)
    if decision:
        return decision.word
    if verdict.outcome != "promote":
        return {"hold": "held", "reject": "failed the gate"}.get(verdict.outcome, verdict.outcome)
    return "waits for approval" if waits else "out of date"


def read_release_details(plant: Plant, name: str) -> Facts:
    """Facts about one release or candidate: gains with their intervals, training data, approval, and the places of its report and its model.

    Raises: InputError.
    """
    candidate, release = find_release_or_candidate(plant.ledger, name)
    verdict = _verdict(plant.ledger, candidate, release)
    evidence = verdict.read_evidence(plant.ledger) if verdict else {}
    best = find_champion(plant.ledger)
    waiting = {row.subject_number for row in list_undecided_verdicts(plant.ledger)}
    decision = find_decision(plant.ledger, verdict) if verdict else None
    report = plant.workspace.reports / f"candidate-{candidate.id}.html"
    is_champion = best is not None and best.candidate == candidate.id
    return (
        _listed(plant.ledger, candidate, release, waiting)
        | {
            "champion": is_champion,
            "reasons": verdict.reasons if verdict else [],
            "measured": {TARGET: compute_gain_with_interval(evidence.get(TARGET))}
            | {
                guard: compute_gain_with_interval(found)
                for guard, found in sorted((evidence.get("guards") or {}).items())
            },
            "bits_per_byte": evidence.get("bits_per_byte") or _measured_bits_per_byte(plant.ledger, candidate),
            "imported": _describe_import(plant.ledger, candidate),
            "champion_bits_per_byte": evidence.get("champion_bits_per_byte") or {},
            "decision": decision and vars(decision),
            "report": str(report) if report.is_file() else None,
            "mlflow_version": release and release.mlflow_version,
            "export": candidate.export_path,
            "export_sha256": candidate.export_sha256,
            "serve": "factory serve"
            if is_champion
            else f"factory releases rollback {release.number}"
            if release
            else None,
        }
        | read_training_data_of_segment(plant.ledger, candidate.segment)
    )


def _measured_bits_per_byte(ledger: Ledger, candidate: CandidateRow) -> Facts:
    """By domain, of the newest measurement of a candidate that no gate has judged, such as an imported model."""
    row = EvaluationRow.find_newest(ledger, candidate.id)
    return dict(row.summary.get("bpb") or {}) if row else {}


def _describe_import(ledger: Ledger, candidate: CandidateRow) -> Facts | None:
    """Name, class, licence and files of the public model from which a candidate descends; None if it began anew."""
    first = SegmentRow.read_lineage(ledger, candidate.segment)[0]
    if first.kind != IMPORT:
        return None
    plan = read_import_plan(ledger, first.id)
    return {key: plan[key] for key in ("name", "family", "class", "files")} | {
        "licence": plan["licence"]["name"] or None
    }


def compute_gain_with_interval(stored_gain: Any) -> Facts | None:
    """A gain of the evidence, with its 95 % interval and what the interval shows. A positive gain is better. None: not measured."""
    found = read_confidence_interval(stored_gain)
    if found is None:
        return None
    gain, low, high = found
    return {"gain": gain, "low": low, "high": high, "shows": BETTER if low > 0 else WORSE if high < 0 else UNCLEAR}


def _verdict(ledger: Ledger, candidate: CandidateRow, release: ReleaseRow | None) -> VerdictRow | None:
    """The verdict that led to the release, or the newest verdict on a candidate without a release."""
    if release:
        return VerdictRow.get(ledger, release.verdict)
    return VerdictRow.find_newest_on_candidate(ledger, candidate.id)


# -- the difference of two ----------------------------------------------------------------------------------------------
def compare_releases(plant: Plant, one: str, other: str) -> Facts:
    """The difference from ``one`` to ``other``: gains by domain with intervals, recipe keys, data, commits. Raises: InputError."""
    (a, _), (b, _) = find_release_or_candidate(plant.ledger, one), find_release_or_candidate(plant.ledger, other)
    first, second = SegmentRow.get(plant.ledger, a.segment), SegmentRow.get(plant.ledger, b.segment)
    before, after = (
        read_training_data_of_segment(plant.ledger, first.id),
        read_training_data_of_segment(plant.ledger, second.id),
    )
    keys = [flatten_keys(segment.recipe_json) for segment in (first, second)]
    recipes = {key: [one.get(key) for one in keys] for key in sorted({*keys[0], *keys[1]})}
    named = lambda facts: {shard["id"]: shard["name"] for shard in facts["shards"]}
    return {
        "one": one,
        "other": other,
        "measured": _compared(plant.ledger, a.id, b.id),
        "recipe": {key: pair for key, pair in recipes.items() if pair[0] != pair[1]},
        "data": {
            "added": sorted(name for key, name in named(after).items() if key not in named(before)),
            "left_out": sorted(name for key, name in named(before).items() if key not in named(after)),
            "tokens": [sum(shard["tokens"] for shard in facts["shards"]) for facts in (before, after)],
        },
        "code": {
            "commits": [first.code_commit, second.code_commit],
            "between": repository.list_commit_subjects(
                plant.workspace.repository, first.code_commit, second.code_commit
            ),
        },
        "steps": [first.last_step, second.last_step],
    }


def _compared(ledger: Ledger, one: int, other: int) -> Facts:
    """Compare item by item on the newest suite on which both were measured. Without such a suite: only the numbers, without intervals."""
    from factory.evals.evaluator import read_items_of_evaluation  # which loads torch

    ours, theirs = (EvaluationRow.select(ledger, "WHERE candidate = :c ORDER BY id DESC", c=c) for c in (other, one))
    pairs = [(mine, its) for mine in ours for its in theirs if mine.suite_sha256 == its.suite_sha256]
    mine, its = pairs[0] if pairs else (ours[0] if ours else None, theirs[0] if theirs else None)
    found = (
        compare_items(
            read_items_of_evaluation(ledger, pairs[0][0].id), read_items_of_evaluation(ledger, pairs[0][1].id), {}
        )
        if pairs
        else None
    )
    gains = (
        {}
        if found is None
        else {
            TARGET: compute_gain_with_interval(vars(found[0])),
            **{k: compute_gain_with_interval(vars(g)) for k, g in found[1].items()},
        }
    )
    levels = [(row.summary.get("bpb") or {}) if row else {} for row in (its, mine)]
    return {
        "same_items": found is not None,
        "gains": gains,
        "bits_per_byte": {name: [level.get(name) for level in levels] for name in sorted({*levels[0], *levels[1]})},
    }


def flatten_keys(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level of dotted keys; lists become JSON. ``{"a": {"b": [1]}}`` → ``{"a.b": "[1]"}``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(flatten_keys(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = json.dumps(value) if isinstance(value, list) else value
    return flat
