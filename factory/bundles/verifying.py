"""Implements ``factory verify``: checks a bundle that anyone may have written. It reads nothing outside the bundle's folder."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from factory.bundles import checking, judging_again, provenance
from factory.bundles.files import layout, manifest
from factory.bundles.files.folder import BundleError, BundleFolder, escape_unprintable, make_unreadable_error
from factory.bundles.judging_again import compare_verdicts
from factory.bundles.signing import KEY_BYTES, check_signature, compute_key_fingerprint
from factory.core.errors import FactoryError
from factory.evals.probes.checks import ProbeCheck, join_sentences
from kernels.contract.message import Message


def _same_document(path: str) -> Message:
    return Message("verifying.same_document", "{file} agrees with the bundle's other files", file=path)


# The checks, in order: name → (function that returns the problems, message of a passed check or a function that returns the message).
CHECKS: dict[str, tuple[Callable[[BundleFolder], list[Message]], Message | Callable[[BundleFolder], Message]]] = {
    "files": (
        manifest.check_manifest,
        Message(
            "verifying.same_files",
            "The folder holds exactly the files that the manifest lists, and each file has the listed hash",
        ),
    ),
    "export": (
        checking.check_export,
        Message("verifying.same_model", "The model is the judged export, byte for byte"),
    ),
    "policy": (
        judging_again.check_policy,
        Message("verifying.same_policy", "The bundle has the policy that the verdict names"),
    ),
    "evidence": (
        judging_again.check_evidence,
        Message("verifying.same_evidence", "The evidence computed from the items is the recorded evidence"),
    ),
    "verdict": (
        lambda folder: compare_verdicts(folder).find_problems(),
        lambda folder: compare_verdicts(folder).describe_verdict(),
    ),
    "held_out": (
        judging_again.check_held_out,
        Message("verifying.same_suite", "The items belong to the suite that the evidence names"),
    ),
    "fixture": (
        checking.check_parity_fixture,
        Message(
            "verifying.same_fixture",
            "The answers computed from weights and tokenizer are the recorded answers (the parity fixture)",
        ),
    ),
    "licences": (
        checking.check_licences,
        Message("verifying.licences_allow", "Licences, token shards and evidence agree and allow the release"),
    ),
    "provenance": (
        provenance.check_provenance,
        Message("verifying.same_provenance", "The provenance names the bundle's files, evidence and token shards"),
    ),
    "card": (partial(checking.check_generated_document, path=layout.CARD), _same_document(layout.CARD)),
    "croissant": (partial(checking.check_generated_document, path=layout.CROISSANT), _same_document(layout.CROISSANT)),
    "spdx": (partial(checking.check_generated_document, path=layout.SPDX), _same_document(layout.SPDX)),
    "data": (
        checking.check_document_licences,
        Message(
            "verifying.same_data",
            "The bundle holds exactly the documents that it lists. The licences of all of them allow redistribution",
        ),
    ),
}
SIGNATURE_CHECK = "signature"


@dataclass(frozen=True)
class VerificationResult:
    """The result of all checks.

    ``pinned``: the signature was checked with a key from outside the folder. ``judge``: the result of ``VerdictComparison.to_json``; None if
    the bundle cannot be judged again.
    """

    checks: tuple[ProbeCheck, ...]
    signer: str | None  # fingerprint of the public key
    pinned: bool
    judge: dict[str, Any] | None = None

    @property
    def is_verified(self) -> bool:
        return all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The result as JSON-ready values."""
        facts = {"ok": self.is_verified, "signer": self.signer, "pinned": self.pinned, "judge": self.judge}
        return facts | {"checks": [asdict(c) for c in self.checks]}


def verify_bundle(root: Path, public_key: Path | None = None) -> VerificationResult:
    """Run every check of a bundle: the files, the signature, then the rest of ``CHECKS``. A failed check raises no error.

    ``public_key``: the signer's key, from the publisher. By default, the key in the folder is used, which proves nothing about the signer.
    """
    try:
        folder = BundleFolder.open(root)
        folder.file_hashes  # noqa: B018 - all later checks need them
    except BundleError as error:
        others = (name for name in (SIGNATURE_CHECK, *CHECKS) if name != "files")
        skipped = Message("verifying.skipped", "Skipped, because the folder is not safe to read")
        unasked = [ProbeCheck(name, None, skipped) for name in others]
        return VerificationResult((ProbeCheck("files", False, error.message), *unasked), None, public_key is not None)
    found = {name: run_check(name, folder) for name in CHECKS}
    signed, signer = _signature(folder, public_key)
    files = found.pop("files")
    return VerificationResult((files, signed, *found.values()), signer, public_key is not None, _judge(folder))


def run_check(name: str, folder: BundleFolder) -> ProbeCheck:
    """Run the check ``name`` of ``CHECKS``."""
    problems_of, passed = CHECKS[name]
    try:
        problems = problems_of(folder)
        detail = join_sentences(problems) if problems else passed if isinstance(passed, Message) else passed(folder)
    except FactoryError as error:
        return ProbeCheck(name, False, _shown_error(error))
    return ProbeCheck(name, not problems, detail)


def _shown_error(error: FactoryError) -> Message:
    """Return the message of an error that may quote a bundle, safe to print."""
    return Message.from_parts(error.code, escape_unprintable(str(error), 500), error.data)


def _judge(folder: BundleFolder) -> dict[str, Any] | None:
    try:
        return compare_verdicts(folder).to_json()
    except FactoryError:  # the check of the verdict reports it
        return None


def _signature(folder: BundleFolder, public_key: Path | None) -> tuple[ProbeCheck, str | None]:
    """Return the result of checking the signature, and the fingerprint of the key that was used."""
    signer = None
    try:
        pem = folder.read(layout.PUBLIC_KEY, KEY_BYTES) if public_key is None else _given(public_key)
        signer = compute_key_fingerprint(pem, layout.PUBLIC_KEY if public_key is None else str(public_key))
        folder.read(layout.SIGNATURE)  # raises if it is missing or too large
        with tempfile.TemporaryDirectory(prefix="factory-key-") as aside:
            key = Path(aside) / "key.pem"
            key.write_bytes(pem)
            check_signature(folder.root, key)
    except FactoryError as error:
        return ProbeCheck(SIGNATURE_CHECK, False, _shown_error(error)), signer
    if public_key is None:
        own = Message(
            "verifying.own_key",
            "The bundle was signed with the key in its own folder: {signer}. To check who signed the bundle, give "
            "the publisher's key with '--public-key'",
            signer=signer,
        )
        return ProbeCheck(SIGNATURE_CHECK, True, own), signer
    return ProbeCheck(
        SIGNATURE_CHECK,
        True,
        Message("verifying.given_key", "The bundle was signed with the given key: {signer}", signer=signer),
    ), signer


def _given(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(KEY_BYTES)
    except OSError as error:
        raise make_unreadable_error(str(path), error) from error
