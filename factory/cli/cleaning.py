"""``factory clean``: what retention removes, by hand."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated

import typer

from factory.cli.app import Say, app, command
from factory.ledger.plant import Plant


@command(app, "clean")
def clean_up(
    plant: Plant,
    say: Say,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would go, and why the rest stays.")
    ] = False,
    hard: Annotated[
        bool,
        typer.Option("--hard", help="Also what is young: all that nothing needs, as where the disk is almost full."),
    ] = False,
) -> None:
    """Remove checkpoints, exports, worktrees and logs that policies/retention.yaml no longer keeps. The daemon does this after each segment."""
    from factory.core.workspace import MODEL_LOOP
    from factory.retention.cleaning import Cleaned, clean, describe, examine
    from factory.show.catching_up import catch_up

    if dry_run:
        choices = examine(plant, hard=hard)
        cleaned = Cleaned(choices, 0)
    else:
        with plant.workspace.lock(MODEL_LOOP):
            cleaned = clean(plant, hard=hard)
        catch_up(plant)
    sizes = {choice.what.path: choice.what.bytes() if dry_run or not choice.goes else 0 for choice in cleaned.choices}
    say(
        [
            {
                "path": str(one.what.path),
                "kind": one.what.kind,
                "goes": one.goes,
                "why": one.why,
                "bytes": sizes[one.what.path],
            }
            for one in cleaned.choices
        ]
    )
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
