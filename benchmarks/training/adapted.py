"""``python -m benchmarks.training.adapted``: what it costs to train all weights, some layers, LoRA or DoRA, and what ``factory plan`` says it costs.

Each way continues from the same weights on the same packed rows, in a process of its own. The ways take turns. Printed are tokens a second of
processor time of all threads (the median step after the first, of all rounds), and the peak of resident memory after the imports, while loading,
in the first step, in later steps and while saving. Beside the peak of the steps stands the forecast of ``estimate_memory_parts``, without its
reserve. PEFT's LoRA in transformers' Trainer is added if ``peft`` can be imported (pip install peft; not a dependency of this project).

    python -m benchmarks.training.adapted --layers 8
    python -m benchmarks.training.adapted --precision fp32 --ways all lora
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.side import TRAINER, WARM_UP, Measured, Side, train_recipe, train_theirs
from benchmarks.peers.work import Work

ROOT = Path(__file__).resolve().parents[2]
RANK = 16
LAST = 4  # layers that ``last`` trains
NATIVE = "cpu: {swiglu: native, attention: native, linear_cross_entropy: native, rms_norm: reference, adamw: fused}\n"
PASSIVE = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}  # a thread that waits takes no processor time
PEFT = "PEFT LoRA"
MIB = 1 << 20


def list_ways(work: Work) -> dict[str, dict[str, Any]]:
    """The keys of a recipe by the name of the way."""
    below = work.recipe().model.layers - LAST
    return {
        "all": {},
        "last": {"freeze": ["embedding", f"blocks.0-{below - 1}"]},
        "lora": {"adapt": {"kind": "lora", "rank": RANK}},
        "dora": {"adapt": {"kind": "dora", "rank": RANK}},
    }


def train_ours(folder: Path, out: Path, keys: dict[str, Any], compiled: bool) -> Measured:
    from trainer.contract.recipe import Recipe  # not for PEFT, whose memory shall hold none of ours

    recipe = Recipe.parse(Work.load(folder).recipe(compiled).model_dump() | keys)
    return train_recipe(folder, out, recipe, folder / "kernels.yaml")


def train_with_peft(folder: Path, out: Path, compiled: bool) -> Measured:
    """transformers' Trainer with PEFT's LoRA of the same matrices. The base weights are in the dtype of the products, as PEFT's users load them."""
    import peft
    import torch
    import transformers

    config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    load = transformers.AutoModelForCausalLM.from_pretrained
    dtype = torch.bfloat16 if Work.load(folder).precision == "bf16" else torch.float32

    def with_adapters(path: Path, **keywords: Any) -> Any:
        return peft.get_peft_model(load(path, **keywords | {"dtype": dtype}), config)

    transformers.AutoModelForCausalLM.from_pretrained = with_adapters
    return train_theirs(folder, out, Side(TRAINER, compiled))


def forecast(work: Work, way: str) -> float:
    """Bytes of one device, without the reserve."""
    from trainer.contract.plan.adapting import adapt, freeze
    from trainer.contract.plan.sizing import GpuLayout, estimate_memory_parts, sum_bytes

    keys, model = list_ways(work)[way], work.recipe().model
    trained = adapt(model, keys["adapt"]["kind"], RANK) if "adapt" in keys else freeze(model, keys.get("freeze", ()))
    itemsize = 2 if work.precision == "bf16" else 4
    layout = GpuLayout(1, micro_sequences=work.rows)
    return sum_bytes(
        estimate_memory_parts(model, layout, 0.0, itemsize=itemsize, logit_rows=512, in_place=True, trained=trained)
    )


