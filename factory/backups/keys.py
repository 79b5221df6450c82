"""The key that signs bundles, in a backup that a person asks for with ``--keys``, and back from one.

The daily backup leaves it out: it lies on the same disk, and a private key is copied only where a person says.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from factory.core.removal import remove
from factory.core.workspace import Workspace
from factory.ledger.ledger import record
from factory.ledger.plant import Plant
from kernels.contract.files import put_in_place

KEYS, KEY, PUBLIC = "keys", "bundle-signing.pem", "bundle-signing.pub.pem"
COPIED = "key_copied"  # an event: {public, to}


def has_key(root: Path) -> bool:
    return (root / KEYS / KEY).is_file()


def copy_keys(root: Path, target: Path) -> None:
    """Copy the workspace's key, and its public half, into the folder ``target``, which nobody else may read. Raises: OSError."""
    target.mkdir(mode=0o700)
    for name, mode in ((KEY, 0o600), (PUBLIC, 0o644)):
        if (source := root / KEYS / name).is_file():
            with open(os.open(target / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
                out.write(source.read_bytes())


def note_copy(plant: Plant, to: Path) -> None:
    """Record where the key was copied to."""
    with plant.ledger.begin() as tx:
        record(tx, COPIED, "keys", {"public": _public(plant.workspace), "to": str(to)})


def without_copy(plant: Plant) -> bool:
    """Is there a key that no backup was made of?"""
    if not has_key(plant.workspace.root):
        return False
    rows = plant.ledger.read("SELECT detail FROM events WHERE kind = :kind", kind=COPIED)
    return _public(plant.workspace) not in {row["detail"]["public"] for row in rows}


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


def _public(workspace: Workspace) -> str:
    """SHA-256 of the public half's file, which is written with the key."""
    path = workspace.root / KEYS / PUBLIC
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "none"
