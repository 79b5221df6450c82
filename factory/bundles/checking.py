"""Checks of ``factory verify``. Each reads only the bundle's files and returns the problems that it finds."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from factory.bundles.documents.generated import generate_document
from factory.bundles.files import layout
from factory.bundles.files.folder import (
    BundleError,
    BundleFolder,
    escape_unprintable,
    find_first_json_difference,
    make_missing_file_message,
    make_too_large_message,
    parse_json_object,
)
from factory.core.exports import hash_export_files
from factory.core.launching import make_parent_death_hook
from factory.core.workspace import find_checkout_root
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.trained_licences import NONE
from kernels.contract.message import Message
from kernels.contract.strict import parse

LOGPROB_TOLERANCE = 1e-3  # nats, between fp32 on two machines; serving allows the same difference
FIXTURE_SECONDS = 1800.0


def check_export(folder: BundleFolder) -> list[Message]:
    """Check that the model in the bundle is the judged export, byte for byte."""
    inside = {path: hashed.sha256 for path, hashed in folder.file_hashes.items() if path.startswith(f"{layout.MODEL}/")}
    digests = {Path(PurePosixPath(path).relative_to(layout.MODEL)): sha256 for path, sha256 in inside.items()}
    wanted = folder.read_object(layout.VERDICT).get("subject_sha256")
    found = hash_export_files(digests)
    if found == wanted:
        return []
    return [
        Message(
            "checking.other_model", "{folder}/ (sha256 {found:.12}) is not the judged export (sha256 {judged})",
            folder=layout.MODEL, found=found, judged=escape_unprintable(str(wanted), 12),
        )
    ]  # fmt: skip


def check_parity_fixture(folder: BundleFolder) -> list[Message]:
    """Check that weights and tokenizer give the recorded answers (the parity fixture). A separate process computes the answers again."""
    recorded = folder.read_object(layout.FIXTURE)
    tokenizer = f"{layout.MODEL}/tokenizer.json"
    if tokenizer not in folder.paths:
        return [make_missing_file_message(tokenizer)]
    if folder.file_hashes[tokenizer].bytes > layout.TOKENIZER_BYTES:
        return [make_too_large_message(tokenizer, layout.TOKENIZER_BYTES)]
    again = compute_parity_fixture(folder.root / layout.MODEL)
    for name in ("texts", "chats"):  # compared first, because different ids explain different continuations
        if problem := find_first_json_difference(recorded.get(name), again[name], place=name):
            return [problem]
    problem = find_first_json_difference(_sure(recorded, again), _sure(again, again), LOGPROB_TOLERANCE)
    return [problem] if problem else []


def compute_parity_fixture(export: Path) -> dict[str, Any]:
    """Compute the parity fixture of an export: run ``factory.serving.parity_fixture`` in a separate process. Raises: BundleError."""
    with tempfile.TemporaryDirectory(prefix="factory-fixture-") as folder:
        out = Path(folder) / "parity_fixture.json"
        words = [sys.executable, "-P", "-m", "factory.serving.parity_fixture", str(export.resolve()), str(out)]
        environment = os.environ | {"PYTHONPATH": str(find_checkout_root())}
        try:
            done = subprocess.run(
                words,
                cwd=folder,
                env=environment,
                capture_output=True,
                timeout=FIXTURE_SECONDS,
                preexec_fn=make_parent_death_hook(os.getpid()),
            )
        except subprocess.TimeoutExpired:
            raise BundleError(
                "checking.fixture_late",
                "The model's expected answers (the parity fixture) were not computed within {seconds:.0f} s",
                seconds=FIXTURE_SECONDS,
            ) from None
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            raise BundleError(
                "checking.fixture_failed",
                "The model's expected answers (the parity fixture) cannot be computed from {folder}/: {reason}",
                folder=layout.MODEL,
                reason=escape_unprintable(last[0], 300),
            )
        return parse_json_object(out.read_bytes(), layout.FIXTURE)


def _sure(fixture: dict[str, Any], again: dict[str, Any]) -> Any:
    """Return the fixture with each continuation cut before the first token that is not clearly the likeliest token on this machine."""
    rows = fixture.get("greedy")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return fixture
    kept = []
    for row, own in zip(rows, again["greedy"]):
        end = next((n for n, margin in enumerate(own["margins"]) if margin <= 2 * LOGPROB_TOLERANCE), None)
        cut = {key: row[key][:end] for key in ("tokens", "logprobs", "margins") if isinstance(row.get(key), list)}
        kept.append(row | cut)
    return fixture | {"greedy": [*kept, *rows[len(again["greedy"]) :]]}


def check_licences(folder: BundleFolder) -> list[Message]:
    """Check that licences, token shards and evidence agree, and that they allow the release."""
    stored, evidence = folder.read_object(layout.LICENCES), folder.read_object(layout.EVIDENCE)
    rows = list(folder.read_rows(layout.SHARDS))
    tokens: dict[str, int] = {}
    allows: dict[str, bool] = {}
    try:
        for row in rows:
            tokens[row["license"]] = tokens.get(row["license"], 0) + int(row["supervised_tokens"])
            allows[row["license"]] = allows.get(row["license"], True) and row["releasable"] is True
        total = sum(tokens.values())
        shares = {name: tokens[name] / total for name in tokens if not allows[name] and tokens[name]}
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        return [
            Message(
                "checking.odd_shard_rows",
                "{file}: a row cannot be read: {reason}",
                file=layout.SHARDS,
                reason=escape_unprintable(repr(error)),
            )
        ]
    policy = parse(ReleasePolicy, folder.read_object(layout.POLICY), layout.POLICY, BundleError)
    wanted = {"supervised_tokens": tokens, "release_allowed": allows, "not_releasable": shares}
    told = {key: stored.get(key) for key in wanted}
    found = [problem] if (problem := find_first_json_difference(told, wanted, 1e-9)) else []
    found += _synthetic_problems(stored.get("synthetic"), rows)
    if sum(shares.values()) > policy.not_releasable_max:
        found.append(
            Message(
                "checking.not_releasable", "{share:.1%} of the supervised tokens have licences that do not allow a release",
                share=sum(shares.values()),
            )
        )  # fmt: skip
    if (
        problem := find_first_json_difference(evidence.get("not_releasable"), shares, 1e-6, "not_releasable")
    ) and shares:
        found.append(
            Message(
                "checking.other_evidence",
                "The licence shares in {file} differ from the shares computed from the list of token shards: {problem}",
                file=layout.EVIDENCE,
                problem=problem,
            )
        )
    return found


def _synthetic_problems(stored: Any, rows: list[dict[str, Any]]) -> list[Message]:
    """Check the numbers of synthetic tokens. ``stored``: supervised tokens, by the model that wrote them."""
    counts = list(stored.values()) if isinstance(stored, dict) else [None]
    counted = [row.get("synthetic_tokens") for row in rows]
    if not all(type(one) is int and one >= 0 for one in [*counts, *counted]):
        return [
            Message(
                "checking.no_synthetic_counts", "{files}: the number of tokens that models wrote is missing or is not a whole number",
                files=[layout.LICENCES, layout.SHARDS],
            )
        ]  # fmt: skip
    problem = find_first_json_difference(sum(counts), sum(counted), place="synthetic")
    return [problem] if problem else []


def check_generated_document(folder: BundleFolder, path: str) -> list[Message]:
    """Check that a generated document is the one that the bundle's other files give."""
    if path not in folder.paths:
        return [make_missing_file_message(path)]
    again = generate_document(folder, path)
    if isinstance(again, str):
        problem = find_first_json_difference(
            folder.read(path).decode(errors="replace").split("\n"), again.split("\n"), place="the text"
        )
    else:
        problem = find_first_json_difference(folder.read_object(path), again)
    if problem is None:
        return []
    return [
        Message(
            "checking.other_document",
            "{file} does not agree with the bundle's other files: {problem}",
            file=path,
            problem=problem,
        )
    ]


def check_document_licences(folder: BundleFolder) -> list[Message]:
    """Check that every document in the bundle has a licence that allows its release, and that no such document is missing."""
    included = {str(row.get("license")): 0 for row in folder.read_rows(layout.SHARDS) if row.get("included") is True}
    if layout.DOCUMENTS not in folder.paths:
        return [make_missing_file_message(layout.DOCUMENTS)] if included else []
    wanted = dict(included)
    for row in folder.read_rows(layout.SHARDS):
        if (
            row.get("included") is True
            and isinstance(row.get("documents"), int)
            and isinstance(row.get("quarantined"), int)
        ):
            wanted[str(row["license"])] += row["documents"] - row["quarantined"]
    for number, row in enumerate(folder.read_rows(layout.DOCUMENTS, None), 1):
        licence = str(row.get("license") or NONE)
        if licence not in included:
            return [
                Message(
                    "checking.licence_not_included", "{file}, line {line}: licence {licence} does not allow redistribution",
                    file=layout.DOCUMENTS, line=number, licence=escape_unprintable(licence),
                )
            ]  # fmt: skip
        included[licence] += 1
    return [problem] if (problem := find_first_json_difference(included, wanted, place="documents")) else []
