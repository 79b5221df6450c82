"""The part of ``factory plan --from`` that says what fits when a public model's training continues: on the given GPUs and on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from factory.core.errors import InputError
from factory.core.workspace import find_checkout_root
from kernels.contract.message import Message

if TYPE_CHECKING:
    from rich.table import Table

    from trainer.contract.plan.continuing import Devices, Fit
    from trainer.contract.plan.hf_config import PublicModel
    from trainer.contract.plan.weight_files import WeightFiles


CONFIG = "config.json"  # the weights stand beside a file with this name
TUNED = {"cpu": "native", "cuda": "triton"}
IN_PLACE = {"native": 512, "triton": 8192}  # tokens of a chunk of logits, at most, of heads that overwrite them


@dataclass(frozen=True)
class Continued:
    """What fits to continue a public model. ``files``: its weights; None: only its config.json was given, or its folder has no weights."""

    public: PublicModel
    files: WeightFiles | None
    fits: list[Fit]

    def list_remarks(self) -> list[Message]:
        from trainer.contract.plan.continuing import describe_missing_keys
        from trainer.contract.plan.plan_report import describe_reading

        found = [describe_reading(self.public), *describe_missing_keys(self.fits)]
        if self.files is None:
            found.append(
                Message(
                    "continuing_plan.no_weights",
                    "There are no safetensors files beside config.json, so the number of parameters was not compared with weights.",
                )
            )
        return found

    def to_json(self) -> dict[str, Any]:
        from trainer.contract.plan.continuing import convert_fits_to_json

        spec, files = self.public.spec, self.files
        return {
            "model": spec.model_dump() | {"parameters": spec.parameters},
            "family": self.public.family.name if self.public.family else None,
            "files": {"files": files.files, "tensors": files.tensors, "bytes": files.bytes} if files else None,
            "longest_context": self.public.longest_context,
            "fits": convert_fits_to_json(self.public, self.fits),
            "remarks": self.list_remarks(),
        }

    def show(self) -> None:
        from factory.core.console import make_table_console
        from trainer.contract.plan.sizing import GB

        console = make_table_console()
        spec, files = self.public.spec, self.files
        console.print(
            Message(
                "continuing_plan.continuing",
                "{parameters:,} parameters in {layers} layers of width {width:,}, made for {longest:,} tokens of context",
                parameters=spec.parameters,
                layers=spec.layers,
                width=spec.d_model,
                longest=self.public.longest_context,
            )
        )
        if files:
            console.print(
                Message(
                    "continuing_plan.weights_agree",
                    "The safetensors headers agree: {tensors:,} tensors, {size:,.2f} GB in {files:,|file|files}.",
                    tensors=files.tensors,
                    size=files.bytes / GB,
                    files=files.files,
                )
            )
        for devices in dict.fromkeys(fit.devices for fit in self.fits):
            fits = [fit for fit in self.fits if fit.devices == devices]
            console.print(_make_fits_table(fits, spec.context))
            for fit in fits:
                if fit.layout is not None:
                    console.print(
                        Message(
                            "continuing_plan.write_recipe",
                            "  {way}: write into the recipe {keys}",
                            way=fit.way.name,
                            keys=_write_inline(fit.recipe),
                        ),
                        markup=False,
                        soft_wrap=True,
                    )
        for remark in self.list_remarks():
            console.print(f"  · {remark}", markup=False, soft_wrap=True)


def plan_continuing(
    source: Path,
    context: int | None,
    devices: list[Devices],
    rank: int,
    frozen: Sequence[str],
    targets: list[str] | None,
) -> Continued:
    """What fits. ``source``: a model's folder, its config.json, or a .gguf file.

    Raises: InputError for a context that the model does not allow; TrainerError or ImportRefusedError.
    """
    from factory.training.gguf_source import find_place, is_gguf, open_gguf_config
    from trainer.contract.plan.continuing import find_fit, list_training_ways
    from trainer.contract.plan.hf_config import read_config
    from trainer.contract.plan.weight_files import compare_weights, drop_absent_layers

    source = find_place(source)
    with open_gguf_config(source) if is_gguf(source) else nullcontext(source) as folder:
        weights = source.parent if source.name == CONFIG else source
        public = drop_absent_layers(read_config(folder, context), weights)
    if context is not None and context > public.longest_context:
        raise InputError(
            "continuing_plan.context_beyond_model",
            "--context: {context:,} is more than the {longest:,} positions that {model} allows. Give at most {longest}, or leave the option out.",
            context=context,
            longest=public.longest_context,
            model=source,
        )
    files = compare_weights(public, weights) if weights.is_dir() else None
    ways = list_training_ways(public.spec, rank, frozen, targets)
    fits = [find_fit(public.spec, way, place, public.longest_context) for place in devices for way in ways]
    return Continued(public, files, fits)


def describe_gpus(count: int, kind: str, memory: float) -> Devices:
    from trainer.contract.plan.continuing import Devices
    from trainer.contract.plan.sizing import GB

    name = Message(
        "continuing_plan.on_gpus",
        "{count} × {kind} with {gigabytes:g} GB each, in bf16",
        count=count,
        kind=kind,
        gigabytes=memory / GB,
    )
    return Devices(name, count, memory, 2, *describe_loss_head("cuda"))


def describe_this_machine() -> Devices:
    from factory.presets.presets import Hardware
    from trainer.contract.plan.continuing import Devices
    from trainer.contract.plan.sizing import GB

    machine = Hardware.of_this_machine()
    if machine.gpus:
        least = min(machine.gpus)
        name = Message(
            "continuing_plan.on_own_gpus", "this machine: {count:,|GPU|GPUs} with {gigabytes:.0f} GB, in bf16", count=len(machine.gpus),
            gigabytes=least / GB,
        )  # fmt: skip
        return Devices(name, len(machine.gpus), least, 2, *describe_loss_head("cuda"))
    name = Message(
        "continuing_plan.on_cpu",
        "this machine: its CPU with {gigabytes:.0f} GB, in fp32",
        gigabytes=machine.memory / GB,
    )
    return Devices(name, 1, machine.memory, 4, *describe_loss_head("cpu"))


def _make_fits_table(fits: Sequence[Fit], context: int) -> Table:
    from rich import box
    from rich.table import Table

    from trainer.contract.plan.sizing import GB, sum_bytes

    table = Table(title=str(fits[0].devices.name), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column(Message("continuing_plan.gigabytes", "GB"))
    table.add_column(Message("continuing_plan.trained", "trained"), justify="right", no_wrap=True)
    for part in fits[0].memory:
        table.add_column(part.name, justify="right")
    table.add_column(Message("continuing_plan.in_all", "in all"), justify="right")
    table.add_column(Message("continuing_plan.longest", "longest context"), justify="right")
    for fit in fits:
        longest: str = (
            f"{fit.longest_context:,}" if fit.longest_context else Message("continuing_plan.fits_not", "does not fit")
        )
        if fit.layout is None and fit.longest_context:
            longest = Message(
                "continuing_plan.fits_shorter",
                "{longest:,} ({context:,} does not fit)",
                longest=fit.longest_context,
                context=context,
            )
        table.add_row(
            str(fit.way.name),
            f"{fit.way.trained.parameters / 1e6:,.1f} M",
            *(f"{part.bytes / GB:.2f}" for part in fit.memory),
            f"{sum_bytes(fit.memory) / GB:.2f}",
            longest,
        )
    return table


def _write_inline(keys: Mapping[str, Any]) -> str:
    """The keys of a recipe as one line of YAML for each section, separated by semicolons."""
    import yaml

    return "; ".join(
        yaml.safe_dump(
            {key: dict(value) if isinstance(value, Mapping) else value}, default_flow_style=None, width=1000
        ).strip()
        for key, value in keys.items()
    )


def count_logit_rows(device: str = "cuda") -> int | None:
    """Return how many tokens have logits at one time with the kernels chosen for a device; None for all tokens of a micro-batch."""
    import yaml

    policy = yaml.safe_load((find_checkout_root() / "policies" / "kernels.yaml").read_text("utf-8"))
    chosen = policy.get(device, {}).get("linear_cross_entropy", "reference")
    return None if chosen in ("auto", "reference", "compiled") else 1024


def describe_loss_head(device: str) -> tuple[int | None, bool]:
    """``logit_rows`` and ``in_place`` of ``estimate_memory_parts``, for the loss head that is chosen for a device. ``auto`` counts as what tuning
    chose on every machine so far.

    >>> describe_loss_head("cpu")
    (512, True)
    """
    import yaml

    policy = yaml.safe_load((find_checkout_root() / "policies" / "kernels.yaml").read_text("utf-8"))
    chosen = str(policy.get(device, {}).get("linear_cross_entropy", "reference")).partition(",")[0]
    chosen = TUNED[device] if chosen == "auto" else chosen
    if chosen in IN_PLACE:
        return IN_PLACE[chosen], True
    return (1024 if chosen.startswith("chunked") else None), False
