"""``factory runs``: what was trained beside the segments, to compare.

Apart because each group of commands is one file.
"""

from __future__ import annotations

from typing import Annotated

import typer

from factory.cli.app import Say, app, command
from factory.ledger.plant import Plant


@command(app)
def runs(
    plant: Plant,
    say: Say,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="So many of the newest.")] = 40,
) -> None:
    """What was trained beside the segments, a line each: by certificates, preflights, audits, diagnoses, replicas and the gates of
    patches."""
    from factory.runs.running import every_run, in_words

    found = every_run(plant.ledger, lines)
    nothing = "  nothing was trained beside the segments yet: a certificate, a preflight, an audit, a diagnosis or a gate does"
    say(found, map(in_words, found), nothing=nothing)
