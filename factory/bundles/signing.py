"""The signature: an OpenSSF model signature (``model-signing``) over every file, made with an elliptic-curve key, without a network.

The factory's own key is made at first use, in the workspace's ``keys/``, readable by its owner alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from factory.backups.keys import KEY, KEYS, PUBLIC
from factory.bundles.files.folder import BundleError, shown
from factory.bundles.files.layout import SIGNATURE
from factory.core.errors import InputError
from factory.core.removal import remove
from kernels.contract.files import put_in_place, write_atomically

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

CURVES = ("secp256r1", "secp384r1", "secp521r1")  # that the library signs with
KEY_BYTES = 1 << 16


def own_key(root: Path) -> Path:
    """The workspace's private key, made when there is none. Raises: InputError when others may read it."""
    path = root / KEYS / KEY
    if not path.exists():
        _make(root / KEYS)
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(f"{path}: others may read this private key: 'chmod 600 {path}', or make a new one: remove it")
    return path


def _make(folder: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    folder.mkdir(mode=0o700, exist_ok=True)
    aside = folder / f".{uuid.uuid4().hex[:12]}"
    aside.mkdir(mode=0o700)  # nobody else sees the key before its own mode holds
    try:
        write_atomically(aside / KEY, private)
        os.chmod(aside / KEY, 0o600)
        write_atomically(folder / PUBLIC, _pem(key.public_key()))
        put_in_place(aside / KEY, folder / KEY)
    finally:
        remove(aside)


def public_pem(private: Path) -> bytes:
    """The public half of a private key's file. Raises: InputError for what is no unencrypted key of a curve that can sign."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_private_key(_read(private), None)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{private}: no private key in PEM without a password: {str(error)[:200]}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in CURVES:
        raise InputError(f"{private}: a key of one of the curves {', '.join(CURVES)} is needed")
    return _pem(key.public_key())


def fingerprint(pem: bytes, where: str) -> str:
    """SHA-256 of a public key's DER form. Raises: BundleError for what is no public key that can be verified with."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise BundleError(f"{where} is no public key in PEM: {shown(str(error))}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in CURVES:
        raise BundleError(f"{where}: a key of one of the curves {', '.join(CURVES)} is needed")
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def sign(folder: Path, private: Path) -> None:
    """Write the signature of a folder into it."""
    from model_signing import signing

    config = signing.Config().use_elliptic_key_signer(private_key=private).set_hashing_config(_hashing())
    config.sign(folder, folder / SIGNATURE)


def check_signature(folder: Path, public: Path) -> None:
    """Raises: BundleError when the signature is not of these files, or not by that key."""
    from model_signing import verifying

    config = verifying.Config().use_elliptic_key_verifier(public_key=public).set_hashing_config(_hashing())
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the library prints its warnings
            config.verify(folder, folder / SIGNATURE)
    except Exception as error:  # of whatever kind: the library parses what anyone may have written
        words = str(error) or type(error).__name__.replace("InvalidSignature", "it was made with another key")
        if changed := re.findall(r"Hash mismatch for \\*'(.+?)\\*':", words):  # the rest is bytes
            words = f"signed were other contents of {', '.join(changed)}"
        raise BundleError(f"{SIGNATURE} is no signature of these files by that key: {shown(words, 300)}") from error


def _hashing() -> Any:
    """Given, so that what a signature says of hashing is not obeyed."""
    from model_signing import hashing

    config = hashing.Config().use_file_serialization(hashing_algorithm="sha256", allow_symlinks=False)
    return config.set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)


def _pem(key: ec.EllipticCurvePublicKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(KEY_BYTES)
