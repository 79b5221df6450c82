"""``factory verify``: is a bundle what it says? Of a folder that anyone may have written, with nothing but what lies in it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from factory.bundles import checking, judging_again, provenance
from factory.bundles.files import layout, manifest
from factory.bundles.files.folder import BundleError, BundleFolder, shown
from factory.bundles.judging_again import two_verdicts
from factory.bundles.signing import KEY_BYTES, check_signature, fingerprint
from factory.core.errors import FactoryError
from factory.evals.parity import Check

# What is asked, in this order: name of the check, what gives the problems, what is said where there is none, or what gives it.
CHECKS: dict[str, tuple[Callable[[BundleFolder], list[str]], str | Callable[[BundleFolder], str]]] = {
    "files": (manifest.problems, "every file is there, with the hash that the manifest says, and no other"),
    "export": (checking.export_problems, "the model is, byte for byte, what was judged"),
    "policy": (judging_again.policy_problems, "the policy is the one that it was judged under"),
    "evidence": (judging_again.evidence_problems, "the numbers follow from the items"),
    "verdict": (lambda folder: two_verdicts(folder).problems(), lambda folder: two_verdicts(folder).words()),
    "held_out": (judging_again.held_out_problems, "the items are of the suite that the evidence names"),
    "fixture": (checking.fixture_problems, "weights and tokenizer say again what the fixture says"),
    "licences": (checking.licence_problems, "licences, token shards and evidence agree, and allow the release"),
    "provenance": (provenance.problems, "it names these files, this evidence and these token shards"),
    "card": (partial(checking.document_problems, path=layout.CARD), "it says what the other files say"),
    "croissant": (partial(checking.document_problems, path=layout.CROISSANT), "it says what the other files say"),
    "spdx": (partial(checking.document_problems, path=layout.SPDX), "it says what the other files say"),
    "data": (checking.data_problems, "it holds the documents that it names, and none that may not be handed on"),
}
SIGNATURE_CHECK = "signature"


@dataclass(frozen=True)
class Verified:
    """What was found. ``pinned``: the signature was held to a key from outside the folder; ``judge``: whose judge gave the verdict, as
    ``TwoVerdicts.to_json`` tells it; None: the bundle cannot be judged again."""

    checks: tuple[Check, ...]
    signer: str | None  # fingerprint of the public key
    pinned: bool
    judge: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """As JSON for programs."""
        facts = {"ok": self.ok, "signer": self.signer, "pinned": self.pinned, "judge": self.judge}
        return facts | {"checks": [asdict(c) for c in self.checks]}


def verify(root: Path, public_key: Path | None = None) -> Verified:
    """Every check of a bundle, in the order of ``CHECKS`` with the signature after the files. A failed check is an answer, not an exception.

    ``public_key``: the signer's, from its publisher; without it the key in the folder is taken, which whoever wrote the folder chose.
    """
    try:
        folder = BundleFolder.open(root)
        folder.hashes  # noqa: B018 - all later checks need them
    except BundleError as error:
        others = (name for name in (SIGNATURE_CHECK, *CHECKS) if name != "files")
        unasked = [Check(name, None, "not looked at: the folder is not safe to read") for name in others]
        return Verified((Check("files", False, str(error)), *unasked), None, public_key is not None)
    found = {name: ask(name, folder) for name in CHECKS}
    signed, signer = _signature(folder, public_key)
    files = found.pop("files")
    return Verified((files, signed, *found.values()), signer, public_key is not None, _judge(folder))


def ask(name: str, folder: BundleFolder) -> Check:
    """One of ``CHECKS``."""
    problems_of, well = CHECKS[name]
    try:
        problems = problems_of(folder)
        words = "; ".join(problems) or (well if isinstance(well, str) else well(folder))
    except FactoryError as error:
        return Check(name, False, shown(str(error), 500))
    return Check(name, not problems, words)


def _judge(folder: BundleFolder) -> dict[str, Any] | None:
    try:
        return two_verdicts(folder).to_json()
    except FactoryError:  # which the check of the verdict says
        return None


def _signature(folder: BundleFolder, public_key: Path | None) -> tuple[Check, str | None]:
    """The check, and whose signature it is held to."""
    signer = None
    try:
        pem = folder.read(layout.PUBLIC_KEY, KEY_BYTES) if public_key is None else _given(public_key)
        signer = fingerprint(pem, layout.PUBLIC_KEY if public_key is None else str(public_key))
        folder.read(layout.SIGNATURE)  # is it there, and not too large?
        with tempfile.TemporaryDirectory(prefix="factory-key-") as aside:
            key = Path(aside) / "key.pem"
            key.write_bytes(pem)
            check_signature(folder.root, key)
    except FactoryError as error:
        return Check(SIGNATURE_CHECK, False, shown(str(error), 500)), signer
    if public_key is None:
        return Check(
            SIGNATURE_CHECK, True, f"by the key in the folder, {signer}: compare it with its publisher's (--public-key)"
        ), signer
    return Check(SIGNATURE_CHECK, True, f"by {signer}, the key that was given"), signer


def _given(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(KEY_BYTES)
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from error
