"""``python -m benchmarks.training.data_order``: what the data order costs, at the demo's shape or a recipe's.

Prints, for 10³ and for 10⁷ planned steps, each in a fresh process, how long it takes to open the data order, check that
the plan feeds the steps and make the first batches, from the plan's beginning and as resumed just before its end; the
process's memory; and the state's size. Then the time of one batch, which a thread makes while the step before it runs.

    python -m benchmarks.training.data_order
    python -m benchmarks.training.data_order --recipe policies/recipes/demo.yaml --json
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from trainer.batch import make_batch
from trainer.contract.data.data_order import DataOrder
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.token_shard import TokenizedDocument, TokenShard, write_token_shard
from trainer.contract.plan.feasibility import refuse_impossible_run
from trainer.contract.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
PLANNED = (10**3, 10**7)
BATCHES = 50
# median positions of a document, spread of their logarithm, share of the tokens that carry loss
DOMAINS = {"code": (400, 1.0, 1.0), "docs": (150, 0.8, 1.0), "chat": (180, 0.4, 0.5)}


@dataclass(frozen=True)
class OrderCost:
    """Of one process that planned so many steps and began at one of them."""

    planned_steps: int
    first_step: int
    opened_s: float  # streams opened, plan checked
    first_batches_s: float
    memory_mib: float  # the most the process ever held, the interpreter and its libraries among it
    state_bytes: int
    batch_ms: float  # median


def shard_in(folder: Path, vocab_size: int, documents: int) -> TokenShard:
    """Random documents of log-normal lengths, as text has them."""
    rng = np.random.default_rng(0)
    made = []
    for domain, (median, spread, supervised) in DOMAINS.items():
        lengths = np.maximum(2, rng.lognormal(np.log(median), spread, documents).astype(int))
        for i, length in enumerate(lengths.tolist()):
            ids = rng.integers(0, vocab_size, length, dtype=np.uint32)
            mask = np.arange(length) >= length * (1 - supervised)
            made.append(TokenizedDocument(f"{domain}-{i}", f"{domain}-{i}", domain, "", "", ids, mask))
    return write_token_shard(folder, made, vocab_size=vocab_size, tokenizer_sha256="0" * 64)


def measure(recipe: Recipe, shard: Path, planned: int, resumed: bool) -> OrderCost:
    """In this process."""
    tokens = TokenShard(shard).manifest["tokens"]
    epochs = 8 * planned * recipe.tokens_per_step // tokens + 2  # enough for the steps, whatever the mixture
    mixture = recipe.mixture.model_copy(update={"max_epochs": epochs, "phases": []})
    plan = DataPlan.make_for_segment(mixture, "trunk", [(shard.name, str(shard), 0)], recipe.seed)
    began = time.perf_counter()
    order = open_order(plan, recipe, None)
    if resumed:
        far = planned - 2 * BATCHES
        state = order.state_dict() | {"step": far}
        for name, cursor in state["streams"].items():  # about where the walk would have come to
            cursor[2] = order.streams[name].pieces * (far * recipe.tokens_per_step // tokens)
        order = open_order(plan, recipe, json.loads(json.dumps(state)))
    first = order.step
    refuse_impossible_run(order, recipe, first, planned)
    opened = time.perf_counter()
    for _ in range(3):
        make_batch(order)
    warm = time.perf_counter()
    times = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        make_batch(order)
        times.append(time.perf_counter() - start)
    return OrderCost(
        planned_steps=planned,
        first_step=first,
        opened_s=opened - began,
        first_batches_s=warm - opened,
        memory_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        state_bytes=len(json.dumps(order.state_dict())),
        batch_ms=statistics.median(times) * 1e3,
    )


def open_order(plan: DataPlan, recipe: Recipe, state: dict[str, object] | None) -> DataOrder:
    return DataOrder(
        plan, context=recipe.model.context, batch=recipe.batch, vocab_size=recipe.model.vocab_size, state=state
    )


def costs(recipe: Path, shard: Path) -> list[OrderCost]:
    """Each in a fresh process."""
    found = []
    for planned in PLANNED:
        for resumed in (False, True):
            command = [
                sys.executable,
                "-m",
                "benchmarks.training.data_order",
                "--recipe",
                str(recipe),
                "--shard",
                str(shard),
            ]
            command += ["--planned", str(planned)] + ["--resumed"] * resumed
            done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
            found.append(OrderCost(**json.loads(done.stdout)))
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training.data_order",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipe", type=Path, default=ROOT / "policies" / "recipes" / "demo.yaml")
    parser.add_argument("--documents", type=int, default=3000, help="in each of the three domains")
    parser.add_argument("--json", action="store_true", help="print the four measurements as a JSON list")
    parser.add_argument("--shard", type=Path, help=argparse.SUPPRESS)  # the three that follow: one fresh process
    parser.add_argument("--planned", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--resumed", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    recipe = Recipe.load(asked.recipe)
    if asked.planned is not None:
        print(json.dumps(asdict(measure(recipe, asked.shard, asked.planned, asked.resumed))))
        return 0
    with tempfile.TemporaryDirectory(prefix="data-order-") as folder:
        found = costs(asked.recipe, shard_in(Path(folder), recipe.model.vocab_size, asked.documents).path)
    if asked.json:
        print(json.dumps([asdict(cost) for cost in found], indent=1))
        return 0
    print(f"{'planned':>12}{'from step':>12}{'opened':>10}{'3 batches':>11}{'memory':>11}{'state':>9}{'a batch':>10}")
    for cost in found:
        print(
            f"{cost.planned_steps:>12,}{cost.first_step:>12,}{cost.opened_s * 1e3:>7.1f} ms{cost.first_batches_s * 1e3:>8.1f} ms"
            f"{cost.memory_mib:>7.1f} MiB{cost.state_bytes:>7} B{cost.batch_ms:>7.2f} ms"
        )
    few, many = found[0], found[2]
    print(
        f"10⁷ against 10³ planned steps: memory ×{many.memory_mib / few.memory_mib:.2f}, state ×{many.state_bytes / few.state_bytes:.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
