"""The command ``factory data``: lists the data, removes documents, settles licences, and undoes a removal."""

from __future__ import annotations

from typing import Annotated

import typer

from factory.cli.core.options import AnswerPrinter, get_current_user, register_command
from factory.core.errors import InputError, WorkspaceError
from factory.ledger.plant import Plant
from kernels.contract.message import Message

commands = typer.Typer()
data = typer.Typer(
    no_args_is_help=True, help="The data: list it, remove documents, correct their domains, sources and licences."
)
commands.add_typer(data, name="data")

RepeatedOption = list[str] | None


@register_command(data, "list")
def list_data(
    plant: Plant,
    say: AnswerPrinter,
    most: Annotated[
        int, typer.Option(min=1, help="How many sources, domains and licences to print, the largest first.")
    ] = 20,
) -> None:
    """List documents and tokens by shard, domain, source and licence, the removals, and what would hold back a release of a model."""
    from factory.data.listing import collect_data_facts, format_data_list
    from factory.releasable.report import format_report, format_summary, make_report

    found = collect_data_facts(plant.ledger, most)
    report = make_report(plant)
    shown = [*format_data_list(found), *([format_summary(report)] if report else []), *format_report(report)]
    say(found | {"releasable": [line.to_json() for line in report]}, (f"  {line}" for line in shown))


@register_command(data, "remove")
def remove_data(
    plant: Plant,
    say: AnswerPrinter,
    document: Annotated[RepeatedOption, typer.Option(help="A document's id or key. Can be repeated.")] = None,
    source: Annotated[RepeatedOption, typer.Option(help="All documents of this source. Can be repeated.")] = None,
    licence: Annotated[
        RepeatedOption,
        typer.Option("--license", help="All documents of this licence; 'none': without a licence. Can be repeated."),
    ] = None,
    why: Annotated[
        str, typer.Option(help="The reason; the ledger keeps it, and shows it where it refuses a copy.")
    ] = "",
    erase: Annotated[
        bool,
        typer.Option("--erase", help="Also overwrite the text in raw shards and token shards. This cannot be undone."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would change; change nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove documents: later segments are not trained on them, later candidates are not measured on them, and copies are refused.

    Releases that were trained on the documents are marked. The command also prints how much must be trained again for a model without them.
    For a source or a licence, documents of later shards are refused too. The command works while the daemon runs. 'factory data undo'
    puts the documents back, unless their text was erased.
    """
    from factory.data.removing import apply_removal, plan_removal
    from factory.data.selecting import list_removable_fates, select_documents_by_label, select_documents_by_name

    given = {"key": document, "source": source, "license": licence}
    chosen = [(column, names) for column, names in given.items() if names]
    if len(chosen) != 1:
        raise InputError("data.no_selection", "Give exactly one of --document ID, --source NAME and --license NAME.")
    column, names = chosen[0]
    selection = (
        select_documents_by_name(plant.ledger, names, list_removable_fates(erase))
        if column == "key"
        else select_documents_by_label(plant.ledger, column, names)
    )
    found = plan_removal(plant.ledger, selection, erase)
    from factory.core.workspace import MODEL_LOOP
    from factory.erasing.erasing import finish_pending_removals, list_erasure_consequences

    said = [*found.format_lines(), *(list_erasure_consequences(plant, selection) if erase else ())]
    if dry_run:
        say(found.to_json() | {"says": said}, (f"  {line}" for line in said))
        return
    for line in said:
        say.print_line(f"  {line}")
    say.confirm(yes, "remove the documents")
    removal = apply_removal(plant.ledger, found, get_current_user(), why, erase)
    try:
        with plant.workspace.hold_lock(MODEL_LOOP):
            done = finish_pending_removals(plant)
    except WorkspaceError:
        asked = Message("data.daemon_erases", "The running daemon erases the text in its next pass.")
        done = [asked] if erase else []
    left_out = Message(
        "data.left_out", "{removal}. From the next segment on, these documents are left out.", removal=str(removal)
    )
    undo = Message("data.undo", "To put the documents back: 'factory data undo {removal}'", removal=removal.number)
    lines = [left_out, *([] if erase else [undo]), *done]
    say(found.to_json() | {"removal": removal.number, "says": said, "done": done}, (f"  {line}" for line in lines))


@register_command(data, "claims")
def list_licence_claims(plant: Plant, say: AnswerPrinter) -> None:
    """List texts that came with several licences, in one shard or in several, with each claimed licence and the licence that counts.

    The strictest licence counts, by data.yaml as it is now. It counts for the release gate and for bundles. If the licence does not allow
    training, later segments are not trained on the text. 'factory data settle' decides which claim is right.
    """
    from factory.data.licence_settlement import format_licence_conflicts, group_licence_conflicts
    from factory.ingest.rules.policy import DataPolicy

    found = group_licence_conflicts(plant.ledger, DataPolicy.load(plant.workspace.policy_path("data.yaml")).licences)
    say(found, (f"  {line}" for line in format_licence_conflicts(found)))


@register_command(data, "settle")
def settle_licence(
    plant: Plant,
    say: AnswerPrinter,
    licence: Annotated[
        str, typer.Argument(help="The right licence, one of the claimed ones; 'none': no licence is named.")
    ],
    document: Annotated[RepeatedOption, typer.Option(help="A document's id or key. Can be repeated.")] = None,
    shard: Annotated[
        RepeatedOption, typer.Option(help="All conflicts in which a shard of this name takes part. Can be repeated.")
    ] = None,
    why: Annotated[str, typer.Option(help="The reason; the ledger keeps it.")] = "",
) -> None:
    """Decide which licence is right for texts that came with several. The ledger keeps the other claims, but they do not count any more.

    A later copy with another licence is a new conflict. To undo a decision, settle with the stricter licence.
    """
    from factory.data.licence_settlement import settle_licence

    if not document and not shard:
        raise InputError(
            "data.nothing_to_settle",
            "Give --document ID or --shard NAME. To see the conflicts: 'factory data claims'",
        )
    done = settle_licence(plant.ledger, licence, document or [], shard or [], get_current_user(), why)
    say(
        {"license": licence, "documents": [one.key for one in done]},
        Message(
            "data.settled",
            "  From now on, {documents:,|document has|documents have} the licence {licence}. To see all claims: 'factory data claims'",
            documents=len(done),
            licence=licence,
        ),
    )


@register_command(data, "undo")
def undo_removal(
    plant: Plant,
    say: AnswerPrinter,
    number: Annotated[int, typer.Argument(help="The removal's number, as 'factory data list' prints it.")],
) -> None:
    """Put back the documents of a removal."""
    from factory.data.removing import undo_removal

    said = undo_removal(plant.ledger, number, get_current_user())
    say({"removal": number, "says": said}, f"  {said}")
