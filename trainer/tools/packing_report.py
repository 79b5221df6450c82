"""``python -m trainer.tools.packing_report``: report how each packing strategy would pack some data, before training.

    python -m trainer.tools.packing_report SEGMENT                       the recipe and data plan of SEGMENT/segment.json
    python -m trainer.tools.packing_report RECIPE.yaml SHARD [SHARD …]   a recipe over token shards, or folders of them

It packs the steps as training would, with every strategy of ``batch.packing``, and prints a table:

  used      share of a batch's positions that hold a token; a batch has batch.sequences × model.context positions
  padding   share of the positions that hold no token, which the model computes for nothing
  cut       share of documents that were cut, among those that would fit into a row: a cut document loses context
  cut tok   share of the used positions that such cut documents take
  recut     share of pieces that were cut once more to fill a row, among the pieces of documents longer than a row
            (such a document is cut every model.context positions in any case)
  cross     share of the used positions that are in rows with several documents: attention is masked between the documents,
            unless the recipe sets model.across_documents
  largest   largest share of one document in the used positions of a step: if it is high, that document dominates the gradient
  spread    standard deviation of the lengths of a step's pieces, divided by their mean: it is low if the rows of a step are alike

best-fit (the default) pads least among the strategies that cut no document that fits into a row. If best-fit pads much, most documents are a
little longer than half a row and few are longer than a row. Then only a strategy that cuts, or another model.context, fills the rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from kernels.contract.message import Message, format_error_with_code
from trainer.contract.data.data_order import DataOrder, Row
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.packing import STRATEGIES
from trainer.contract.data.token_shard import TokenShard
from trainer.contract.errors import DataPlanError, SpecError, TrainerError
from trainer.contract.plan.spec import SegmentSpec
from trainer.contract.recipe import Recipe

STEPS = 100


@dataclass(frozen=True)
class PackingReport:
    """How a strategy packed some steps. The module's docstring defines the shares."""

    packing: str
    steps: int
    positions: int
    used: int
    padding_share: float
    cut_document_share: float
    cut_token_share: float
    recut_piece_share: float
    cross_document_share: float
    largest_document_share: float
    length_spread: float

    @property
    def used_share(self) -> float:
        return self.used / self.positions


def measure_packing(packing: str, order: DataOrder, steps: int) -> PackingReport:
    """Pack the next ``steps`` steps with a strategy (fewer if the data ends) and report on them. ``order`` itself does not advance.

    Raises: DataPlanError if there is too little data for one step.
    """
    order = order.copy_at_step()
    order.batch = order.batch.model_copy(update={"packing": packing})
    made: list[list[Row]] = []
    while len(made) < steps:
        try:
            made.append(order.draw_next_rows())
        except DataPlanError:
            if not made:
                raise
            break
    pieces = [piece for rows in made for row in rows for piece in row]
    positions = sum(len(rows) for rows in made) * order.context
    used = sum(piece.positions for piece in pieces)
    fitting = cut = cut_positions = long = recut = 0
    for piece in pieces:
        whole = piece.document_positions
        if whole <= order.context:
            fitting += piece.start == 0
            cut += piece.start == 0 and piece.positions < whole
            cut_positions += piece.positions if piece.positions < whole else 0
        else:
            begins = piece.start % order.context == 0
            long += begins
            recut += begins and piece.positions < min(order.context, whole - piece.start)
    return PackingReport(
        packing=packing,
        steps=len(made),
        positions=positions,
        used=used,
        padding_share=1 - used / positions,
        cut_document_share=cut / max(1, fitting),
        cut_token_share=cut_positions / used,
        recut_piece_share=recut / max(1, long),
        cross_document_share=sum(_shared_positions(row) for rows in made for row in rows) / used,
        largest_document_share=max(map(_largest_share, made)),
        length_spread=statistics.fmean(map(_spread, made)),
    )


def measure_all_packings(plan: DataPlan, recipe: Recipe, steps: int) -> list[PackingReport]:
    """One report for each strategy, from the plan's first step on. Raises: DataPlanError, TokenShardError."""
    order = DataOrder(plan, context=recipe.model.context, batch=recipe.batch, vocab_size=recipe.model.vocab_size)
    return [measure_packing(packing, order, steps) for packing in STRATEGIES]


def _shared_positions(row: Row) -> int:
    documents = {(piece.stream, piece.document) for piece in row}
    return sum(piece.positions for piece in row) if len(documents) > 1 else 0


