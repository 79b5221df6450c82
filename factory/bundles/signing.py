"""Signs a bundle: an OpenSSF model signature (``model-signing``) over every file, made offline with an elliptic-curve key.

The first signature makes the factory's own key in the workspace's ``keys/``. Only the key's owner can read it.
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

from factory.backups.signing_keys import KEY, KEYS, PUBLIC
from factory.bundles.files.folder import BundleError, escape_unprintable
from factory.bundles.files.layout import SIGNATURE
from factory.core.errors import InputError
from factory.core.path_removal import remove_path
from kernels.contract.files import rename_into_place, write_atomically
from kernels.contract.message import Message

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

CURVES = ("secp256r1", "secp384r1", "secp521r1")  # the library supports only these
KEY_BYTES = 1 << 16


def ensure_private_key(root: Path) -> Path:
    """Return the path of the workspace's private key; make the key if there is none. Raises: InputError if other users can read the key."""
    path = root / KEYS / KEY
    if not path.exists():
        _make(root / KEYS)
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(
            "signing.readable_key",
            "Other users can read the private key {path}. If one of them may have copied the key, remove the "
            "file, and the factory makes a new key. To keep the key, let only yourself read it: 'chmod 600 {path}'",
            path=path,
        )
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
    aside.mkdir(mode=0o700)  # hides the key until its own mode is set
    try:
        write_atomically(aside / KEY, private)
        os.chmod(aside / KEY, 0o600)
        write_atomically(folder / PUBLIC, _pem(key.public_key()))
        rename_into_place(aside / KEY, folder / KEY)
    finally:
        remove_path(aside)


def derive_public_key(private: Path) -> bytes:
    """Return the public key, as PEM, of the private key in a file. Raises: InputError unless it is an unencrypted key of a supported curve."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_private_key(_read(private), None)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            "signing.no_private_key",
            "{path} is not a private key in PEM format, or a password protects the key: {reason}",
            path=private, reason=str(error)[:200],
        ) from error  # fmt: skip
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name not in CURVES:
        raise InputError(_other_curve(str(private)))
    return _pem(key.public_key())


def compute_key_fingerprint(pem: bytes, where: str) -> str:
    """Return the SHA-256 of a public key in DER form. Raises: BundleError unless the key can verify a signature."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise BundleError(
            "signing.no_public_key",
            "{path} is not a public key in PEM format: {reason}",
            path=where,
            reason=escape_unprintable(str(error)),
        ) from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in CURVES:
        raise BundleError(_other_curve(where))
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def _other_curve(where: str) -> Message:
    return Message(
        "signing.other_curve",
        "{path} is not a key of a supported elliptic curve. Supported curves: {curves}",
        path=where,
        curves=CURVES,
    )


def sign_folder(folder: Path, private: Path) -> None:
    """Sign a folder, and write the signature into the folder."""
    from model_signing import signing

    config = signing.Config().use_elliptic_key_signer(private_key=private).set_hashing_config(_hashing())
    config.sign(folder, folder / SIGNATURE)


def check_signature(folder: Path, public: Path) -> None:
    """Check the signature of a folder. Raises: BundleError unless it is a signature of these files by this key."""
    from model_signing import verifying

    config = verifying.Config().use_elliptic_key_verifier(public_key=public).set_hashing_config(_hashing())
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the library prints its warnings
            config.verify(folder, folder / SIGNATURE)
    except Exception as error:  # of any kind, since the library parses untrusted files
        name = type(error).__name__
        reason = str(error) or (
            Message("signing.other_key", "another key made the signature") if name == "InvalidSignature" else name
        )
        if changed := re.findall(r"Hash mismatch for \\*'(.+?)\\*':", reason):  # the rest is bytes
            reason = Message(
                "signing.changed_files", "these files changed after the signature was made: {files}", files=changed
            )
        raise BundleError(
            "signing.other_signature", "{file} is not a signature of these files by this key: {reason}",
            file=SIGNATURE, reason=escape_unprintable(reason, 300),
        ) from error  # fmt: skip


def _hashing() -> Any:
    """Return the settings by which files are hashed. They are set here, because a signature's own claim about hashing is not trusted."""
    from model_signing import hashing

    config = hashing.Config().use_file_serialization(hashing_algorithm="sha256", allow_symlinks=False)
    return config.set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)


def _pem(key: ec.EllipticCurvePublicKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(KEY_BYTES)
