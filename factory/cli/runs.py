"""The command ``factory runs``: lists the training runs besides the segments.

A separate file, because each group of commands has its own file.
"""

from __future__ import annotations

from typing import Annotated

import typer

from factory.cli.app import AnswerPrinter, app, register_command
from factory.ledger.plant import Plant
from kernels.contract.message import Message


@register_command(app)
def runs(
    plant: Plant,
    say: AnswerPrinter,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the newest runs to print.")] = 40,
) -> None:
    """List the training runs besides the segments, one line each.

    Certificates, preflights, audits, diagnoses, replicas and the gates of patches start such runs.
    """
    from factory.runs.arm_runner import format_run, list_runs

    found = list_runs(plant.ledger, lines)
    nothing = Message(
        "runs.none",
        "  No run is recorded yet. Certificates, preflights, audits, diagnoses and gates start the training runs of "
        "this list. Segments are not in the list.",
    )
    say(found, map(format_run, found), nothing=nothing)
