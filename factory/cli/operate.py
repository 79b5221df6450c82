"""What a person tells a factory: ``pause``, ``resume``, ``retry``, ``abandon``, ``rewind``, ``quarantine``. Each is one transaction, which the
daemon reads. And ``clean``: what retention removes, by hand."""

from __future__ import annotations

from itertools import groupby
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
    from factory.diagnosis import acting

    said = acting.rewind(plant.ledger, segment, person(), why)
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
    from factory.diagnosis import acting

    said = acting.free(plant.ledger, names, person()) if undo else acting.quarantine(plant.ledger, names, person(), why)
    say({"documents": names, "says": said}, f"  {said}")


@command(app, "clean")
def clean_up(
    plant: Plant,
    say: Say,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would go, and why the rest stays.")
    ] = False,
) -> None:
    """Remove checkpoints, exports, worktrees and logs that policies/retention.yaml no longer keeps. The daemon does this after each segment."""
    from factory.core.workspace import MODEL_LOOP
    from factory.retention.cleaning import Cleaned, clean, describe, examine
    from factory.show.catching_up import catch_up

    if dry_run:
        choices = examine(plant)
        cleaned = Cleaned(choices, 0)
    else:
        with plant.workspace.lock(MODEL_LOOP):
            cleaned = clean(plant)
        catch_up(plant)
    sizes = {choice.what.path: choice.what.bytes() if dry_run or not choice.goes else 0 for choice in cleaned.choices}
    told = lambda one: {"path": str(one.what.path), "kind": one.what.kind, "goes": one.goes, "why": one.why}
    say([told(one) | {"bytes": sizes[one.what.path]} for one in cleaned.choices])
    for choice in cleaned.gone():
        word = "would go" if dry_run else "removed"
        say.line(f"  {word}  {choice.what.path.relative_to(plant.workspace.root)}: {choice.why}")
    stays = sorted((one for one in cleaned.choices if not one.goes), key=lambda one: (one.what.kind, one.why))
    for (kind, why), group in groupby(stays, key=lambda one: (one.what.kind, one.why)):
        listed = list(group)
        size = sum(sizes[one.what.path] for one in listed)
        say.line(f"  stays    {len(listed)} × {kind}, {size / 1e6:,.1f} MB: {why}")
    if dry_run:
        size = sum(sizes[one.what.path] for one in cleaned.gone())
        say.line(f"  {size / 1e6:,.1f} MB would be freed")
    else:
        say.line(f"  {describe(cleaned)}")
