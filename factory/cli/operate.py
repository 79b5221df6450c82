"""Commands that steer a running factory: ``factory pause``, ``resume``, ``retry``, ``abandon``, ``rewind``, ``quarantine`` and ``clean``.

Each, except ``clean``, writes one transaction to the ledger, which the daemon reads. ``clean`` removes the files that the retention policy does
not keep.
"""

from __future__ import annotations

from itertools import groupby
from typing import Annotated

import typer

from factory.cli.app import AnswerPrinter, app, get_current_user, register_command
from factory.ledger.plant import Plant
from kernels.contract.message import Message

Why = Annotated[str, typer.Option(help="The reason; the ledger keeps it.")]


@register_command(app)
def pause(
    plant: Plant,
    say: AnswerPrinter,
    everything: Annotated[
        bool, typer.Option("--everything", help="Pause the inbox, judging and releases too, not only training.")
    ] = False,
    why: Annotated[str, typer.Option(help="The reason; 'factory status' shows it.")] = "",
) -> None:
    """Pause training: the trainer writes a checkpoint and ends, and no trainer starts until 'factory resume'.

    The pause survives a restart of the factory.
    """
    from factory.retrying import daemon_requests

    found = daemon_requests.pause_daemon(
        plant.ledger, daemon_requests.EVERYTHING if everything else daemon_requests.TRAINING, get_current_user(), why
    )
    say(vars(found), f"  {found}")
    say.print_line(
        Message(
            "operate.pausing",
            "  If a trainer runs now, it writes a checkpoint and then ends. Other actions that run now go on until they are done.",
        )
    )


@register_command(app)
def resume(plant: Plant, say: AnswerPrinter) -> None:
    """End a pause that 'factory pause' began."""
    from factory.retrying import daemon_requests

    ended = daemon_requests.resume_daemon(plant.ledger, get_current_user())
    said = Message(
        "operate.resumed",
        "  The pause that {by} began is over. The daemon resumes {what}.",
        what=ended.what,
        by=ended.by,
    )
    say({"resumed": vars(ended)}, said)


@register_command(app)
def retry(
    plant: Plant,
    say: AnswerPrinter,
    segment: Annotated[
        int | None, typer.Argument(help="A parked segment; it continues from its newest checkpoint.")
    ] = None,
) -> None:
    """Retry at once all actions that wait after a failure. With a segment's number, also continue that parked segment."""
    from factory.retrying import trainer_deaths

    said = trainer_deaths.request_retry(plant.ledger, segment, get_current_user())
    say({"segment": segment, "says": said}, f"  {said}")


@register_command(app)
def abandon(
    plant: Plant, say: AnswerPrinter, segment: Annotated[int, typer.Argument(help="A parked segment.")]
) -> None:
    """Give up a parked segment: its steps are dropped, and training continues from the segment before it."""
    from factory.retrying import trainer_deaths

    said = trainer_deaths.abandon_segment(plant.ledger, segment, get_current_user())
    say({"segment": segment, "says": said}, f"  {said}")


@register_command(app)
def rewind(
    plant: Plant,
    say: AnswerPrinter,
    segment: Annotated[
        int, typer.Argument(help="The segment's number. All segments that continue from it are rewound too.")
    ],
    why: Why = "",
) -> None:
    """Undo a segment and all segments that continue from it: training continues from the segment before.

    Their candidates are not released any more. The command works while the daemon runs; the daemon stops a trainer of a rewound segment.
    """
    from factory.diagnosis import remedies

    said = remedies.rewind_segment(plant.ledger, segment, get_current_user(), why)
    say({"segment": segment, "says": said}, f"  {said}")


@register_command(app)
def quarantine(
    plant: Plant,
    say: AnswerPrinter,
    names: Annotated[list[str], typer.Argument(help="Ids or keys of documents.")],
    why: Why = "",
    undo: Annotated[
        bool, typer.Option("--undo", help="End the quarantine of these documents: train on them again.")
    ] = False,
) -> None:
    """Quarantine documents: from the next segment on, they carry no loss. Releases that were trained on them are marked.

    The command works while the daemon runs.
    """
    from factory.diagnosis import remedies

    said = (
        remedies.end_document_quarantine(plant.ledger, names, get_current_user())
        if undo
        else remedies.quarantine_documents(plant.ledger, names, get_current_user(), why)
    )
    say({"documents": names, "says": said}, f"  {said}")


@register_command(app, "clean")
def clean_up(
    plant: Plant,
    say: AnswerPrinter,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Remove nothing: print what would be removed, and why the rest is kept.")
    ] = False,
) -> None:
    """Remove checkpoints, exports, worktrees and logs that policies/retention.yaml does not keep.

    The daemon does this after each segment.
    """
    from factory.core.workspace import MODEL_LOOP
    from factory.retention.cleaning import (
        CleaningResult,
        describe_cleaning,
        list_retention_decisions,
        remove_unneeded_folders,
    )
    from factory.show.unshown_items import show_unshown_items

    if dry_run:
        choices = list_retention_decisions(plant)
        cleaned = CleaningResult(choices, 0)
    else:
        with plant.workspace.hold_lock(MODEL_LOOP):
            cleaned = remove_unneeded_folders(plant)
        show_unshown_items(plant)
    sizes = {
        choice.folder.path: choice.folder.measure_size_on_disk() if dry_run or not choice.is_removed else 0
        for choice in cleaned.choices
    }
    told = lambda one: {
        "path": str(one.folder.path),
        "kind": one.folder.kind,
        "goes": one.is_removed,
        "why": one.reason,
    }
    say([told(one) | {"bytes": sizes[one.folder.path]} for one in cleaned.choices])
    for choice in cleaned.list_removal_decisions():
        word = "to remove" if dry_run else "removed"
        say.print_line(f"  {word}  {choice.folder.path.relative_to(plant.workspace.root)}: {choice.reason}")
    stays = sorted(
        (one for one in cleaned.choices if not one.is_removed), key=lambda one: (one.folder.kind, one.reason)
    )
    for (kind, why), group in groupby(stays, key=lambda one: (one.folder.kind, one.reason)):
        listed = list(group)
        size = sum(sizes[one.folder.path] for one in listed)
        say.print_line(f"  kept     {len(listed)} × {kind}, {size / 1e6:,.1f} MB: {why}")
    if dry_run:
        size = sum(sizes[one.folder.path] for one in cleaned.list_removal_decisions())
        say.print_line(Message("operate.would_free", "  This would free {megabytes:,.1f} MB.", megabytes=size / 1e6))
    else:
        say.print_line(f"  {describe_cleaning(cleaned)}")
