"""Writes a bundle to a temporary folder, verifies the bundle, and renames the folder into place. After an error, nothing is left."""

from __future__ import annotations

import glob
import os
import re
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factory.bundles import signing
from factory.bundles.checking import compute_parity_fixture
from factory.bundles.documents.generated import generate_document
from factory.bundles.files import layout
from factory.bundles.files.folder import BundleFolder
from factory.bundles.files.manifest import build_manifest
from factory.bundles.provenance import build_provenance_statement
from factory.bundles.release_files import read_release_files
from factory.bundles.shards import read_releasable_documents, to_json_line
from factory.bundles.verifying import VerificationResult, verify_bundle
from factory.core.errors import InputError
from factory.core.exports import hash_export_folder
from factory.core.path_removal import remove_path
from factory.core.untrusted_trainer_files import DEPTH, open_regular_file
from factory.evals.probes.checks import join_sentences
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.anomalies import list_rewound_segments_of_lineage
from factory.ledger.ledger import Ledger, record_event
from factory.ledger.plant import Plant
from factory.ledger.rows import ReleaseRow, SegmentRow, Subject
from factory.release.checks import check_export_unchanged
from kernels.contract.files import encode_finite_json, rename_into_place
from kernels.contract.message import Message

# With ``--traces``, the bundle has these files of every segment, and the checkpoints that still exist.
LEFT = ("metrics.jsonl", "anomalies.jsonl")  # the trainer wrote them into the segment's folder


def copy_training_traces(root: Path, ledger: Ledger, segment: int, target_folder: Path) -> None:
    """Copy metrics and checkpoints of a segment and of all segments before it into ``target_folder``, one folder for each segment.

    Links are not followed, because a trainer wrote these folders. Raises: OSError.
    """
    for row in SegmentRow.read_lineage(ledger, segment):
        target = target_folder / f"segment-{row.id:05d}"
        target.mkdir(parents=True)
        for name in LEFT:
            if (root / row.folder / name).is_file():
                _copy_file(root / row.folder / name, target / name)
        sql = "SELECT step, path FROM checkpoints WHERE segment = :segment ORDER BY step"
        for one in ledger.read(sql, segment=row.id):
            if one["path"] and (root / one["path"]).is_dir():
                _copy_folder(root / one["path"], target / f"checkpoint-{one['step']:09d}", 0)


def _copy_folder(source: Path, target: Path, depth: int) -> None:
    if depth > DEPTH:
        return
    target.mkdir()
    with os.scandir(source) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _copy_folder(Path(entry.path), target / entry.name, depth + 1)
            elif entry.is_file(follow_symlinks=False):
                _copy_file(Path(entry.path), target / entry.name)


def _copy_file(source: Path, target: Path) -> None:
    with open_regular_file(source) as inside, open(target, "xb") as out:
        shutil.copyfileobj(inside, out, 1 << 22)


BUNDLES = "bundles"  # folder of a workspace
PUBLISHED = "published"
LICENCE = re.compile(r"[A-Za-z0-9.+:() -]{1,200}")


@dataclass(frozen=True)
class BundleOptions:
    """The options of a bundle: its folder, its optional parts, the key that signs it, and the licence of the weights."""

    out: Path | None = None
    data: bool = False
    traces: bool = False
    key: Path | None = None  # a private key in PEM format; default: the workspace's own key
    licence: str = "NOASSERTION"  # of the weights, as an SPDX expression


@dataclass(frozen=True)
class WrittenBundle:
    """A bundle that was written."""

    folder: Path
    signer: str  # fingerprint of the public key


def write_release_bundle(plant: Plant, number: int, options: BundleOptions) -> WrittenBundle:
    """Write the bundle of a release and verify it.

    Raises: InputError if the output folder exists, if the export is not the judged export, if licences forbid a bundle, or if the bundle fails
    its verification. After an error, nothing is left.
    """
    with plant.workspace.hold_lock("bundle"):
        return _write_bundle(plant, number, options)


