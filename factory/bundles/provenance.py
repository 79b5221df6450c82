"""Builds and checks provenance.json. It tells how the model was made, as an in-toto statement with a SLSA v1 provenance predicate."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from typing import Any

from factory.bundles.files import layout
from factory.bundles.files.folder import BundleFolder, FileHash, escape_unprintable, find_first_json_difference
from factory.git.version import describe_version
from factory.ledger.ledger import Ledger
from factory.ledger.rows import CandidateRow, ReleaseRow, SegmentRow
from kernels.contract.message import Message

STATEMENT, PREDICATE = "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:llm-factory:release:v1"
PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "transformers")
BYPRODUCTS = (layout.POLICY, layout.EVIDENCE, layout.VERDICT, layout.ITEMS, layout.FIXTURE)
OF_SEGMENT = " ".join(
    (
        "id",
        "kind",
        "parent",
        "generation",
        "first_step",
        "last_step",
        "recipe",
        "recipe_sha256",
        "data_plan",
        "code_commit",
    )
)


def build_provenance_statement(
    ledger: Ledger, release: ReleaseRow, hashes: Mapping[str, FileHash], shards: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the statement's JSON object. ``hashes``: those of the bundle's files so far. ``shards``: the rows of the bundle's token shards."""
    lineage = SegmentRow.read_lineage(ledger, release.segment)
    last = lineage[-1]
    candidate = CandidateRow.get(ledger, release.candidate)
    return {
        "_type": STATEMENT,
        "subject": list_model_subjects(hashes),
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "release": release.number,
                    "recipe": {"name": last.recipe, "sha256": last.recipe_sha256, "values": last.recipe_json},
                    "dataPlan": last.data_plan,
                },
                "internalParameters": {"segments": [_segment(row) for row in lineage], "checkpoint": candidate.checkpoint},
                "resolvedDependencies": _dependencies(ledger, lineage, shards),
            },
            "runDetails": {
                "builder": {"id": "urn:llm-factory:builder", "version": {"factory": describe_version(), **_environment()}},
                "metadata": {
                    "invocationId": f"segment:{last.id}",
                    "startedOn": _time(lineage[0].created_at),
                    "finishedOn": _time(last.finished_at or candidate.created_at),
                },
                "byproducts": [{"name": path, "digest": {"sha256": hashes[path].sha256}} for path in BYPRODUCTS],
            },
        },
    }  # fmt: skip


def list_model_subjects(hashes: Mapping[str, FileHash]) -> list[dict[str, Any]]:
    """Return the statement's subjects, which are the model's files."""
    listed = sorted(path for path in hashes if path.startswith(f"{layout.MODEL}/"))
    return [{"name": path, "digest": {"sha256": hashes[path].sha256}} for path in listed]


def check_provenance(folder: BundleFolder) -> list[Message]:
    """Return the differences between a bundle's provenance and its files. Raises: BundleError."""
    stored = folder.read_object(layout.PROVENANCE)
    if (stored.get("_type"), stored.get("predicateType")) != (STATEMENT, PREDICATE):
        return [
            Message(
                "provenance.other_type",
                "{file} is not an in-toto statement of SLSA v1 provenance",
                file=layout.PROVENANCE,
            )
        ]
    found = [
        find_first_json_difference(stored.get("subject"), list_model_subjects(folder.file_hashes), place="subject")
    ]
    try:
        predicate = stored["predicate"]
        build = predicate["buildDefinition"]
        listed = {one["name"]: one["digest"]["sha256"] for one in predicate["runDetails"]["byproducts"]}
        segments = build["internalParameters"]["segments"]
        trained = {one["name"] for one in build["resolvedDependencies"] if one["name"].startswith("token-shard:")}
        release, plan = build["externalParameters"]["release"], build["externalParameters"]["dataPlan"]
        parents = [one["parent"] for one in segments] == [None, *(one["id"] for one in segments[:-1])]
        planned = segments[-1]["data_plan"]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        return [
            Message(
                "provenance.incomplete",
                "{file} lacks a value: {reason}",
                file=layout.PROVENANCE,
                reason=escape_unprintable(repr(error)),
            )
        ]
    there = {path: folder.file_hashes[path].sha256 for path in BYPRODUCTS if path in folder.file_hashes}
    found.append(find_first_json_difference(listed, there, place="byproducts"))
    if not parents:
        found.append(
            Message(
                "provenance.no_lineage",
                "{file}: the parent of a segment is not the segment listed before it",
                file=layout.PROVENANCE,
            )
        )
    if plan != planned:
        found.append(
            Message(
                "provenance.other_plan",
                "{file}: the named data plan is not the data plan of the last segment",
                file=layout.PROVENANCE,
            )
        )
    rows = {f"token-shard:{row.get('token_shard')}" for row in folder.read_rows(layout.SHARDS)}
    if rows != trained:
        found.append(
            Message(
                "provenance.other_shards",
                "{file} and {shards} list different token shards",
                file=layout.PROVENANCE,
                shards=layout.SHARDS,
            )
        )
    if release != folder.read_object(layout.VERDICT).get("release"):
        found.append(
            Message(
                "provenance.other_release",
                "{file} and {verdict} name different releases",
                file=layout.PROVENANCE,
                verdict=layout.VERDICT,
            )
        )
    return [problem for problem in found if problem]


def _segment(row: SegmentRow) -> dict[str, Any]:
    machine = (row.computing or {}).get("machine")
    result = row.result or {}
    told = {key: result[key] for key in ("tokens", "averaged", "imported") if result.get(key)}
    return row.select_fields(OF_SEGMENT) | {"machine": machine, "ranks": (row.computing or {}).get("ranks")} | told


def _dependencies(ledger: Ledger, lineage: list[SegmentRow], shards: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = [
        {"name": f"code:{commit}", "digest": {"gitCommit": commit}}
        for commit in dict.fromkeys(r.code_commit for r in lineage)
    ]
    for plan in dict.fromkeys(row.data_plan for row in lineage):  # a data plan's id is its SHA-256
        found.append({"name": f"data-plan:{plan}", "digest": {"sha256": plan}})
    for segment in lineage:
        sql = "SELECT id, step FROM checkpoints WHERE segment = :segment ORDER BY step DESC LIMIT 1"
        for one in ledger.read(sql, segment=segment.id):
            found.append(
                {"name": f"checkpoint:segment-{segment.id}-step-{one['step']}", "digest": {"sha256": one["id"]}}
            )
    for segment in lineage:
        imported = (segment.result or {}).get("imported") or {"files": {}}
        for file, sha256 in imported["files"].items():
            annotations = {"model": imported["name"], "license": imported["licence"]}
            found.append({"name": f"imported:{file}", "digest": {"sha256": sha256}, "annotations": annotations})
    raw = {row["token_shard"]: row for row in shards}
    for number, row in raw.items():
        found.append(
            {
                "name": f"token-shard:{number}",
                "digest": {"sha256": row["shard_sha256"]},
                "annotations": {"shard": row["shard"]},
            }
        )
    return found


def _environment() -> dict[str, str]:
    """Return the versions of Python and packages on the machine that makes the bundle. A segment's ``machine`` tells where it was trained."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = installed(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
