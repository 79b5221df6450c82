"""The command ``factory plan``: plans the training of a model before anything is trained. It needs neither a workspace nor torch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from factory.cli.app import JsonOption, app, print_json
from factory.cli.continuing_plan import (
    Continued,
    count_logit_rows,
    describe_gpus,
    describe_this_machine,
    plan_continuing,
)
from factory.core.errors import ConfigError, InputError, suggest_name
from factory.core.workspace import find_checkout_root
from kernels.contract.message import Message

if TYPE_CHECKING:
    from models.spec import ModelSpec
    from trainer.contract.plan.run_plan import RunPlan
from trainer.contract.errors import RecipeError
from trainer.contract.recipe import Recipe

SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
LARGE = (
    2e9  # parameters. From here on, the default vocabulary is Llama 3's (128,256 entries), below it Llama 2's (32,000).
)


@app.command()
def plan(
    params: Annotated[str, typer.Option(help="Number of parameters of a dense model, such as 8e9 or 8B.")] = "",
    recipe: Annotated[str, typer.Option(help="Instead of --params, a recipe: its file, or its name in policies/recipes/.")] = "",
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Instead of --params, a public model: its folder, config.json or .gguf file. Says what fits to continue it."),
    ] = None,
    lora: Annotated[int | None, typer.Option(help="With --from, the rank of LoRA and DoRA adapters (default: 16).")] = None,
    targets: Annotated[
        str, typer.Option(help="With --from, the matrices that get adapters, such as q,v (default: all of attention and dense MLPs).")
    ] = "",
    freeze: Annotated[
        list[str] | None,
        typer.Option(help="With --from, weights to freeze: embedding, head, blocks.0-11, 'blocks.*.experts_*' (default: embedding and head)."),
    ] = None,
    tokens: Annotated[str, typer.Option(help="Number of tokens to train on, such as 300e9 or 300B. With --from it may be missing.")] = "",
    gpus: Annotated[int, typer.Option(help="How many GPUs.")] = 8,
    gpu: Annotated[str, typer.Option(help="Kind of GPU, which sets the peak rate and the memory.")] = "h100",
    memory: Annotated[float | None, typer.Option(help="Memory of one GPU, in GB (default: that of the kind of GPU).")] = None,
    mfu: Annotated[float | None, typer.Option(help="Share of the peak rate reached (default: 0.4 on one node, else that of published runs).")] = None,
    network: Annotated[
        float | None, typer.Option(help="Network rate of one GPU between nodes, in GB/s (default: the GPU's usual card; 50 GB/s are 400 Gb/s).")
    ] = None,
    expert_parallel: Annotated[
        int, typer.Option(help="How many GPUs share the experts. This factory's trainer cannot do that; the plan is for another trainer.")
    ] = 1,
    fp8: Annotated[bool, typer.Option("--fp8", help="Multiply the layers' matrices in fp8, as with 'precision: fp8' in a recipe.")] = False,
    price: Annotated[float | None, typer.Option(help="Price of one GPU for an hour, in dollars (default: 2).")] = None,
    context: Annotated[int | None, typer.Option(help="Context length in tokens, with --params or --from (default: 4096).")] = None,
    vocab: Annotated[
        int | None, typer.Option(help="Size of the vocabulary, with --params (default: 32000, or 128256 from 2B parameters on).")
    ] = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Plan a training run: memory by part, parallelism, batch, steps, days and cost, each with its formula and source.

    'factory plan --from SmolLM2-135M/' says in which ways a public model's training can continue on the GPUs and on this machine: memory by
    part, the longest context, and what to write into the recipe. With --tokens it plans a run, too.
    """
    from trainer.contract.errors import TrainerError
    from trainer.contract.plan.gpus import GPUS
    from trainer.contract.plan.plan_report import convert_plan_to_json as plan_json
    from trainer.contract.plan.run_plan import PRICE, PlanRequest, SizingError, count_active_parameters, plan_run
    from trainer.contract.plan.sizing import GB, choose_model_shape

    if bool(params) + bool(recipe) + bool(source) != 1:
        raise InputError("plan.no_model", "Give exactly one of --params 8e9, --recipe NAME and --from FOLDER.")
    for flag, asked_for in (("--lora", lora is not None), ("--targets", targets), ("--freeze", freeze)):
        if asked_for and not source:
            raise InputError("plan.only_with_from", "{flag}: Use {flag} only with --from.", flag=flag)
    if gpu not in GPUS:
        raise InputError(
            "plan.no_gpu", "--gpu: no kind of GPU is named {gpu!r}{nearest}", gpu=gpu, nearest=suggest_name(gpu, GPUS)
        )
    given = {
        "--gpus": gpus,
        "--expert-parallel": expert_parallel,
        "--network": network,
        "--memory": memory,
        "--mfu": mfu,
        "--price": price,
        "--context": context,
        "--vocab": vocab,
        "--lora": lora,
    }
    for flag, value in given.items():
        if value is not None and not value > 0:
            raise _not_above_zero(flag, f"{value:g}")
        if recipe and value is not None and flag in ("--context", "--vocab"):
            raise _with_params_only(flag, "the recipe")
        if source and value is not None and flag == "--vocab":
            raise _with_params_only(flag, "config.json")
    if mfu is not None and mfu > 1:
        raise InputError(
            "plan.mfu_above_one", "--mfu: {mfu:g} is too large. The largest value is 1, the full peak rate.", mfu=mfu
        )
    if context is not None and context < 8:
        raise InputError(
            "plan.short_context",
            "--context: {context} is too small. The smallest context is 8 tokens.",
            context=context,
        )
    chosen_gpu = GPUS[gpu] if memory is None else replace(GPUS[gpu], memory=memory * GB)
    wanted = _number("--tokens", tokens) if tokens or not source else 0.0
    size = _number("--params", params) if params else 0.0
    continued: Continued | None = None
    try:
        asked = _recipe(recipe) if recipe else None
        if source:
            devices = [describe_gpus(gpus, gpu, chosen_gpu.memory), describe_this_machine()]
            chosen_targets = [name.strip() for name in targets.split(",") if name.strip()] or None
            rank = lora or 16
            while continued is None:
                try:
                    continued = plan_continuing(source, context, devices, rank, freeze or (), chosen_targets)
                except RecipeError as error:
                    if lora or error.code != "plan.rank_too_large" or rank == 1:
                        raise
                    rank //= 2  # of the default, for a model with small matrices
            shape: ModelSpec = continued.public.spec
        elif asked:
            shape = asked.model
        else:
            shape = choose_model_shape(size, vocab or (128_256 if size >= LARGE else 32_000), context or 4096)
        if expert_parallel > 1 and (
            shape.experts is None or gpus % expert_parallel or shape.experts.count % expert_parallel
        ):
            if shape.experts is None:
                raise InputError(
                    "plan.no_experts", "--expert-parallel {ways}: the model has no experts.", ways=expert_parallel
                )
            raise InputError(
                "plan.experts_not_divided",
                "--expert-parallel {ways} must divide both the number of GPUs ({gpus}) and the number of experts ({experts}).",
                ways=expert_parallel,
                gpus=gpus,
                experts=shape.experts.count,
            )
        if continued and not wanted:
            if as_json:
                print_json(continued.to_json())
            else:
                continued.show()
            return
        ask = PlanRequest(
            shape, wanted, gpus, chosen_gpu, logit_rows=count_logit_rows(), mfu=mfu, price=price or PRICE,
            network=network and network * GB, expert=expert_parallel, fp8=fp8,
            public_model=continued.public if continued else None,
        )  # fmt: skip
        if asked:
            rounded = asked.precision != "fp32"  # on every GPU of the table, auto is bf16
            ask = replace(
                ask,
                batch=asked.batch,
                optimizer=asked.optimizer.name,
                itemsize=2 if rounded else 4,
                fp8=fp8 or asked.precision == "fp8" and shape.experts is None,  # routed experts multiply in bf16
                replicas=asked.parallel.replicas,
                multi_token=bool(asked.trained_multi_token_layers),
            )
        if wanted < count_active_parameters(ask.model) and not continued:
            raise InputError(
                "plan.few_tokens",
                "--tokens: {tokens:,.0f} tokens for {parameters:,} parameters are too few. The scaling rules need at least one token per parameter.",
                tokens=wanted,
                parameters=count_active_parameters(ask.model),
            )
        found = plan_run(ask)
    except SizingError as error:
        raise InputError("plan.nothing_fits", "--gpus {gpus}: {reason}", gpus=gpus, reason=error) from error
    except TrainerError as error:
        flag = "--recipe" if recipe else "--from" if source else "--params"
        raise ConfigError("plan.bad_model", "{flag}: {reason}", flag=flag, reason=error) from error
    if as_json:
        print_json(plan_json(found) | ({"continuing": continued.to_json()} if continued else {}))
        return
    if continued:
        continued.show()
    _show(found)