def _largest_share(rows: list[Row]) -> float:
    held: dict[tuple[str, int], int] = defaultdict(int)
    for row in rows:
        for piece in row:
            held[piece.stream, piece.document] += piece.positions
    return max(held.values()) / sum(held.values())


def _spread(rows: list[Row]) -> float:
    lengths = [piece.positions for row in rows for piece in row]
    return statistics.pstdev(lengths) / statistics.fmean(lengths)


def format_packing_table(reports: Iterable[PackingReport]) -> str:
    """The reports as a table: a heading and one line for each strategy."""
    names = ("used", "padding", "cut", "cut tok", "recut", "cross", "largest")
    lines = [f"{'packing':<25}{'steps':>6}{''.join(f'{name:>9}' for name in names)}{'spread':>8}"]
    for r in reports:
        shares = (r.used_share, r.padding_share, r.cut_document_share, r.cut_token_share, r.recut_piece_share)
        every = (*shares, r.cross_document_share, r.largest_document_share)
        percents = "".join(f"{share:>9.2%}" for share in every)
        lines.append(f"{r.packing:<25}{r.steps:>6}{percents}{r.length_spread:>8.2f}")
    return "\n".join(lines)


def read_recipe_and_data_plan(paths: list[Path]) -> tuple[Recipe, DataPlan]:
    """The recipe and plan that the paths name. Raises: TrainerError, TokenShardError."""
    first, *rest = paths
    if first.is_dir() and not rest:
        spec = SegmentSpec.load(first)
        return spec.recipe, spec.data_plan
    if not rest:
        raise SpecError(
            "trainer.not_a_segment",
            "{path} is not a segment's folder. If it is a recipe, add the folders of token shards after it.",
            path=str(first),
        )
    recipe = Recipe.load(first)
    shards = [TokenShard(path) for given in rest for path in find_token_shards(given)]
    plan = DataPlan.make_for_segment(recipe.mixture, "trunk", [(s.id, str(s.path), 0) for s in shards], recipe.seed)
    held = {name for shard in shards for name in shard.domains}
    plan, left_out = plan.copy_without_missing_domains(held, 0, 1)
    if left_out:
        said = Message(
            "trainer.domains_left_out",
            "these domains are left out, because no shard has documents of them: {domains}",
            domains=left_out,
        )
        print(said, file=sys.stderr)
    return recipe, plan


def find_token_shards(folder: Path) -> list[Path]:
    """The folder itself if it is a token shard, else the token shards in it. Raises: SpecError if it contains none."""
    if (folder / "manifest.json").exists():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/manifest.json"))
    if not found:
        raise SpecError(
            "trainer.no_token_shard",
            "{folder} is not a token shard and contains no token shard. A token shard has a manifest.json.",
            folder=str(folder),
        )
    return found


def main(arguments: list[str]) -> int:
    head, _, tail = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m trainer.tools.packing_report",
        usage="python -m trainer.tools.packing_report [-h] [--steps N] [--json] SEGMENT | RECIPE.yaml SHARD [SHARD …]",
        description=head.partition(": ")[2],
        epilog=tail,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "paths", type=Path, nargs="+", metavar="PATH", help="a segment's folder, or a recipe and shards"
    )
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"steps to pack (default {STEPS})")
    parser.add_argument("--json", action="store_true", help="print a JSON list of the reports, shares as numbers")
    asked = parser.parse_args(arguments)
    if asked.steps < 1:
        parser.error(Message("trainer.too_few_steps", "--steps must be at least 1"))
    try:
        recipe, plan = read_recipe_and_data_plan(asked.paths)
        found = measure_all_packings(plan, recipe, asked.steps)
    except TrainerError as error:
        print(f"trainer.tools.packing_report: {format_error_with_code(error)}", file=sys.stderr)
        return error.exit_code
    if asked.json:
        print(json.dumps([asdict(report) | {"used_share": report.used_share} for report in found], indent=1))
        return 0
    rows, context = recipe.batch.sequences, recipe.model.context
    print(
        Message(
            "trainer.packing",
            "With recipe {recipe}, {shards:,|token shard is|token shards are} packed into batches of {rows} rows × {context} positions:",
            recipe=recipe.name,
            rows=rows,
            context=context,
            shards=len(plan.token_shards),
        )
    )
    print(format_packing_table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
