"""Provenance in both directions: the steps and releases that were trained on a document, and the documents and licences of a release."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from factory.data.exposure import (
    DocumentExposure,
    ExposureStep,
    UnknownExposureError,
    list_segments_contributing_to_weights,
)
from factory.data.selecting import find_document_keys
from factory.data.synthetic import count_documents_written_by_release, count_synthetic_documents
from factory.gates.release.trained_licences import count_tokens_by_licence
from factory.ingest.document import read_author_model
from factory.ingest.rules.licence_claims import find_licence_conflicts
from factory.ledger.ledger import Ledger, documents, held_out, shards, token_shards
from factory.ledger.removals import (
    REMOVED_FATE,
    describe_removed_training_data,
    list_releases_with_removed_data,
    list_removals,
    parse_removal_number,
)
from factory.ledger.rows import ReleaseRow, SegmentRow, Subject, VerdictRow
from factory.training.planning import read_data_plan


def read_document_provenance(ledger: Ledger, name: str) -> list[dict[str, Any]]:
    """Return a row for each document with this id or key, with its shard, fate, removal and match.

    ``segments``: those whose data plan has the document. ``seen``: the steps that were trained on it. ``releases``: those that were trained on it,
    with ``times`` (epochs). If the steps are unknown, ``steps_unknown`` has the reason, and ``releases`` are those that may have been trained on it.

    Raises: InputError with near ids when no document has this id or key.
    """
    keys = find_document_keys(ledger, name)
    found = ledger.select_rows(sa.select(documents).where(documents.c.key.in_(keys)).order_by(documents.c.key))
    lines = SegmentRow.select(ledger)
    behind = {
        release.number: list_segments_contributing_to_weights(ledger, release.segment)
        for release in ReleaseRow.select(ledger)
    }
    held = {line.id: {shard["id"] for shard in read_data_plan(ledger, line)["token_shards"]} for line in lines}
    taken = {removal.number: removal for removal in list_removals(ledger)}
    for row in found:
        shard = ledger.select_first(
            sa.select(shards.c.name, shards.c.state, shards.c.path).where(shards.c.sha256 == row["shard"])
        )
        row["shard_name"] = shard and shard["name"]
        row["removal"] = vars(taken[parse_removal_number(row["rule"])]) if row["fate"] == REMOVED_FATE else None
        row["synthetic_by"] = read_author_model(row["detail"])
        row["licence_claims"] = [
            {"key": claim.key, "shard": claim.shard, "license": claim.license, "aside": claim.is_set_aside}
            for one in find_licence_conflicts(ledger, row["key"])
            for claim in one.claims
        ]
        if row["matched"]:
            other = ledger.select_first(
                sa.select(documents.c.id, documents.c.shard, documents.c.fate).where(documents.c.key == row["matched"])
            )
            row["matched_document"] = other
        row["segments"] = [line.id for line in lines if row["token_shard"] in held[line.id]]
        row["seen"], row["steps_unknown"], row["releases"] = [], "", []
        if row["token_shard"]:
            _follow(ledger, row, [line for line in lines if line.id in row["segments"]], behind)
        if row["fate"] == "held_out":
            row["held_out_as"] = ledger.select_first(
                sa.select(held_out.c.domain, held_out.c.group_key, held_out.c.sealed).where(
                    held_out.c.key == row["key"]
                )
            )
    return found


def _follow(ledger: Ledger, row: dict[str, Any], lines: list[SegmentRow], behind: dict[int, list[SegmentRow]]) -> None:
    exposure, key = DocumentExposure(ledger, {row["key"]: row["token_shard"]}), row["key"]
    seen: dict[int, list[ExposureStep]] = {}
    unknown: set[int] = set()
    for line in lines:
        try:
            seen[line.id] = exposure.list_steps_by_document(line).get(key, [])
        except UnknownExposureError as error:
            row["steps_unknown"] = str(error)
            unknown |= {line.id} if exposure.list_documents_in_plan(line) else set()
    row["seen"] = [vars(one) for line in lines for one in seen.get(line.id, ())]
    for number, trained in behind.items():
        mine = [one for line in trained for one in seen.get(line.id, ())]
        if mine or unknown & {line.id for line in trained}:
            steps = sorted({one.step for one in mine})
            row["releases"].append({"release": number, "steps": steps, "times": len({one.epoch for one in mine})})


def read_release_provenance(ledger: Ledger, number: int) -> dict[str, Any]:
    """Return the verdict and the training data of a release, with the MLflow run of its candidate.

    The training data are segments with run, recipe, code and data plan; token shards with domains, and with documents and supervised tokens by
    licence; supervised tokens by licence in total ('' without a licence); synthetic tokens by maker.
    ``licence_conflicts``: documents that also came with other licences and that no person settled. ``wrote``: the number of training documents
    that this release wrote, and the releases that may have been trained on them. ``marks``: its training data that was
    quarantined or removed since.

    Raises: InputError with the list of releases when there is no release ``number``.
    """
    release = ReleaseRow.get(ledger, number)
    verdict = VerdictRow.get(ledger, release.verdict)
    run = ledger.read(
        "SELECT run_id FROM tracked_runs WHERE subject = :s", s=str(Subject("candidate", release.candidate))
    )
    return {
        "release": vars(release),
        "verdict": verdict.select_fields("outcome reasons against policy_sha256"),
        "run": run[0]["run_id"] if run else None,
        "wrote": _wrote(ledger, release),
        "marks": [
            describe_removed_training_data(mark)
            for mark in list_releases_with_removed_data(ledger)
            if mark["release"] == number
        ],
    } | read_training_data_of_segment(ledger, release.segment)


def read_training_data_of_segment(ledger: Ledger, segment: int) -> dict[str, Any]:
    """The training data of a segment's model: the segments of its lineage, their token shards, and supervised tokens by licence."""
    runs = {row["subject"]: row["run_id"] for row in ledger.read("SELECT subject, run_id FROM tracked_runs")}
    steps = []
    used: dict[str, int] = {}
    for row in SegmentRow.read_lineage(ledger, segment):
        used |= {shard["id"]: shard["generation"] for shard in read_data_plan(ledger, row)["token_shards"]}
        kept = row.select_fields("id kind parent first_step last_step recipe recipe_sha256 data_plan code_commit")
        averaged = (row.result or {}).get("averaged")
        kept |= {"run": runs.get(str(Subject("segment", row.id)))}
        steps.append(kept | ({"averaged": averaged} if averaged else {}))
    listed = ledger.select_rows(
        sa.select(*(token_shards.c[name] for name in ("id", "shard", "documents", "tokens", "domains")), shards.c.name)
        .join(shards, shards.c.sha256 == token_shards.c.shard).where(token_shards.c.id.in_(used)).order_by(token_shards.c.created_at)
    )  # fmt: skip
    by_shard = _licences(ledger)
    unsettled = [one for one in find_licence_conflicts(ledger) if one.token_shard in used and not one.is_settled]
    for shard in listed:
        licences = by_shard.get(shard["id"], [])
        shard |= {
            "generation": used[shard["id"]],
            "removed": sum(one.pop("removed") for one in licences),
            "licences": licences,
        }
    return {
        "segments": steps,
        "shards": listed,
        "licences": count_tokens_by_licence(ledger, segment),
        "licence_conflicts": {
            "documents": len(unsettled),
            "supervised_tokens": sum(one.supervised_tokens for one in unsettled),
        },
        "synthetic": [one.to_json() for one in count_synthetic_documents(ledger, used)],
    }


