"""Reacts to a disk that is almost full: removes all files that nothing needs. If that is not enough, training waits."""

from __future__ import annotations

from contextlib import suppress
from shutil import disk_usage

from factory.core.faults import is_disk_full
from factory.core.workspace import Workspace
from factory.ledger.file_events import DISK_LOW, DISK_NORMAL, find_low_disk
from factory.ledger.ledger import record_event
from factory.ledger.plant import Plant
from factory.retention.cleaning import describe_cleaning, remove_unneeded_folders
from factory.retention.disk import record_free_space_sample
from factory.retention.policy import RetentionPolicy
from kernels.contract.message import Message


def is_workspace_disk_full(workspace: Workspace, error: BaseException) -> bool:
    """Return whether an error means that the workspace's disk is full. If at least half of this disk is free, the error is about another disk."""
    if not is_disk_full(error):
        return False
    try:
        room = disk_usage(workspace.root)
    except OSError:
        return False
    return room.free < room.total / 2


def make_room_on_disk(plant: Plant) -> None:
    """Remove all files that nothing needs. Prints a line if any were removed."""
    cleaned = remove_unneeded_folders(plant, hard=True)
    if cleaned.list_removal_decisions():
        plant.progress.line(
            Message("low_disk.cleaned", "  the disk is almost full: {result}", result=describe_cleaning(cleaned))
        )


def must_training_wait_for_disk_space(plant: Plant) -> bool:
    """Return whether the disk has too little space to train. First frees space. Prints a line if the answer has changed.

    The daemon calls it once in each pass.
    """
    with suppress(OSError):  # the sample is only for people
        record_free_space_sample(plant.workspace)
    policy = RetentionPolicy.load(plant.workspace.policy_path("retention.yaml"))
    room = disk_usage(plant.workspace.root)
    floor = policy.compute_free_space_floor(room.total)
    was_low = find_low_disk(plant.ledger) is not None
    if room.free < floor:
        make_room_on_disk(plant)
        room = disk_usage(plant.workspace.root)
    is_low = room.free < floor
    if is_low != was_low:
        with plant.ledger.begin() as tx:
            record_event(tx, DISK_LOW if is_low else DISK_NORMAL, "daemon", {"free": room.free, "floor": floor})
        if is_low:
            plant.progress.line(
                Message(
                    "low_disk.training_waits",
                    "  training waits: {free_gb:.2f} GB are free on the disk of {folder}, and the floor is {floor_gb:.2f} GB (floor_bytes, "
                    "floor_share in policies/retention.yaml). Free some space. The factory cannot remove more files, because it needs the rest. "
                    "To see why: 'factory clean --dry-run'",
                    free_gb=room.free / 1e9,
                    folder=plant.workspace.root,
                    floor_gb=floor / 1e9,
                )
            )
        else:
            plant.progress.line(
                Message(
                    "low_disk.training_continues",
                    "  {free_gb:.2f} GB are free on the disk again: training continues",
                    free_gb=room.free / 1e9,
                )
            )
    return is_low
