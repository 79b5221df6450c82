"""``plan``: how a model of some size would be trained, before anything is. Needs no workspace, and no torch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from factory.cli.app import AsJson, app, print_json
from factory.core.errors import ConfigError, InputError, nearest
from factory.core.workspace import code_root

if TYPE_CHECKING:
    from trainer.contract.plan.run_plan import RunPlan
    from trainer.contract.recipe import ModelRecipe, Recipe

SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
LARGE = 2e9  # parameters from which on the vocabulary is Llama 3's 128,256, not Llama 2's 32,000


@app.command()
def plan(
    params: Annotated[str, typer.Option(help="Parameters of a dense model: 8e9, 8B.")] = "",
    recipe: Annotated[str, typer.Option(help="Or a recipe: its file, or its name in policies/recipes/.")] = "",
    config: Annotated[
        Path | None, typer.Option(help="Or a public model: its Hugging Face config.json, or the folder that has it.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="Tokens to train on: 300e9, 300B.")] = "",
    gpus: Annotated[int, typer.Option(help="How many GPUs.")] = 8,
    gpu: Annotated[str, typer.Option(help="Which GPU: gives its peak, and its memory.")] = "h100",
    memory: Annotated[float | None, typer.Option(help="GB of one GPU (default: the GPU's).")] = None,
    mfu: Annotated[float | None, typer.Option(help="Share of the peak reached (default: 0.4 on one node, else published runs').")] = None,
    network: Annotated[
        float | None, typer.Option(help="GB a second between nodes, of one GPU (default: the GPU's usual card; 50 are 400 Gb/s).")
    ] = None,
    expert_parallel: Annotated[
        int, typer.Option(help="GPUs that share the experts; for a plan of another trainer, as this one cannot.")
    ] = 1,
    fp8: Annotated[bool, typer.Option("--fp8", help="The layers' products in fp8, as with 'precision: fp8' in a recipe.")] = False,
    price: Annotated[float | None, typer.Option(help="Dollars of a GPU for an hour (default: 2).")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of a row, with --params or --config (default: 4096).")] = None,
    vocab: Annotated[
        int | None, typer.Option(help="Size of the vocabulary, with --params (default: 32000; 128256 from 2B on).")
    ] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Plan a run: memory by part, parallelism, batch, steps, days and cost, each with its formula and source."""
    from trainer.contract.errors import TrainerError
    from trainer.contract.plan.gpus import GPUS
    from trainer.contract.plan.hf_config import read_config
    from trainer.contract.plan.plan_report import as_json as plan_json
    from trainer.contract.plan.run_plan import PRICE, Ask, SizingError, active, plan_run
    from trainer.contract.plan.sizing import GB, shape_of

    if bool(params) + bool(recipe) + bool(config) != 1:
        raise InputError("name one: --params 8e9, --recipe NAME or --config FILE")
    if gpu not in GPUS:
        raise InputError(f"--gpu: no {gpu!r} in the table{nearest(gpu, GPUS)}")
    given = {
        "--gpus": gpus,
        "--expert-parallel": expert_parallel,
        "--network": network,
        "--memory": memory,
        "--mfu": mfu,
        "--price": price,
        "--context": context,
        "--vocab": vocab,
    }
    for flag, value in given.items():
        if value is not None and not value > 0:
            raise InputError(f"{flag}: {value:g} is not above zero")
        if recipe and value is not None and flag in ("--context", "--vocab"):
            raise InputError(f"{flag}: the recipe already has it; use it with --params only")
        if config and value is not None and flag == "--vocab":
            raise InputError(f"{flag}: config.json already has it; use it with --params only")
    if mfu is not None and mfu > 1:
        raise InputError(f"--mfu: {mfu:g} is above 1, the whole peak")
    if context is not None and context < 8:
        raise InputError(f"--context: {context} is less than 8")
    chosen_gpu = GPUS[gpu] if memory is None else replace(GPUS[gpu], memory=memory * GB)
    wanted = _number("--tokens", tokens)
    size = _number("--params", params) if params else 0.0
    try:
        asked = _recipe(recipe) if recipe else None
        if config:
            shape: ModelRecipe = read_config(config, context)
        elif asked:
            shape = asked.model
        else:
            shape = shape_of(size, vocab or (128_256 if size >= LARGE else 32_000), context or 4096)
        if expert_parallel > 1 and (
            shape.experts is None or gpus % expert_parallel or shape.experts.count % expert_parallel
        ):
            what = (
                "the model has no experts"
                if shape.experts is None
                else f"it must divide the {gpus} GPUs and the {shape.experts.count} experts"
            )
            raise InputError(f"--expert-parallel {expert_parallel}: {what}")
        ask = Ask(
            shape, wanted, gpus, chosen_gpu, logit_rows=_logit_rows(), mfu=mfu, price=price or PRICE,
            network=network and network * GB, expert=expert_parallel, fp8=fp8,
        )  # fmt: skip
        if asked:
            rounded = asked.precision != "fp32"  # every GPU of the table has bf16, and auto takes it there
            ask = replace(
                ask,
                batch=asked.batch,
                optimizer=asked.optimizer.name,
                itemsize=2 if rounded else 4,
                fp8=fp8 or asked.precision == "fp8" and shape.experts is None,  # routed experts multiply in bf16
                replicas=asked.parallel.replicas,
            )
        if wanted < active(ask.model):
            raise InputError(
                f"--tokens: {wanted:,.0f} is less than one token per parameter ({active(ask.model):,}): the scaling rules do not apply"
            )
        found = plan_run(ask)
    except SizingError as error:
        raise InputError(f"--gpus {gpus}: {error}") from error
    except TrainerError as error:
        raise ConfigError(f"{'--recipe' if recipe else '--config' if config else '--params'}: {error}") from error
    if as_json:
        print_json(plan_json(found))
    else:
        _show(found)