def _write_bundle(plant: Plant, number: int, options: BundleOptions) -> WrittenBundle:
    release = ReleaseRow.get(plant.ledger, number)
    if not LICENCE.fullmatch(options.licence):
        raise InputError(
            "writing.no_licence",
            "{licence!r} is not an SPDX expression. Write for example 'Apache-2.0'",
            licence=options.licence,
        )
    out = (options.out or plant.workspace.root / BUNDLES / f"release-{number:05d}").absolute()
    if out.is_symlink() or out.exists():
        raise InputError(
            "writing.exists", "{folder} exists already. Remove it, or choose another folder with '--out'", folder=out
        )
    if release.state != PUBLISHED:
        raise InputError(
            "writing.not_published", "Release {release} is {state}, not published. Finish the release with 'factory release'",
            release=number, state=release.state,
        )  # fmt: skip
    if spoiled := list_rewound_segments_of_lineage(plant.ledger, release.segment):
        raise InputError(
            "writing.rewound", "No bundle was made of release {release}, because segment {segment} of its training was rewound",
            release=number, segment=spoiled[0],
        )  # fmt: skip
    check_export_unchanged(plant.ledger, release.candidate)
    files = read_release_files(plant, release, options.licence, options.data)
    private = options.key or signing.ensure_private_key(plant.workspace.root)
    public = signing.derive_public_key(private)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            "writing.no_parent",
            "The folder {folder} cannot be made: {reason}",
            folder=out.parent,
            reason=error.strerror,
        ) from error
    for left in out.parent.glob(f".{glob.escape(out.name)}.{'?' * 12}.part"):  # a killed process left it
        remove_path(left)
    aside = out.with_name(f".{out.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        aside.mkdir()
        _copy_export(release, aside)
        for path, value in files.items():
            _write(aside, path, value)
        if options.data:
            rules = DataPolicy.load(plant.workspace.policy_path("data.yaml")).licences
            known = plant.workspace.root, plant.ledger, Tokenizer.load(plant.workspace.tokenizer)
            _write_lines(aside / layout.DOCUMENTS, read_releasable_documents(*known, release.segment, rules))
        if options.traces:
            copy_training_traces(plant.workspace.root, plant.ledger, release.segment, aside / layout.TRACES)
        plant.progress.line(
            Message(
                "writing.fixture",
                "  release {release}: computing the model's expected answers (the parity fixture)",
                release=number,
            )
        )
        _write(aside, layout.FIXTURE, compute_parity_fixture(aside / layout.MODEL))
        _write(aside, layout.PUBLIC_KEY, public.decode())
        shards = files[layout.SHARDS]
        _write(
            aside,
            layout.PROVENANCE,
            build_provenance_statement(plant.ledger, release, BundleFolder.open(aside).file_hashes, shards),
        )
        folder = BundleFolder.open(aside)
        for path in layout.GENERATED:
            _write(aside, path, generate_document(folder, path))
        _write(aside, layout.MANIFEST, build_manifest(f"release {number}", BundleFolder.open(aside).file_hashes))
        signing.sign_folder(aside, private)
        plant.progress.line(Message("writing.verifying", "  release {release}: verifying the bundle", release=number))
        verified = _refuse_unverified(number, aside)
        if verified.judge and not verified.judge["same"]:
            detail = next(c.detail for c in verified.checks if c.name == "verdict")
            plant.progress.line(
                Message("writing.other_judge", "  release {release}: {detail}", release=number, detail=detail)
            )
        rename_into_place(aside, out)
    finally:
        remove_path(aside)
    signer = signing.compute_key_fingerprint(public, str(private))
    with plant.ledger.begin() as tx:
        record_event(
            tx,
            "bundled",
            Subject("release", number),
            {"folder": plant.ledger.to_stored_path(out), "signer": signer, "data": options.data},
        )
    return WrittenBundle(out, signer)


def _copy_export(release: ReleaseRow, aside: Path) -> None:
    """Copy the model's export into the bundle. Raises: InputError if the export changed during the copy."""
    shutil.copytree(release.export_path, aside / layout.MODEL, symlinks=True)
    for path in (aside / layout.MODEL).iterdir():
        path.chmod(0o644)  # so that other users can read it
    if (found := hash_export_folder(aside / layout.MODEL)) != release.export_sha256:
        raise InputError(
            "writing.export_changed", "{export} changed during the copy (sha256 {found:.12}…, recorded {recorded:.12}…). No bundle was made",
            export=release.export_path, found=found, recorded=release.export_sha256,
        )  # fmt: skip


def _refuse_unverified(number: int, aside: Path) -> VerificationResult:
    verified = verify_bundle(aside)
    failed = [check for check in verified.checks if not check.ok]
    if failed:
        raise InputError(
            "writing.not_verified", "The bundle of release {release} failed its verification and was removed. {problems}",
            release=number, checks=[check.name for check in failed],
            problems=join_sentences([Message("writing.failed_check", "{check}: {detail}", check=one.name, detail=one.detail) for one in failed]),
        )  # fmt: skip
    return verified


def _write(aside: Path, path: str, value: Any) -> None:
    place = aside / path
    place.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(value, list):
        _write_lines(place, value)
    else:
        place.write_text(
            value if isinstance(value, str) else encode_finite_json(value, indent=1) + "\n", encoding="utf-8"
        )


def _write_lines(place: Path, rows: Iterable[dict[str, Any]]) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place, "w", encoding="utf-8") as out:
        out.writelines(to_json_line(row) for row in rows)
