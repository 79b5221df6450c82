"""Copies the key that signs bundles into a backup that was requested with ``--keys``, and restores the key from such a backup.

The daily backup does not contain the key. It is on the same disk as the key, and only a person decides where a private key is copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from factory.core.path_removal import remove_path
from kernels.contract.files import rename_into_place
from kernels.contract.message import Message

KEYS, KEY, PUBLIC = "keys", "bundle-signing.pem", "bundle-signing.pub.pem"


def has_private_key(root: Path) -> bool:
    """Return whether the folder of a workspace or a backup has the private key."""
    return (root / KEYS / KEY).is_file()


def copy_signing_keys(root: Path, target: Path) -> None:
    """Copy the workspace's key pair into the new folder ``target``, which only this user may read. Raises: OSError."""
    target.mkdir(mode=0o700)
    for name, mode in ((KEY, 0o600), (PUBLIC, 0o644)):
        if (source := root / KEYS / name).is_file():
            with open(os.open(target / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
                out.write(source.read_bytes())


def restore_signing_key(root: Path, backups: Iterable[Path]) -> list[str]:
    """Restore the key from the first backup that has one, if the workspace has no key. Returns a line for a person; [] if nothing was restored."""
    kept = next((path for path in backups if has_private_key(path)), None)
    if has_private_key(root) or kept is None:
        return []
    aside = root / f".{KEYS}.part"
    remove_path(aside)
    copy_signing_keys(kept, aside)
    remove_path(root / KEYS)  # it has no private key, at most a public one
    rename_into_place(aside, root / KEYS)
    return [Message("signing_keys.restored", "the key that signs bundles is restored from {backup}", backup=kept)]