def train_once(folder: Path, way: str, compiled: bool) -> Measured:
    with tempfile.TemporaryDirectory(prefix="out-", dir=folder) as out:
        words = [
            sys.executable,
            "-m",
            "benchmarks.training.adapted",
            "--one",
            way,
            "--folder",
            str(folder),
            "--out",
            out,
            *(["--compile"] if compiled else []),
        ]
        done = subprocess.run(
            words, cwd=ROOT, env=os.environ | PASSIVE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            raise SystemExit(f"{way} failed with exit code {done.returncode}:\n{done.stdout[-3000:]}")
        return Measured(**json.loads((Path(out) / "measured.json").read_text()))


def write_table(work: Work, rounds: dict[str, list[Measured]]) -> str:
    """Markdown. Memory in MiB, of all rounds the least."""
    lines = [
        "| way | tokens / processor s | of all weights | loading | first step | steps | saving | forecast | steps / forecast |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    speeds = {
        way: work.tokens_per_step / statistics.median(s for one in found for s in one.core_seconds[WARM_UP:])
        for way, found in rounds.items()
    }
    for way, found in rounds.items():
        peaks = {
            stage: min(one.peaks[stage] - one.peaks["imports"] for one in found) / MIB
            for stage in ("loading", "first steps", "steps", "saving")
        }
        said = "" if way == PEFT else f"{forecast(work, way) / MIB:,.0f}"
        ratio = "" if way == PEFT else f"{peaks['steps'] * MIB / forecast(work, way):.2f}"
        of_all = f"{speeds[way] / speeds['all']:.2f}" if "all" in speeds else ""
        numbers = " | ".join(f"{peak:,.0f}" for peak in peaks.values())
        lines.append(f"| {way} | {speeds[way]:,.0f} | {of_all} | {numbers} | {said} | {ratio} |")
    losses = {way: found[0].losses for way, found in rounds.items()}
    first = {way: round(values[0], 5) for way, values in losses.items()}
    return "\n".join([*lines, "", f"first losses: {first}"])


def parse(words: list[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(prog="python -m benchmarks.training.adapted")
    made.add_argument("--shape", default="smollm2-135m")
    made.add_argument("--layers", type=int, help="instead of the shape's own")
    made.add_argument("--context", type=int, default=512)
    made.add_argument("--rows", type=int, default=4)
    made.add_argument("--steps", type=int, default=4)
    made.add_argument("--rounds", type=int, default=2)
    made.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    made.add_argument("--ways", nargs="+", default=["all", "last", "lora", "dora", PEFT])
    made.add_argument("--compile", action="store_true", help="compile the blocks, as a recipe does by default")
    made.add_argument("--one", help=argparse.SUPPRESS)
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    made.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return made.parse_args(words)


def main(words: list[str] | None = None) -> None:
    chosen = parse(words)
    if chosen.one:
        work = Work.load(chosen.folder)
        peft_asked = chosen.one == PEFT
        measured = (
            train_with_peft(chosen.folder, chosen.out, chosen.compile)
            if peft_asked
            else train_ours(chosen.folder, chosen.out, list_ways(work)[chosen.one], chosen.compile)
        )
        (chosen.out / "measured.json").write_text(json.dumps(asdict(measured)))
        return
    work = Work(chosen.shape, chosen.context, chosen.rows, chosen.steps, chosen.precision, layers=chosen.layers)
    ways = [way for way in chosen.ways if way != PEFT or importlib.util.find_spec("peft")]
    with tempfile.TemporaryDirectory(prefix="adapted-") as name:
        folder = Path(name)
        preparing = [sys.executable, "-m", "benchmarks.peers.preparing", name, json.dumps(asdict(work))]
        subprocess.run(preparing, cwd=ROOT, check=True)
        (folder / "kernels.yaml").write_text(NATIVE)
        rounds: dict[str, list[Measured]] = {way: [] for way in ways}
        for number in range(chosen.rounds):
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                rounds[way].append(train_once(folder, way, chosen.compile))
                print(f"round {number + 1} of {chosen.rounds}: {way}", file=sys.stderr, flush=True)
    how = "compiled" if chosen.compile else "eager"
    print(f"{work.precision}, {how}, {work.rows} rows of {work.context} tokens, {work.recipe().model.layers} layers")
    print(write_table(work, rounds))


if __name__ == "__main__":
    main()
