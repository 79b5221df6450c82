"""``factory data relabel``: another domain, source, licence or group for documents that were ingested."""

from __future__ import annotations

from typing import Annotated

import typer

from factory.cli.core.options import Say, command, person
from factory.cli.data.data import Names, data
from factory.core.errors import InputError
from factory.ledger.plant import Plant


@command(data, "relabel")
def relabel_data(
    plant: Plant,
    say: Say,
    domain: Annotated[Names, typer.Option(help="Documents of this domain; may be repeated.")] = None,
    source: Annotated[Names, typer.Option(help="Documents of this source; may be repeated.")] = None,
    licence: Annotated[
        Names, typer.Option("--license", help="Documents of this licence, or 'none'; may be repeated.")
    ] = None,
    shard: Annotated[Names, typer.Option(help="Documents of this shard; may be repeated.")] = None,
    document: Annotated[Names, typer.Option(help="The document with this id or key; may be repeated.")] = None,
    to_domain: Annotated[str | None, typer.Option(help="Their domain from now on.")] = None,
    to_source: Annotated[str | None, typer.Option(help="Their source from now on; '': none.")] = None,
    to_license: Annotated[str | None, typer.Option(help="Their licence from now on; 'none': they name none.")] = None,
    group: Annotated[
        str | None,
        typer.Option(
            help="What is held out as a whole: document, source, path, url-host, conversation or none (as document)."
        ),
    ] = None,
    why: Annotated[str, typer.Option(help="Stays in the ledger.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would follow; change nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Give documents another domain, source, licence or group, in place: nothing is ingested again.

    A document is changed if it matches one name of each kind of filter. The decision is recorded with your name. Licences count at the
    release gate at once; domains in every segment that is planned from then on; groups in the next evaluation. Stop 'factory run' first.
    """
    from factory.core.errors import nearest
    from factory.core.workspace import MODEL_LOOP
    from factory.data.relabelling import Filter, NewLabels, look, relabel
    from factory.ingest.rules.split import KINDS

    kind = next((one for one in KINDS if one == group), None)
    if group is not None and kind is None:
        raise InputError(f"--group {group!r} is no kind of group{nearest(group, KINDS)}")
    chosen = Filter(domain or (), source or (), licence or (), shard or (), document or ())
    change = NewLabels(to_domain, to_source, to_license, kind)
    if dry_run:
        found = look(plant, chosen, change)
        say(found.to_json() | {"says": found.said}, (f"  {line}" for line in found.said))
        return
    with plant.workspace.lock(MODEL_LOOP):
        found = look(plant, chosen, change)
        for line in found.said:
            say.line(f"  {line}")
        say.confirm(yes, "relabel them")
        number = relabel(plant, found, person(), why)
    say(found.to_json() | {"relabel": number, "says": found.said}, f"  relabel {number}: done, and recorded")
