"""The key that signs bundles, in a backup that a person asks for with ``--keys``, and back from one.

The daily backup leaves it out: it lies on the same disk, and a private key is copied only where a person says.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from factory.core.removal import remove
from kernels.contract.files import put_in_place

KEYS, KEY, PUBLIC = "keys", "bundle-signing.pem", "bundle-signing.pub.pem"


def has_key(root: Path) -> bool:
    return (root / KEYS / KEY).is_file()


def copy_keys(root: Path, target: Path) -> None:
    """Copy the workspace's key, and its public half, into the folder ``target``, which nobody else may read. Raises: OSError."""
    target.mkdir(mode=0o700)
    for name, mode in ((KEY, 0o600), (PUBLIC, 0o644)):
        if (source := root / KEYS / name).is_file():
            with open(os.open(target / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
                out.write(source.read_bytes())


def put_back(root: Path, backups: Iterable[Path]) -> list[str]:
    """Where the workspace has no key and one of the backups has, it comes back; returns what was done."""
    kept = next((path for path in backups if has_key(path)), None)
    if has_key(root) or kept is None:
        return []
    aside = root / f".{KEYS}.part"
    remove(aside)
    copy_keys(kept, aside)
    remove(root / KEYS)  # without a key: a public half at most
    put_in_place(aside, root / KEYS)
    return [f"the key that signs bundles is back, from {kept}"]
