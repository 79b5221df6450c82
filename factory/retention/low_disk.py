"""The watch on the disk: below the floor, and where something did not fit, retention removes all that nothing needs; where that is not
enough, training waits."""

from __future__ import annotations

from contextlib import suppress
from shutil import disk_usage

from factory.core.faults import is_full
from factory.core.workspace import Workspace
from factory.ledger.files import DISK_LOW, DISK_WELL, low_disk
from factory.ledger.ledger import record
from factory.ledger.plant import Plant
from factory.retention.cleaning import clean, describe
from factory.retention.disk import note
from factory.retention.policy import RetentionPolicy


def filled(workspace: Workspace, error: BaseException) -> bool:
    """Does an error tell that the workspace's disk is full? It is another disk where half of this one is free, or this one is not there."""
    if not is_full(error):
        return False
    try:
        room = disk_usage(workspace.root)
    except OSError:
        return False
    return room.free < room.total / 2


def make_room(plant: Plant) -> None:
    """Remove all that nothing needs; a line when something went."""
    cleaned = clean(plant, hard=True)
    if cleaned.gone():
        plant.progress.line(f"  the disk is almost full: {describe(cleaned)}")


def training_waits(plant: Plant) -> bool:
    """Is there too little room to train? Removes what can be removed first, and says so when it changes. Once a pass."""
    with suppress(OSError):  # a note for people
        note(plant.workspace)
    policy = RetentionPolicy.load(plant.workspace.policy("retention.yaml"))
    room = disk_usage(plant.workspace.root)
    floor = policy.floor(room.total)
    was_low = low_disk(plant.ledger) is not None
    if room.free < floor:
        make_room(plant)
        room = disk_usage(plant.workspace.root)
    is_low = room.free < floor
    if is_low != was_low:
        with plant.ledger.begin() as tx:
            record(tx, DISK_LOW if is_low else DISK_WELL, "daemon", {"free": room.free, "floor": floor})
        if is_low:
            plant.progress.line(
                f"  training waits: {room.free / 1e9:.2f} GB are free on the disk of {plant.workspace.root}, and the floor is "
                f"{floor / 1e9:.2f} GB (floor_bytes, floor_share in policies/retention.yaml). Free some space: what is left is "
                "needed, and 'factory clean --dry-run' says what for"
            )
        else:
            plant.progress.line(f"  {room.free / 1e9:.2f} GB are free on the disk again: training goes on")
    return is_low
