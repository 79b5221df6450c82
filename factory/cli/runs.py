"""``factory runs``: what was trained beside the segments, to compare.

Apart because each group of commands is one file.
"""

from __future__ import annotations

from typing import Annotated

import typer

from factory.cli.app import DEFAULT, AsJson, Say, Where, app, command, open_plant, print_json
from factory.ledger.plant import Plant

runs = typer.Typer(
    invoke_without_command=True,
    help="What was trained beside the segments: by certificates, preflights, audits, diagnoses, replicas and the gates of patches.",
)
app.add_typer(runs, name="runs")
NEWEST = 40


@runs.callback()
def list_runs(
    context: typer.Context,
    where: Where = DEFAULT,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="So many of the newest.")] = NEWEST,
    as_json: AsJson = False,
) -> None:
    """The newest runs beside the trunk, a line each: what each is, what it was for, and how it ended."""
    from factory.runs.running import every_run, in_words

    if context.invoked_subcommand:
        return
    plant, terminal = open_plant(where, as_json)
    found = every_run(plant.ledger, lines)
    if as_json:
        print_json(found)
        return
    for run in found:
        terminal.line(in_words(run))
    if not found:
        terminal.line(
            "  nothing was trained beside the segments yet: a certificate, a preflight, an audit, a diagnosis or a gate does"
        )


@command(runs)
def show(
    plant: Plant, say: Say, key: Annotated[str, typer.Argument(help="The run's key, as 'factory runs' has it.")]
) -> None:
    """One run: what it changes, where it lies, how far it came."""
    from factory.ledger.rows import RunRow
    from factory.runs.running import describe, in_words

    found = describe(RunRow.get(plant.ledger, key))
    say(found, in_words(found))
    lies = found["folder"] if found["there"] else f"{found['folder']} (removed: its errand is over)"
    for name, value in (*found["arm"].items(), ("folder", lies), ("steps written", found["steps"])):
        if value is not None and name not in ("name", "first", "last"):
            say.line(f"    {name}: {value}")
