"""The command ``factory compare``: compares the metrics of another run with ours, step by step."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from factory.cli.core.options import AnswerPrinter, register_command
from factory.core.errors import InputError
from factory.ledger.plant import Plant

if TYPE_CHECKING:
    from factory.ledger.ledger import Ledger

commands = typer.Typer()


class XAxis(StrEnum):
    """The x axis by which two runs are compared."""

    steps = "steps"
    tokens = "tokens"


@register_command(commands)
def compare(
    plant: Plant,
    say: AnswerPrinter,
    reference: Annotated[
        str,
        typer.Argument(
            help="The other run: CSV, TSV or JSON lines with a step column, as W&B and TensorBoard export them; a trainer_state.json; a "
            "segment's folder; or a segment's number."
        ),
    ],
    segment: Annotated[
        int | None, typer.Option(help="Our run: this segment and all before it (default: the newest trunk segment).")
    ] = None,
    run: Annotated[str | None, typer.Option(help="Our run: the segment with this MLflow run.")] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="A column, or OURS=THEIRS where the names differ. Can be repeated (default: loss)."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0.0, help="Allowed difference (default: a multiple of the spread of the difference so far)."),
    ] = None,
    x: Annotated[
        XAxis, typer.Option(help="Compare at the same step, or after the same number of tokens.")
    ] = XAxis.steps,
    step_column: Annotated[
        str | None,
        typer.Option(help="The reference's column of steps, or of tokens with --x tokens, if its name is unusual."),
    ] = None,
) -> None:
    """Compare another run's metrics with ours, step by step, and name the first step where they diverge.

    The exit code is 1 if they diverge.
    """
    from factory.comparing.curve_comparison import compare_curves as compare_curves
    from factory.comparing.curve_files import read_curve_file, read_segment_curves
    from factory.comparing.page import (
        convert_comparison_to_json,
        find_earliest_divergence,
        format_comparison,
        render_comparison,
    )
    from factory.ledger.rows import SegmentRow
    from factory.training.planning import find_last_finished_segment
    from kernels.contract.files import replace_non_finite, write_atomically

    if segment is not None and run is not None:
        raise InputError("compare.two_runs", "--segment and --run exclude each other. Give only one of them.")
    number = _of_run(plant.ledger, run) if run is not None else segment
    newest = find_last_finished_segment(plant.ledger, "trunk")
    if number is None and newest is None:
        raise InputError(
            "compare.no_segment",
            "The trunk has no finished segment yet. To compare another segment, add '--segment N'.",
        )
    pairs = [(one.partition("=")[0], one.partition("=")[2] or one.partition("=")[0]) for one in metric or ["loss"]]
    lineage = SegmentRow.read_lineage(plant.ledger, number if number is not None else newest.id if newest else 0)
    ours = read_segment_curves(lineage, f"segment {lineage[-1].id}", x.value, [mine for mine, _ in pairs])
    other = [theirs for _, theirs in pairs]
    path = Path(reference)
    if reference.isdigit() and not path.exists():
        rows = SegmentRow.read_lineage(plant.ledger, int(reference))
        theirs = read_segment_curves(rows, f"segment {reference}", x.value, other)
    else:
        theirs = read_curve_file(path / "metrics.jsonl" if path.is_dir() else path, x.value, other, step_column)
    found = []
    for mine, name in pairs:
        a, b = ours.points[mine], theirs.points[name]
        if a[0][0] > b[-1][0] or b[0][0] > a[-1][0]:
            raise InputError(
                "compare.no_overlap",
                "{metric}: the runs have no {unit} in common. Our run has {first:,.0f}–{last:,.0f}, and {other} has "
                "{other_first:,.0f}–{other_last:,.0f}.",
                metric=mine,
                unit=x.value,
                first=a[0][0],
                last=a[-1][0],
                other=theirs.name,
                other_first=b[0][0],
                other_last=b[-1][0],
            )
        digits = min(run.decimals.get(key, 0) for run, key in ((ours, mine), (theirs, name)))
        rounding = 0.5 * 10.0**-digits if digits else 0.0
        found.append(compare_curves(mine, a, b, tolerance=tolerance, floor=rounding))
    unit = x.value.removesuffix("s")
    said = format_comparison(found, ours, theirs, unit, tolerance is not None)
    place = plant.workspace.reports / "comparison.html"
    write_atomically(place, render_comparison(found, ours, theirs, said, unit))
    shown = replace_non_finite(convert_comparison_to_json(found, ours, theirs, said) | {"page": str(place)})
    say(shown, (f"  {line}" for line in (*said, f"picture: {place}")))
    if find_earliest_divergence(found):
        raise typer.Exit(1)


def _of_run(ledger: Ledger, run: str) -> int:
    """Return the segment of an MLflow run. Raises: InputError for another kind of run."""
    for row in ledger.read("SELECT subject FROM tracked_runs WHERE run_id = :run", run=run):
        kind, _, number = row["subject"].partition(":")
        if kind == "segment":
            return int(number)
        raise InputError(
            "compare.not_a_segment",
            "Run {run} belongs to {kind} {number}. Only the runs of segments have metrics by step.",
            run=run,
            kind=kind,
            number=number,
        )
    raise InputError(
        "compare.no_run",
        "No run {run!r} is in the ledger. To see a release's runs: 'factory provenance --release N'",
        run=run,
    )
