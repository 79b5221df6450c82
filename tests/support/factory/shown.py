"""What is decided, and then shown, as a command or a pass of the daemon does both."""

from __future__ import annotations

from typing import Any

from factory.ledger.plant import Plant
from factory.release import releases
from factory.show.unshown_items import show_unshown_items


def release(plant: Plant, verdict: int, **how: Any) -> int:
    number = releases.release_candidate(plant, verdict, **how)
    show_unshown_items(plant)
    return number


def override(plant: Plant, candidate: int, by: str, why: str) -> int:
    number = releases.release_held_candidate(plant, candidate, by, why)
    show_unshown_items(plant)
    return number


def rollback(plant: Plant, number: int) -> None:
    releases.roll_back_to_release(plant, number)
    show_unshown_items(plant)


def reconcile(plant: Plant) -> list[str]:
    done = releases.finish_interrupted_releases(plant)
    show_unshown_items(plant)
    return done
