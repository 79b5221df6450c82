"""``python -m benchmarks.headline``: the numbers by which a newcomer can compare this factory, in one table."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from factory.core.console import Terminal
from factory.core.errors import FactoryError
from factory.core.workspace import Workspace

ROOT = Path(__file__).parents[2]
SECONDS = 30.0  # of timed steps
SAME = 0.01  # share by which a first loss may differ: other kernels round otherwise in bf16
HEAD = 64  # of attention: a width is a multiple of it
MORE = """
what is measured
  speed      tokens a second of the trainer's fastest step, and its share of what matrix products alone reach here in bf16 and in fp32
  quality    bits per byte on held-out documents, beside a byte trigram and a model of the same shape that a loop of plain PyTorch trains
             with Hugging Face transformers: the same tokens in the same order, the same batch, rates and AdamW, one evaluator for both;
             the mean of some seeds
  delay      seconds from a shard's ingest to the release gate's verdict, from the ledger of a demo
  disk       bytes of the packages that 'make setup' installs, and of a clone
  cost       core-hours, and the price of a billion tokens at the hourly price that you state

The text is the standard library of this Python; nothing is downloaded. A CPU alone is measured: 'python -m benchmarks.gpu' does GPUs.

what comes out
  <out>/headline-<class of the CPU>.md and .json    the table, which is also printed, and all that it was made of

exit codes
  0  done    1  a training failed, or the two models are not comparable    2  a word of the command line is wrong    130  Ctrl-C

examples
  python -m benchmarks.headline                     five to seven minutes on two idle cores
  python -m benchmarks.headline --steps 20 --seeds 1 --out /tmp/look
  python -m benchmarks.headline --price-per-hour 0.10 --price-source "our cluster's internal price of two cores"
"""


class Refused(Exception):
    """A word of the command line, in one line."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(message.removeprefix("argument "))


def whole(least: int, multiple: int = 1) -> Any:
    """A type of argparse."""

    def read(word: str) -> int:
        value = int(word) if word.isdigit() else -1
        if value < least or value % multiple:
            kind = f"a multiple of {multiple}" if multiple > 1 else "a whole number"
            raise argparse.ArgumentTypeError(f"expected {kind}, at least {least}; got {word!r}")
        return value

    return read


def positive(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise argparse.ArgumentTypeError(f"expected a number above zero; got {word!r}")
    return value


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="python -m benchmarks.headline",
        description="Speed, quality, delay, disk and cost of this factory on this machine, beside what is usual.",
        epilog=MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--steps", type=whole(4), default=130, help="of training, of each model (default: 130)")
    made.add_argument("--width", type=whole(HEAD, HEAD), default=128, help="of both models (default: 128)")
    made.add_argument("--seeds", type=whole(1), default=3, help="how often each model is trained (default: 3)")
    made.add_argument("--lr", type=positive, default=2e-3, help="peak of the learning rate of all (default: 0.002)")
    made.add_argument("--workspace", type=Path, help="in which a demo has run (default: workspace, where there is one)")
    made.add_argument(
        "--price-per-hour", type=positive, metavar="PRICE", help="of a machine like this one, in any currency"
    )
    made.add_argument("--price-source", metavar="WORDS", help="whose price that is; it stands in the table")
    made.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder (default: benchmarks/results)"
    )
    made.add_argument("--json", action="store_true", help="print the JSON document instead of the table")
    return made


def checked(words: list[str] | None) -> argparse.Namespace:
    """Raises: Refused."""
    chosen = parser().parse_args(words)
    if (chosen.price_per_hour is None) != (chosen.price_source is None):
        raise Refused(
            "--price-per-hour and --price-source: a price needs the words that say whose it is; give both or neither"
        )
    if chosen.workspace and not (chosen.workspace / "ledger.db").exists():
        raise Refused(
            f"--workspace {chosen.workspace}: there is no ledger.db; 'factory demo --workspace {chosen.workspace}' makes one"
        )
    try:
        chosen.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=chosen.out):
            pass
    except OSError as error:
        raise Refused(f"--out {chosen.out}: no files can be written there: {error.strerror}") from None
    import torch

    if torch.cuda.is_available():
        raise Refused(
            "this measures a CPU, and training would take the GPU: 'python -m benchmarks.gpu' measures that; CUDA_VISIBLE_DEVICES= hides it"
        )
    return chosen


