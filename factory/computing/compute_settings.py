"""Decides how a segment is computed (precision, kernels, machine). The decision is made once, when the segment is planned.

The decision is stored in the column ``computing`` of the segment's row. It holds until the segment ends, on any machine. If it differs from the
parent segment's decision, the segment needs a certificate, as after a change of the code (``factory.training.certifying``). Its content:

    {"precision": {"precision": "fp32", "asked": "auto", "probe": {"seconds": {…}, "rates": {…}}, "warning": ""},
     "kernels": {"attention": "recompute", …}, "fallback": "fail", "tuning": "…/tuning/cpu-avx2-fp32.json",
     "machine": {"name": "cpu-avx2", …}, "ranks": 1}
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from factory.computing import tuned_kernels
from factory.core import devices
from factory.core.errors import ConfigError
from factory.core.launching import count_ranks, run_python
from factory.core.workspace import Workspace, find_checkout_root
from kernels.contract.files import write_atomically
from kernels.contract.message import Message

if TYPE_CHECKING:
    from factory.ledger.rows import SegmentRow
    from trainer.contract.recipe import Recipe

Computing = dict[str, Any]


def choose_compute_settings(
    workspace: Workspace,
    recipe: Recipe,
    kernels: str,
    parent_precision: str = "",
    measured: dict[str, Any] | None = None,
) -> tuple[Recipe, Computing, list[str]]:
    """Return (the recipe with its chosen precision, the value of the column ``computing``, notes for a person).

    ``kernels``: the text of the live code's kernels.yaml. ``parent_precision``: the precision of the parent segment. ``measured``: the result of
    ``measure_precision``, if it is known already. Raises: ConfigError for a precision that the device lacks, or for an invalid tuning file.
    """
    from kernels.contract.choice import list_auto_ops, read_device_section, replace_auto
    from kernels.contract.machine import describe_this_machine

    chosen = measured or measure_precision(recipe, parent_precision)
    notes = [chosen["warning"]] if chosen["warning"] else []
    resolved = recipe.model_copy(update={"precision": chosen["precision"]})
    machine, section = describe_this_machine(), read_device_section(kernels, devices.get_device_kind())
    found = tuned_kernels.TunedKernels(None, "")
    if list_auto_ops(section):
        found = tuned_kernels.find_tuning(workspace, machine, resolved.precision, get_tuning_sizes(resolved))
        notes += [found.note] if found.note else []
    document = yaml.safe_load(kernels) or {}
    computing = {
        "precision": chosen,
        "kernels": replace_auto(section, found.choice, machine.name),
        "fallback": document.get("fallback", "") if isinstance(document, dict) else "",
        "tuning": found.source,
        "machine": machine.to_json(),
        "ranks": count_ranks(workspace),
    }
    return resolved, computing, notes


def measure_precision(recipe: Recipe, parent_precision: str = "") -> dict[str, Any]:
    """Return the result of ``trainer.contract.plan.precision.choose_precision`` as JSON. Raises: ConfigError.

    On a GPU, a separate process measures, because the factory's own process would keep GPU memory until it ends.
    """
    from trainer.contract.errors import RecipeError

    if devices.get_device_kind() == "cpu":
        import torch

        from trainer.contract.plan.precision import choose_precision

        try:
            return asdict(choose_precision(recipe, torch.device("cpu"), parent_precision))
        except RecipeError as error:
            raise ConfigError(error.message) from error
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "recipe.yaml"
        given.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
        arguments = ("-m", "trainer.contract.plan.precision", str(given), "--json", "--before", parent_precision)
        done = run_python(find_checkout_root(), *arguments)
    if done.returncode:
        raise ConfigError(
            "compute_settings.precision_not_measured", "The precisions of this machine could not be measured: {error}",
            error=(done.stderr.strip().splitlines() or ["no message"])[-1],
        )  # fmt: skip
    return dict(json.loads(done.stdout.splitlines()[-1]))


def get_tuning_sizes(recipe: Recipe) -> dict[str, int]:
    """Return the sizes for which kernels are tuned, as ``kernels.contract.bench`` takes them from a recipe."""
    return {"batch": recipe.batch.micro_sequences or recipe.batch.sequences} | recipe.model.op_sizes


def describe_compute_changes(before: SegmentRow, after: SegmentRow) -> list[str]:
    """Return the differences in precision and kernels between two segments, one line each. Rows of an older factory have only a precision."""
    old, new = before.recipe_json["precision"], after.recipe_json["precision"]
    lines = [f"precision: {old} → {new}"] if old != new else []
    if before.computing and after.computing:
        old, new = before.computing["kernels"], after.computing["kernels"]
        names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
        lines += [f"kernel of {name}: {old.get(name, 'reference')} → {new.get(name, 'reference')}" for name in names]
    return lines


def format_kernels_file(computing: Computing | None) -> str:
    """Return the text of a segment's kernels.yaml; '' if the code's own kernels.yaml is used."""
    if computing is None:
        return ""
    kept: dict[str, Any] = {computing["machine"]["device"]: computing["kernels"]}
    if computing["fallback"]:
        kept["fallback"] = computing["fallback"]
    return yaml.safe_dump(kept, sort_keys=False)


def write_kernels_file(folder: Path, computing: Computing | None) -> str | None:
    """Write a segment's kernels.yaml into a folder, and return the file's path; None if the code's own kernels.yaml is used."""
    if computing is None:
        return None
    write_atomically(folder / "kernels.yaml", format_kernels_file(computing))
    return str(folder / "kernels.yaml")


def describe_compute_settings(computing: Computing | None) -> str:
    """Return one line for a person; '' for a segment of an older factory."""
    return f"{describe_precision(computing['precision'])} on {computing['machine']['name']}" if computing else ""


def describe_precision(measured: Mapping[str, Any]) -> str:
    """Return the result of ``measure_precision`` as one line."""
    times = [f"{name} {value * 1e3:.3g} ms" for name, value in measured["probe"]["seconds"].items()]
    how = "measured" if measured["asked"] == "auto" else "named in the recipe"
    return Message(
        "compute_settings.precision", "precision {precision} ({how}). One step's matrix products, attention "
        "and loss head take, by precision: {times}",
        precision=measured["precision"], how=how, times=times,
    )  # fmt: skip
