"""``factory data``: what there is, what is taken out, and what is put back."""

from __future__ import annotations

from typing import Annotated

import typer

from factory.cli.core.options import Say, command, person
from factory.core.errors import InputError, WorkspaceError
from factory.ledger.plant import Plant

commands = typer.Typer()
data = typer.Typer(
    no_args_is_help=True, help="The data: list it, take documents out, correct their domains, sources and licences."
)
commands.add_typer(data, name="data")

Names = list[str] | None


@command(data, "list")
def list_data(
    plant: Plant,
    say: Say,
    most: Annotated[int, typer.Option(min=1, help="So many sources, domains and licences, the largest first.")] = 20,
) -> None:
    """Documents and tokens by shard, domain, source and licence, what was taken out, and what stands between these data and a release."""
    from factory.data.listing import lines, listed
    from factory.releasable.gathering import describe, look, verdict

    found = listed(plant.ledger, most)
    report = look(plant)
    shown = [*lines(found), *([verdict(report)] if report else []), *describe(report)]
    say(found | {"releasable": [line.to_json() for line in report]}, (f"  {line}" for line in shown))


@command(data, "remove")
def remove_data(
    plant: Plant,
    say: Say,
    document: Annotated[Names, typer.Option(help="Id or key; may be repeated.")] = None,
    source: Annotated[Names, typer.Option(help="All documents of a source; may be repeated.")] = None,
    licence: Annotated[
        Names, typer.Option("--license", help="All documents of a licence, 'none' for those without; may be repeated.")
    ] = None,
    why: Annotated[str, typer.Option(help="Stays in the ledger, and is what a refused copy is told.")] = "",
    erase: Annotated[
        bool,
        typer.Option("--erase", help="Overwrite the text in raw shards and token shards too. It cannot be undone."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would follow; change nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Take documents out: no later segment is trained on them, no later candidate is measured on them, and copies of them are refused.

    Releases that were trained on them are marked, and what training again without them would take is said. Of a source or a licence
    documents of later shards are refused too. Works while the daemon runs; 'factory data undo' puts them back, unless the text was erased.
    """
    from factory.data.removing import look, remove
    from factory.data.selecting import by_name, by_value, fates_of

    given = {"key": document, "source": source, "license": licence}
    chosen = [(column, names) for column, names in given.items() if names]
    if len(chosen) != 1:
        raise InputError("name one: --document ID, --source NAME or --license NAME")
    column, names = chosen[0]
    selection = (
        by_name(plant.ledger, names, fates_of(erase)) if column == "key" else by_value(plant.ledger, column, names)
    )
    found = look(plant.ledger, selection, erase)
    from factory.core.workspace import MODEL_LOOP
    from factory.erasing.erasing import finish_removals, warnings

    said = [*found.lines(), *(warnings(plant, selection) if erase else ())]
    if dry_run:
        say(found.to_json() | {"says": said}, (f"  {line}" for line in said))
        return
    for line in said:
        say.line(f"  {line}")
    say.confirm(yes, "take them out")
    removal = remove(plant.ledger, found, person(), why, erase)
    try:
        with plant.workspace.lock(MODEL_LOOP):
            done = finish_removals(plant)
    except WorkspaceError:
        done = ["the daemon, which runs, erases the text in its next pass"] if erase else []
    undo = "" if erase else f"; 'factory data undo {removal.number}' puts them back"
    lines = [f"{removal}: they are left out from the next segment on{undo}", *done]
    say(found.to_json() | {"removal": removal.number, "says": said, "done": done}, (f"  {line}" for line in lines))


@command(data, "claims")
def licence_claims(plant: Plant, say: Say) -> None:
    """Texts that came under several licences, in one shard or in several: who claims what, and which licence counts.

    The strictest counts, as data.yaml says now, whichever came first: for the release gate, bundles, and, where it does not allow training,
    for every segment that is planned from now on. 'factory data settle' says which claim is right.
    """
    from factory.data.settling import grouped, lines
    from factory.ingest.rules.policy import DataPolicy

    found = grouped(plant.ledger, DataPolicy.load(plant.workspace.policy("data.yaml")).licences)
    say(found, (f"  {line}" for line in lines(found)))


@command(data, "settle")
def settle_licence(
    plant: Plant,
    say: Say,
    licence: Annotated[
        str, typer.Argument(help="The right one of those that are claimed; 'none': that none is named.")
    ],
    document: Annotated[Names, typer.Option(help="Id or key; may be repeated.")] = None,
    shard: Annotated[
        Names, typer.Option(help="All conflicts that a shard of this name takes part in; may be repeated.")
    ] = None,
    why: Annotated[str, typer.Option(help="Stays in the ledger.")] = "",
) -> None:
    """Say which licence is right for texts that came under several; the other claims stay recorded, and count no more.

    A copy that comes later under another licence is a conflict again. Settle with the stricter one to take it back.
    """
    from factory.data.settling import settle

    if not document and not shard:
        raise InputError("name what is settled: --document ID or --shard NAME ('factory data claims' lists them)")
    done = settle(plant.ledger, licence, document or [], shard or [], person(), why)
    say(
        {"license": licence, "documents": [one.key for one in done]},
        f"  {len(done):,} documents are {licence} from now on: 'factory data claims'",
    )


@command(data, "undo")
def undo_removal(
    plant: Plant, say: Say, number: Annotated[int, typer.Argument(help="Of a removal, as 'factory data list' has it.")]
) -> None:
    """Put back what a removal took out."""
    from factory.data.removing import undo

    said = undo(plant.ledger, number, person())
    say({"removal": number, "says": said}, f"  {said}")