def _number(flag: str, text: str) -> float:
    """Return the number that a text such as '8e9' or '8B' means. Raises: InputError with the option's name."""
    word = text.strip().replace("_", "").replace(",", "").upper()
    factor = SUFFIXES.get(word[-1:], 1.0)
    try:
        value = float(word[:-1] if word[-1:] in SUFFIXES else word) * factor
    except ValueError:
        value = math.nan
    if math.isnan(value):
        if not text:
            raise InputError("plan.no_number", "{flag} is missing. Write the number as 8e9 or 8B.", flag=flag)
        raise InputError(
            "plan.not_a_number",
            "{flag}: {text!r} is not a number. Write the number as 8e9 or 8B.",
            flag=flag,
            text=text,
        )
    if value <= 0:
        raise _not_above_zero(flag, text)
    if value > 1e18:
        raise InputError(
            "plan.out_of_range",
            "{flag}: {text} is too large for the scaling rules, whose range ends at 1e18.",
            flag=flag,
            text=text,
        )
    return value


def _not_above_zero(flag: str, text: str) -> InputError:
    return InputError("plan.not_above_zero", "{flag}: {text} is not above zero.", flag=flag, text=text)


def _with_params_only(flag: str, source: str) -> InputError:
    return InputError(
        "plan.known_already",
        "{flag}: {source} already gives this value. Use {flag} only with --params.",
        flag=flag,
        source=source,
    )


