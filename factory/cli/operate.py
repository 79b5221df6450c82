"""What a person tells a factory: ``pause``, ``resume``, ``retry``, ``abandon``, ``rewind``, ``quarantine``. Each is one transaction, which the
daemon reads."""

from __future__ import annotations

from typing import Annotated

import typer

from factory.cli.app import DEFAULT, AsJson, Where, app, open_plant, person, print_json

Why = Annotated[str, typer.Option(help="Stays in the ledger.")]


@app.command()
def pause(
    where: Where = DEFAULT,
    everything: Annotated[
        bool, typer.Option("--everything", help="The inbox, judging and releases too, not only what trains.")
    ] = False,
    why: Annotated[str, typer.Option(help="Shown by 'factory status'.")] = "",
    as_json: AsJson = False,
) -> None:
    """Hold training: the trainer writes a checkpoint and ends, and none is started until 'factory resume'. Survives a restart."""
    from factory.retrying import asking

    plant, terminal = open_plant(where, as_json)
    found = asking.pause(plant.ledger, asking.EVERYTHING if everything else asking.TRAINING, person(), why)
    if as_json:
        print_json(vars(found))
        return
    terminal.line(f"  {found}")
    terminal.line("  a trainer writes a checkpoint first; other work that has begun is finished")


@app.command()
def resume(where: Where = DEFAULT, as_json: AsJson = False) -> None:
    """Go on after 'factory pause'."""
    from factory.retrying import asking

    plant, terminal = open_plant(where, as_json)
    ended = asking.resume(plant.ledger, person())
    if as_json:
        print_json({"resumed": vars(ended)})
        return
    terminal.line(f"  {ended.what}, which {ended.by} had paused, goes on")


@app.command()
def retry(
    segment: Annotated[int | None, typer.Argument(help="A parked segment, which goes on from its checkpoint.")] = None,
    where: Where = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Try again at once what waits after a failure; with a number, a segment that is parked too."""
    from factory.retrying import tries

    plant, terminal = open_plant(where, as_json)
    said = tries.retry(plant.ledger, segment, person())
    print_json({"segment": segment, "says": said}) if as_json else terminal.line(f"  {said}")


@app.command()
def abandon(
    segment: Annotated[int, typer.Argument(help="A parked segment.")],
    where: Where = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Give up the steps of a parked segment: training goes on from what was done before it."""
    from factory.retrying import tries

    plant, terminal = open_plant(where, as_json)
    said = tries.abandon(plant.ledger, segment, person())
    print_json({"segment": segment, "says": said}) if as_json else terminal.line(f"  {said}")


@app.command()
def rewind(
    segment: Annotated[int, typer.Argument(help="Its number: it and all that goes on from it is taken back.")],
    where: Where = DEFAULT,
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Go on from before a segment: its checkpoints are not gone on from, and what was not released of it never is. Works while the daemon
    runs, which ends a trainer of what is rewound."""
    from factory.diagnosis import acting

    plant, terminal = open_plant(where, as_json)
    said = acting.rewind(plant.ledger, segment, person(), why)
    print_json({"segment": segment, "says": said}) if as_json else terminal.line(f"  {said}")


@app.command()
def quarantine(
    names: Annotated[list[str], typer.Argument(help="Ids of documents, or keys.")],
    where: Where = DEFAULT,
    why: Why = "",
    undo: Annotated[bool, typer.Option("--undo", help="Train again on documents that a person quarantined.")] = False,
    as_json: AsJson = False,
) -> None:
    """Documents carry no loss from the next segment on; releases that saw them are marked. Works while the daemon runs."""
    from factory.diagnosis import acting

    plant, terminal = open_plant(where, as_json)
    said = acting.free(plant.ledger, names, person()) if undo else acting.quarantine(plant.ledger, names, person(), why)
    print_json({"documents": names, "says": said}) if as_json else terminal.line(f"  {said}")
