"""What a person tells a factory: ``pause``, ``resume``, ``retry``, ``abandon``, ``rewind``, ``quarantine``. Each is one transaction, which the
daemon reads."""

from __future__ import annotations

from typing import Annotated

import typer

from factory.cli.app import Say, app, command, person
from factory.ledger.plant import Plant

Why = Annotated[str, typer.Option(help="Stays in the ledger.")]


@command(app)
def pause(
    plant: Plant,
    say: Say,
    everything: Annotated[
        bool, typer.Option("--everything", help="The inbox, judging and releases too, not only what trains.")
    ] = False,
    why: Annotated[str, typer.Option(help="Shown by 'factory status'.")] = "",
) -> None:
    """Hold training: the trainer writes a checkpoint and ends, and none is started until 'factory resume'. Survives a restart."""
    from factory.retrying import asking

    found = asking.pause(plant.ledger, asking.EVERYTHING if everything else asking.TRAINING, person(), why)
    say(vars(found), f"  {found}")
    say.line("  a trainer writes a checkpoint first; other work that has begun is finished")


@command(app)
def resume(plant: Plant, say: Say) -> None:
    """Go on after 'factory pause'."""
    from factory.retrying import asking

    ended = asking.resume(plant.ledger, person())
    say({"resumed": vars(ended)}, f"  {ended.what}, which {ended.by} had paused, goes on")


@command(app)
def retry(
    plant: Plant,
    say: Say,
    segment: Annotated[int | None, typer.Argument(help="A parked segment, which goes on from its checkpoint.")] = None,
) -> None:
    """Try again at once what waits after a failure; with a number, a segment that is parked too."""
    from factory.retrying import tries

    said = tries.retry(plant.ledger, segment, person())
    say({"segment": segment, "says": said}, f"  {said}")


@command(app)
def abandon(plant: Plant, say: Say, segment: Annotated[int, typer.Argument(help="A parked segment.")]) -> None:
    """Give up the steps of a parked segment: training goes on from what was done before it."""
    from factory.retrying import tries

    said = tries.abandon(plant.ledger, segment, person())
    say({"segment": segment, "says": said}, f"  {said}")


@command(app)
def rewind(
    plant: Plant,
    say: Say,
    segment: Annotated[int, typer.Argument(help="Its number: it and all that goes on from it is taken back.")],
    why: Why = "",
) -> None:
    """Go on from before a segment: its checkpoints are not gone on from, and what was not released of it never is. Works while the daemon
    runs, which ends a trainer of what is rewound."""
    from factory.diagnosis import by_hand

    said = by_hand.rewind(plant.ledger, segment, person(), why)
    say({"segment": segment, "says": said}, f"  {said}")


@command(app)
def quarantine(
    plant: Plant,
    say: Say,
    names: Annotated[list[str], typer.Argument(help="Ids of documents, or keys.")],
    why: Why = "",
    undo: Annotated[bool, typer.Option("--undo", help="Train again on documents that a person quarantined.")] = False,
) -> None:
    """Documents carry no loss from the next segment on; releases that saw them are marked. Works while the daemon runs."""
    from factory.diagnosis import by_hand

    said = (
        by_hand.free(plant.ledger, names, person()) if undo else by_hand.quarantine(plant.ledger, names, person(), why)
    )
    say({"documents": names, "says": said}, f"  {said}")