def _recipe(name: str) -> Recipe:
    """Return the recipe with this name, or in this file. Raises: InputError, TrainerError."""
    from trainer.contract.recipe import Recipe

    folder = find_checkout_root() / "policies" / "recipes"
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = folder / f"{name}.yaml"
        if not path.exists():
            raise InputError(
                "plan.no_recipe",
                "--recipe: no recipe is named {name!r}{nearest}",
                name=name,
                nearest=suggest_name(name, {p.stem for p in folder.glob("*.yaml")}),
            )
    return Recipe.load(path)


def _show(plan: RunPlan) -> None:
    from rich import box
    from rich.table import Table

    from factory.core.console import make_table_console
    from trainer.contract.plan.plan_report import make_plan_lines, make_plan_warnings
    from trainer.contract.plan.sizing import GB, sum_bytes

    console = make_table_console()

    def table(title: str) -> Table:
        made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, expand=True)
        made.add_column("", no_wrap=True)
        made.add_column("", justify="right", no_wrap=True)
        made.add_column("formula", ratio=3)
        made.add_column("source", ratio=2, style="dim")
        return made

    run = table("the run")
    for line in make_plan_lines(plan):
        run.add_row(line.name, line.text, line.formula, line.source)
    there = plan.ask.gpu.memory
    memory = table(Message("plan.memory_title", "memory of one GPU with {gigabytes:g} GB", gigabytes=there / GB))
    for part in plan.memory:
        memory.add_row(part.name, f"{part.bytes / GB:.2f} GB", part.formula, part.source)
    whole = sum_bytes(plan.memory)
    memory.add_section()
    memory.add_row(
        "in all",
        f"{whole / GB:.2f} GB",
        Message(
            "plan.memory_left",
            "all parts use {share:.0%} of {total:g} GB and leave {left:.2f} GB free",
            share=whole / there,
            total=there / GB,
            left=(there - whole) / GB,
        ),
        "",
    )
    console.print(run)
    console.print(memory)
    for remark in make_plan_warnings(plan):
        console.print(f"  · {remark}", markup=False, soft_wrap=True)