def _number(flag: str, text: str) -> float:
    """``8e9`` or ``8B``. Raises: InputError naming the flag."""
    word = text.strip().replace("_", "").replace(",", "").upper()
    factor = SUFFIXES.get(word[-1:], 1.0)
    try:
        value = float(word[:-1] if word[-1:] in SUFFIXES else word) * factor
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise InputError(f"{flag}: {f'{text!r} is not a number' if text else 'is missing'}; write it as 8e9 or 8B")
    if value <= 0:
        raise InputError(f"{flag}: {text} is not above zero")
    if value > 1e18:
        raise InputError(f"{flag}: {text} is outside the range of the scaling rules")
    return value


def _recipe(name: str) -> Recipe:
    """A recipe's file, or its name."""
    from trainer.contract.recipe import Recipe

    folder = code_root() / "policies" / "recipes"
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = folder / f"{name}.yaml"
        if not path.exists():
            raise InputError(f"--recipe: no recipe {name!r}{nearest(name, {p.stem for p in folder.glob('*.yaml')})}")
    return Recipe.load(path)


def _logit_rows() -> int | None:
    """Tokens whose logits exist at one time, as the kernel policy has it for cuda; None: all of a micro-batch."""
    import yaml

    policy = yaml.safe_load((code_root() / "policies" / "kernels.yaml").read_text("utf-8"))
    chosen = policy.get("cuda", {}).get("linear_cross_entropy", "reference")
    return None if chosen in ("auto", "reference", "compiled") else 1024


def _show(plan: RunPlan) -> None:
    from rich import box
    from rich.table import Table

    from factory.core.console import for_tables
    from trainer.contract.plan.plan_report import lines, remarks
    from trainer.contract.plan.sizing import GB, needed

    console = for_tables()

    def table(title: str) -> Table:
        made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, expand=True)
        made.add_column("", no_wrap=True)
        made.add_column("", justify="right", no_wrap=True)
        made.add_column("formula", ratio=3)
        made.add_column("source", ratio=2, style="dim")
        return made

    run = table("the run")
    for line in lines(plan):
        run.add_row(line.name, line.text, line.formula, line.source)
    there = plan.ask.gpu.memory
    memory = table(f"memory of one GPU of {there / GB:g} GB")
    for part in plan.memory:
        memory.add_row(part.name, f"{part.bytes / GB:.2f} GB", part.formula, part.source)
    whole = needed(plan.memory)
    memory.add_section()
    memory.add_row(
        "in all",
        f"{whole / GB:.2f} GB",
        f"{whole / there:.0%} of {there / GB:g} GB; what is left: {(there - whole) / GB:.2f} GB",
        "",
    )
    console.print(run)
    console.print(memory)
    for remark in remarks(plan):
        console.print(f"  · {remark}", markup=False, soft_wrap=True)