def _wrote(ledger: Ledger, release: ReleaseRow) -> dict[str, Any]:
    held = count_documents_written_by_release(ledger, release)
    read_by = []
    for other in ReleaseRow.select(ledger) if held else ():
        planned = {
            shard["id"]
            for row in list_segments_contributing_to_weights(ledger, other.segment)
            for shard in read_data_plan(ledger, row)["token_shards"]
        }
        read_by += [other.number] if planned & held.keys() else []
    return {"documents": sum(held.values()), "releases": read_by}


def list_release_documents(ledger: Ledger, number: int) -> Iterator[dict[str, Any]]:
    """Every document of the token shards of a release's plans: key, id, source, licence, fate, token shard, ``synthetic_by``.

    Raises: InputError as ``read_release_provenance``.
    """
    release = ReleaseRow.get(ledger, number)
    used = {
        shard["id"]
        for row in list_segments_contributing_to_weights(ledger, release.segment)
        for shard in read_data_plan(ledger, row)["token_shards"]
    }
    names = ("key", "id", "domain", "source", "license", "fate", "detail", "supervised_tokens", "token_shard")
    for shard in sorted(used):
        chosen = sa.select(*(documents.c[name] for name in names)).where(documents.c.token_shard == shard)
        for row in ledger.select_rows(chosen.order_by(documents.c.shard, documents.c.row)):
            yield row | {"synthetic_by": read_author_model(row.pop("detail"))}


def _licences(ledger: Ledger) -> dict[str, list[dict[str, Any]]]:
    """By token shard, a row for each licence: documents, supervised tokens, removed documents."""
    sql = f"""SELECT token_shard, license, COUNT(*) AS documents, SUM(supervised_tokens) AS supervised_tokens,
        SUM(CASE WHEN fate = '{REMOVED_FATE}' THEN 1 ELSE 0 END) AS removed
        FROM documents WHERE token_shard IS NOT NULL GROUP BY token_shard, license ORDER BY token_shard, supervised_tokens DESC"""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in ledger.read(sql):
        found.setdefault(row.pop("token_shard"), []).append(row)
    return found