def main(words: list[str] | None = None) -> int:
    try:
        chosen = checked(words)
        found = measure(chosen, without_folders(sys.argv[1:] if words is None else words))
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    except (FactoryError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    from benchmarks.headline.page import markdown

    table, path = markdown(found), chosen.out / f"headline-{found['machine']['name']}"
    document = json.dumps(found, indent=1) + "\n"
    path.with_name(path.name + ".md").write_text(table)
    path.with_name(path.name + ".json").write_text(document)
    print(document if chosen.json else table, end="")
    print(f"{path}.md and .json", file=sys.stderr)
    return 0


def measure(chosen: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """All of it, as JSON values. Raises: FactoryError, subprocess.CalledProcessError."""
    from benchmarks.headline import facts, models
    from benchmarks.headline.page import FROM_OURS, OURS, THEIRS, TRIGRAM
    from benchmarks.support.best_here import tuned_kernels
    from kernels.contract.machine import describe_this_machine

    terminal = Terminal(Console(highlight=False, stderr=True))
    load = os.getloadavg()[0]
    judged, why = judged_here(chosen.workspace)
    recipe = models.recipe_of(chosen.steps, chosen.width, chosen.lr)
    with tempfile.TemporaryDirectory(prefix="headline-") as name:
        folder = Path(name)
        terminal.print_heading("The standard library as text, and a tokenizer made of it")
        plant = models.ingest_library(folder / "workspace", terminal)
        terminal.print_heading("The factory's kernels are tuned")
        with terminal.task("tuning kernels"), contextlib.redirect_stdout(sys.stderr):
            kernels = tuned_kernels(recipe)
        trained: dict[str, list[models.Trained]] = {OURS: [], THEIRS: [], FROM_OURS: []}
        bits: dict[str, list[dict[str, float]]] = {name: [] for name in trained}
        for seed in range(1, chosen.seeds + 1):
            terminal.print_heading(f"Seed {seed} of {chosen.seeds}: the same tokens to each model")
            task = models.task_of(plant, recipe, seed)
            one = folder / f"seed-{seed}"
            with terminal.task(f"{OURS}: {chosen.steps} steps by its trainer (the first compiles)"):
                trained[OURS].append(models.train_ours(task, one / OURS, kernels))
            for name, start in ((THEIRS, None), (FROM_OURS, models.first_weights(task, kernels))):
                with terminal.task(f"{name}: {chosen.steps} steps (the first compiles)"):
                    trained[name].append(models.train_theirs(task, one / name, start))
            refuse_unequal({name: models_of[-1] for name, models_of in trained.items()})
            for name, models_of in trained.items():
                bits[name].append(models.bits_of(task, models_of[-1].export, terminal))
        terminal.print_heading("Steps of both in turn, and what matrix products alone reach here")
        with terminal.task("steps in turn (the first compile)"):
            seconds = dict(zip((OURS, THEIRS), models.step_seconds(task, kernels, SECONDS)))
        peaks = facts.matmul_peaks()
        bits[TRIGRAM] = [models.trigram(task, terminal)]
        sizes = models.scored_bytes(task)
        documents = {domain: sum(text.document.domain == domain for text in task.texts) for domain in sizes}
    for found in (found for of_seeds in bits.values() for found in of_seeds):
        found["all"] = models.pooled(found, sizes)
    terminal.print_heading("Disk")
    clone = facts.clone_bytes()
    model = recipe.model
    return {
        "command": shlex.join(["python", "-m", "benchmarks.headline", *words]),
        "commit": commit(),
        "machine": describe_this_machine("cpu").to_json(),
        "model": {
            "parameters": model.parameters,
            "layers": model.layers,
            "width": model.d_model,
            "vocabulary": model.vocab_size,
            "steps": chosen.steps,
            "lr": chosen.lr,
            "tokens_per_step": recipe.tokens_per_step,
            "precision": recipe.precision,
            "flops_per_token": model.count_flops_per_token(),
        },
        "trained": {name: [told(one) for one in models_of] for name, models_of in trained.items()},
        "step_seconds": seconds,
        "load_before": load,
        "matmul_flops_per_s": peaks,
        "held_out": {domain: {"documents": documents[domain], "bytes": size} for domain, size in sorted(sizes.items())},
        "bits_per_byte": bits,
        "shard_to_verdict": [asdict(one) for one in judged],
        "no_verdict": why,
        "disk": {
            "setup_bytes": facts.setup_bytes(),
            "venv_bytes": facts.on_disk(Path(sys.prefix)),
            "clone": clone and {"files_bytes": clone[0], "history_bytes": clone[1]},
        },
        "price": chosen.price_per_hour and {"per_hour": chosen.price_per_hour, "source": chosen.price_source},
    }


def judged_here(named: Path | None) -> tuple[list[Any], str]:
    """(the newest candidate's shards, why there are none). Raises: WorkspaceError."""
    from benchmarks.headline.facts import last_judged

    where = named or ROOT / "workspace"
    if not (where / "ledger.db").exists():
        return [], "not measured: no demo has run here. Run `make demo`, then this command again."
    found = last_judged(Workspace.open(where.resolve()))
    return found, "" if found else "not measured: the workspace has no verdict yet."


def refuse_unequal(trained: dict[str, Any]) -> None:
    """Raises: FactoryError unless all saw as many tokens, and the same weights have the same first loss."""
    from benchmarks.headline.page import FROM_OURS, OURS

    ours = trained[OURS]
    for name, one in trained.items():
        if (one.tokens, one.supervised) != (ours.tokens, ours.supervised):
            raise FactoryError(f"{name} saw {one.tokens:,} tokens, the factory {ours.tokens:,}; nothing is compared")
    first, other = ours.losses[0], trained[FROM_OURS].losses[0]
    if abs(first - other) > SAME * first:
        raise FactoryError(
            f"the same weights have a first loss of {first:.4f} and of {other:.4f}: these are two models, and nothing is compared"
        )


def told(trained: Any) -> dict[str, Any]:
    return {key: value for key, value in asdict(trained).items() if key != "export"}


def commit() -> str:
    """With '-changed' where files are not that commit's; '': no git checkout."""
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty=-changed"], cwd=ROOT, capture_output=True, text=True
    )
    return asked.stdout.strip()


def without_folders(words: list[str]) -> list[str]:
    """The command line for the report, which names no folder of this machine.

    >>> without_folders(["--steps", "9", "--out", "/tmp/look", "--workspace=x"])
    ['--steps', '9']
    """
    kept, after = [], ""
    for word in words:
        if after not in ("--out", "--workspace") and word.partition("=")[0] not in ("--out", "--workspace"):
            kept.append(word)
        after = word
    return kept


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
