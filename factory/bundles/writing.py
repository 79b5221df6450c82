"""Writes a bundle aside, verifies it as anyone else would, and puts it in place whole; or leaves nothing."""

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
from factory.bundles.checking import make_fixture
from factory.bundles.documents.generated import generate_document
from factory.bundles.files import layout
from factory.bundles.files.folder import BundleFolder
from factory.bundles.files.manifest import manifest
from factory.bundles.gathering import gather
from factory.bundles.provenance import statement
from factory.bundles.shards import json_line, releasable_documents
from factory.bundles.verifying import Verified, verify
from factory.core.errors import InputError
from factory.core.exports import folder_sha256
from factory.core.left_files import DEPTH, open_file
from factory.core.removal import remove
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.anomalies import rewound_in
from factory.ledger.ledger import Ledger, record
from factory.ledger.plant import Plant
from factory.ledger.rows import ReleaseRow, SegmentRow, Subject
from factory.release.checks import check_export
from kernels.contract.files import finite_json, put_in_place

# ``--traces``: what the training left: metrics of every segment, and the checkpoints that are kept of it.
LEFT = ("metrics.jsonl", "anomalies.jsonl")  # by the trainer, in a segment's folder


def copy_traces(root: Path, ledger: Ledger, segment: int, place: Path) -> None:
    """Into ``place``, a folder a segment; what is no longer kept is left out. No link is followed: a trainer wrote these folders.

    Raises: OSError.
    """
    for row in SegmentRow.lineage(ledger, segment):
        target = place / f"segment-{row.id:05d}"
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
    with open_file(source) as inside, open(target, "xb") as out:
        shutil.copyfileobj(inside, out, 1 << 22)


BUNDLES = "bundles"  # of a workspace
PUBLISHED = "published"
LICENCE = re.compile(r"[A-Za-z0-9.+:() -]{1,200}")


@dataclass(frozen=True)
class BundleOptions:
    """What a person asked for."""

    out: Path | None = None
    data: bool = False
    traces: bool = False
    key: Path | None = None  # private, PEM; the workspace's own by default
    licence: str = "NOASSERTION"  # of the weights, as an SPDX expression


@dataclass(frozen=True)
class Written:
    folder: Path
    signer: str  # fingerprint of the public key


def write_bundle(plant: Plant, number: int, options: BundleOptions) -> Written:
    """Make the bundle of a release.

    Raises: InputError, and leaves nothing, when there is something at the place, when the export is not what was judged, when the licences
    of the training data do not allow it, or when what was written does not verify.
    """
    with plant.workspace.lock("bundle"):
        return _write_bundle(plant, number, options)


def _write_bundle(plant: Plant, number: int, options: BundleOptions) -> Written:
    release = ReleaseRow.get(plant.ledger, number)
    if not LICENCE.fullmatch(options.licence):
        raise InputError(f"{options.licence!r} is no SPDX expression, such as Apache-2.0")
    out = (options.out or plant.workspace.root / BUNDLES / f"release-{number:05d}").absolute()
    if out.is_symlink() or out.exists():
        raise InputError(f"{out} is there already: name another folder (--out), or remove it")
    if release.state != PUBLISHED:
        raise InputError(f"release {number} is {release.state}, not published: 'factory release' finishes it")
    if spoiled := rewound_in(plant.ledger, release.segment):
        raise InputError(
            f"release {number} is not handed on: its training went wrong, segment {spoiled[0]} was rewound"
        )
    check_export(plant.ledger, release.candidate)
    files = gather(plant, release, options.licence, options.data)
    private = options.key or signing.own_key(plant.workspace.root)
    public = signing.public_pem(private)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out.parent} cannot be made: {error.strerror}") from error
    for left in out.parent.glob(f".{glob.escape(out.name)}.{'?' * 12}.part"):  # of one that was killed
        remove(left)
    aside = out.with_name(f".{out.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        aside.mkdir()
        _copy_export(release, aside)
        for path, value in files.items():
            _write(aside, path, value)
        if options.data:
            rules = DataPolicy.load(plant.workspace.policy("data.yaml")).licences
            known = plant.workspace.root, plant.ledger, Tokenizer.load(plant.workspace.tokenizer)
            _write_lines(aside / layout.DOCUMENTS, releasable_documents(*known, release.segment, rules))
        if options.traces:
            copy_traces(plant.workspace.root, plant.ledger, release.segment, aside / layout.TRACES)
        plant.progress.line(f"  release {number}: its parity fixture is made")
        _write(aside, layout.FIXTURE, make_fixture(aside / layout.MODEL))
        _write(aside, layout.PUBLIC_KEY, public.decode())
        shards = files[layout.SHARDS]
        _write(aside, layout.PROVENANCE, statement(plant.ledger, release, BundleFolder.open(aside).hashes, shards))
        folder = BundleFolder.open(aside)
        for path in layout.GENERATED:
            _write(aside, path, generate_document(folder, path))
        _write(aside, layout.MANIFEST, manifest(f"release {number}", BundleFolder.open(aside).hashes))
        signing.sign(aside, private)
        plant.progress.line(f"  release {number}: what was written is verified")
        verified = _refuse_unverified(number, aside)
        if verified.judge and not verified.judge["same"]:
            plant.progress.line(f"  release {number}: {next(c.detail for c in verified.checks if c.name == 'verdict')}")
        put_in_place(aside, out)
    finally:
        remove(aside)
    signer = signing.fingerprint(public, str(private))
    with plant.ledger.begin() as tx:
        record(
            tx,
            "bundled",
            Subject("release", number),
            {"folder": plant.ledger.inside(out), "signer": signer, "data": options.data},
        )
    return Written(out, signer)


def _copy_export(release: ReleaseRow, aside: Path) -> None:
    """Raises: InputError when it changed while it was copied."""
    shutil.copytree(release.export_path, aside / layout.MODEL, symlinks=True)
    for path in (aside / layout.MODEL).iterdir():
        path.chmod(0o644)  # others are to read it
    if (found := folder_sha256(aside / layout.MODEL)) != release.export_sha256:
        raise InputError(
            f"{release.export_path} changed while it was copied (sha256 {found[:12]}…, recorded {release.export_sha256[:12]}…): "
            "no bundle was made"
        )


def _refuse_unverified(number: int, aside: Path) -> Verified:
    verified = verify(aside)
    wrong = [f"{check.name}: {check.detail}" for check in verified.checks if not check.ok]
    if wrong:
        raise InputError(
            f"release {number}: what was written does not verify, so no bundle was made: {'; '.join(wrong)}"
        )
    return verified


def _write(aside: Path, path: str, value: Any) -> None:
    place = aside / path
    place.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(value, list):
        _write_lines(place, value)
    else:
        place.write_text(value if isinstance(value, str) else finite_json(value, indent=1) + "\n", encoding="utf-8")


def _write_lines(place: Path, rows: Iterable[dict[str, Any]]) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place, "w", encoding="utf-8") as out:
        out.writelines(json_line(row) for row in rows)
