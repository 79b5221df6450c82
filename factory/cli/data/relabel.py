"""The command ``factory data relabel``: changes the domain, source, licence or group of ingested documents."""

from __future__ import annotations

from typing import Annotated

import typer

from factory.cli.core.options import AnswerPrinter, get_current_user, register_command
from factory.cli.data.data import RepeatedOption, data
from factory.core.errors import InputError
from factory.ledger.plant import Plant
from kernels.contract.message import Message


@register_command(data, "relabel")
def relabel_data(
    plant: Plant,
    say: AnswerPrinter,
    domain: Annotated[RepeatedOption, typer.Option(help="Documents of this domain. Can be repeated.")] = None,
    source: Annotated[RepeatedOption, typer.Option(help="Documents of this source. Can be repeated.")] = None,
    licence: Annotated[
        RepeatedOption,
        typer.Option("--license", help="Documents of this licence; 'none': without a licence. Can be repeated."),
    ] = None,
    shard: Annotated[RepeatedOption, typer.Option(help="Documents of this shard. Can be repeated.")] = None,
    document: Annotated[RepeatedOption, typer.Option(help="The document with this id or key. Can be repeated.")] = None,
    to_domain: Annotated[str | None, typer.Option(help="The new domain.")] = None,
    to_source: Annotated[str | None, typer.Option(help="The new source; '': no source.")] = None,
    to_license: Annotated[str | None, typer.Option(help="The new licence; 'none': no licence.")] = None,
    group: Annotated[
        str | None,
        typer.Option(
            help="The new kind of group. A group is held out as a whole: document, source, path, url-host, conversation or none (= document)."
        ),
    ] = None,
    why: Annotated[str, typer.Option(help="The reason; the ledger keeps it.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would change; change nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Change the domain, source, licence or group of documents, without ingesting them again. Stop 'factory run' first.

    A document is changed if it matches every kind of filter that is given; several names of one kind are alternatives. The ledger keeps
    your name. A new licence counts at the release gate at once, a new domain from the next planned segment on, and a new group from the
    next evaluation on.
    """
    from factory.core.errors import suggest_name
    from factory.core.workspace import MODEL_LOOP
    from factory.data.relabelling import DocumentFilter, NewLabels, apply_relabelling, plan_relabelling
    from factory.ingest.rules.held_out_split import KINDS

    kind = next((one for one in KINDS if one == group), None)
    if group is not None and kind is None:
        raise InputError(
            "relabel.no_group_kind",
            "--group: no kind of group is named {group!r}{nearest}",
            group=group,
            nearest=suggest_name(group, KINDS),
        )
    chosen = DocumentFilter(domain or (), source or (), licence or (), shard or (), document or ())
    change = NewLabels(to_domain, to_source, to_license, kind)
    if dry_run:
        found = plan_relabelling(plant, chosen, change)
        say(found.to_json() | {"says": found.lines}, (f"  {line}" for line in found.lines))
        return
    with plant.workspace.hold_lock(MODEL_LOOP):
        found = plan_relabelling(plant, chosen, change)
        for line in found.lines:
            say.print_line(f"  {line}")
        say.confirm(yes, "relabel the documents")
        number = apply_relabelling(plant, found, get_current_user(), why)
    done = Message(
        "relabel.done",
        "  The documents are relabelled. The ledger records the change as relabel {number}.",
        number=number,
    )
    say(found.to_json() | {"relabel": number, "says": found.lines}, done)
