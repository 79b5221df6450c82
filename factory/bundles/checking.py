"""The checks of ``factory verify``, each a question with what is wrong as its answer; each is asked of the files alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from factory.bundles.documents.generated import generate_document
from factory.bundles.files import layout
from factory.bundles.files.folder import BundleError, BundleFolder, difference, json_object, shown
from factory.core.exports import files_sha256
from factory.core.launching import die_with
from factory.core.workspace import code_root
from factory.gates.release.licences import NONE
from factory.gates.release.policy import ReleasePolicy
from trainer.contract.strict import parse

LOGPROB_TOLERANCE = 1e-3  # nats between two machines' fp32, as serving allows
FIXTURE_SECONDS = 1800.0


def export_problems(folder: BundleFolder) -> list[str]:
    """Is the model, byte for byte, what was judged?"""
    inside = {path: hashed.sha256 for path, hashed in folder.hashes.items() if path.startswith(f"{layout.MODEL}/")}
    digests = {Path(PurePosixPath(path).relative_to(layout.MODEL)): sha256 for path, sha256 in inside.items()}
    wanted = folder.object(layout.VERDICT).get("subject_sha256")
    found = files_sha256(digests)
    if found == wanted:
        return []
    return [f"{layout.MODEL}/ (sha256 {found[:12]}) is not what was judged ({shown(str(wanted), 12)})"]


def fixture_problems(folder: BundleFolder) -> list[str]:
    """Do weights and tokenizer say what the fixture says? Made again in a process of its own."""
    recorded = folder.object(layout.FIXTURE)
    tokenizer = f"{layout.MODEL}/tokenizer.json"
    if tokenizer not in folder.names or folder.hashes[tokenizer].bytes > layout.TOKENIZER_BYTES:
        return [f"{tokenizer} is missing, or larger than {layout.TOKENIZER_BYTES} bytes"]
    again = make_fixture(folder.root / layout.MODEL)
    for name in ("texts", "chats"):  # other ids explain other continuations
        if words := difference(recorded.get(name), again[name], place=name):
            return [words]
    words = difference(_sure(recorded, again), _sure(again, again), LOGPROB_TOLERANCE)
    return [words] if words else []


def make_fixture(export: Path) -> dict[str, Any]:
    """``factory.serving.fixture`` of an export, in a process of its own. Raises: BundleError."""
    with tempfile.TemporaryDirectory(prefix="factory-fixture-") as folder:
        out = Path(folder) / "fixture.json"
        words = [sys.executable, "-P", "-m", "factory.serving.fixture", str(export.resolve()), str(out)]
        environment = os.environ | {"PYTHONPATH": str(code_root())}
        try:
            done = subprocess.run(
                words,
                cwd=folder,
                env=environment,
                capture_output=True,
                timeout=FIXTURE_SECONDS,
                preexec_fn=die_with(os.getpid()),
            )
        except subprocess.TimeoutExpired:
            raise BundleError(f"the fixture could not be made again within {FIXTURE_SECONDS:.0f} s") from None
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [
                f"it ended with {done.returncode}"
            ]
            raise BundleError(f"the fixture cannot be made from {layout.MODEL}/: {shown(last[0], 300)}")
        return json_object(out.read_bytes(), layout.FIXTURE)


def _sure(fixture: dict[str, Any], again: dict[str, Any]) -> Any:
    """A fixture without the ends of continuations from where two tokens are equally likely, as this machine sees it."""
    rows = fixture.get("greedy")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return fixture
    kept = []
    for row, own in zip(rows, again["greedy"]):
        end = next((n for n, margin in enumerate(own["margins"]) if margin <= 2 * LOGPROB_TOLERANCE), None)
        cut = {key: row[key][:end] for key in ("tokens", "logprobs", "margins") if isinstance(row.get(key), list)}
        kept.append(row | cut)
    return fixture | {"greedy": [*kept, *rows[len(again["greedy"]) :]]}


def licence_problems(folder: BundleFolder) -> list[str]:
    """Do licences, token shards and evidence agree, and allow the release?"""
    stored, evidence = folder.object(layout.LICENCES), folder.object(layout.EVIDENCE)
    rows = list(folder.rows(layout.SHARDS))
    tokens: dict[str, int] = {}
    allows: dict[str, bool] = {}
    try:
        for row in rows:
            tokens[row["license"]] = tokens.get(row["license"], 0) + int(row["supervised_tokens"])
            allows[row["license"]] = allows.get(row["license"], True) and row["releasable"] is True
        total = sum(tokens.values())
        shares = {name: tokens[name] / total for name in tokens if not allows[name] and tokens[name]}
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        return [f"{layout.SHARDS}: {shown(repr(error))}"]
    policy = parse(ReleasePolicy, folder.object(layout.POLICY), layout.POLICY, BundleError)
    wanted = {"supervised_tokens": tokens, "release_allowed": allows, "not_releasable": shares}
    told = {key: stored.get(key) for key in wanted}
    found = [words] if (words := difference(told, wanted, 1e-9)) else []
    found += _synthetic_problems(stored.get("synthetic"), rows)
    if sum(shares.values()) > policy.not_releasable_max:
        found.append(f"{sum(shares.values()):.1%} of the supervised tokens have licences that do not allow a release")
    if (words := difference(evidence.get("not_releasable"), shares, 1e-6, "not_releasable")) and shares:
        found.append(f"the evidence says otherwise: {words}")
    return found


def _synthetic_problems(stored: Any, rows: list[dict[str, Any]]) -> list[str]:
    """``stored``: supervised tokens by the model that wrote them."""
    counts = list(stored.values()) if isinstance(stored, dict) else [None]
    counted = [row.get("synthetic_tokens") for row in rows]
    if not all(type(one) is int and one >= 0 for one in [*counts, *counted]):
        return [f"how many tokens models wrote is not said in {layout.LICENCES} and {layout.SHARDS}"]
    words = difference(sum(counts), sum(counted), place="synthetic")
    return [words] if words else []


def document_problems(folder: BundleFolder, path: str) -> list[str]:
    """Is a document that follows from the other files what they say?"""
    if path not in folder.names:
        return [f"{path} is missing"]
    again = generate_document(folder, path)
    if isinstance(again, str):
        lines, wanted = folder.read(path).decode(errors="replace").split("\n"), again.split("\n")
        words = (
            difference(lines, wanted) if len(lines) == len(wanted) else f"{len(lines)} lines, expected {len(wanted)}"
        )
        return [f"it does not say what the other files say: {words}"] if words else []
    words = difference(folder.object(path), again)
    return [f"it does not say what the other files say: {words}"] if words else []


def data_problems(folder: BundleFolder) -> list[str]:
    """Has every document that is handed on a licence that allows it, and is each there that should be?"""
    included = {str(row.get("license")): 0 for row in folder.rows(layout.SHARDS) if row.get("included") is True}
    if layout.DOCUMENTS not in folder.names:
        return [f"{layout.DOCUMENTS} is missing"] if included else []
    wanted = dict(included)
    for row in folder.rows(layout.SHARDS):
        if (
            row.get("included") is True
            and isinstance(row.get("documents"), int)
            and isinstance(row.get("quarantined"), int)
        ):
            wanted[str(row["license"])] += row["documents"] - row["quarantined"]
    for number, row in enumerate(folder.rows(layout.DOCUMENTS, None), 1):
        licence = str(row.get("license") or NONE)
        if licence not in included:
            return [f"{layout.DOCUMENTS}, line {number}: licence {shown(licence)} is not one that may be handed on"]
        included[licence] += 1
    return [words] if (words := difference(included, wanted, place="documents")) else []
