"""Reads an export folder as hostile input. Files and tensors are checked before memory is allocated.

Weights are read only from safetensors, never from a pickle, and no remote code is run. Every error is an ``ExportError`` that names file and key.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError, safe_open

from factory.core.errors import NoMemoryError
from factory.core.faults import is_machine_fault_unrelated_to_files
from factory.evals.export_config import ExportConfig, ExportError, parse_config

ALLOWED_SUFFIXES = {".json", ".safetensors", ".jinja"}
# Keys that make transformers or vLLM run code from the folder or download code.
CODE_KEYS = ("auto_map", "custom_pipelines", "quantization_config", "trust_remote_code")
FLOATS = {"F32", "BF16", "F16"}


def read_config(folder: Path) -> ExportConfig:
    """Return the parsed config.json.

    Raises: ExportError for a file that is not allowed in an export, or for an unsupported config.json.
    """
    if not folder.is_dir():
        raise ExportError("export_folder.no_folder", "The export folder {folder} does not exist", folder=folder)
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not path.is_file():
            raise ExportError(
                "export_folder.special_file",
                "{file} is not a plain file. An export may contain only plain files",
                file=path,
            )
        if path.suffix not in ALLOWED_SUFFIXES:
            raise ExportError(
                "export_folder.other_suffix", "{file}: an export may contain only files with these suffixes: {suffixes}",
                file=path, suffixes=ALLOWED_SUFFIXES,
            )  # fmt: skip
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        if (folder / name).exists():
            found = [key for key in CODE_KEYS if key in read_json(folder / name)]
            if found:
                raise ExportError(
                    "export_folder.asks_for_code", "{file}: key {key} is not allowed. An export must not load code and must not be quantised",
                    file=folder / name, key=found[0],
                )  # fmt: skip
    where = folder / "config.json"
    data = read_json(where)
    return parse_config(data, where)


def check_tensors(path: Path, file: Any, config: ExportConfig) -> None:
    """Check that an open safetensors file holds exactly the tensors that config.json requires, as floats. Raises: ExportError."""
    expected, names = config.list_tensor_shapes(), set(file.keys())
    if missing := sorted(set(expected) - names):
        raise ExportError(
            "export_folder.missing_tensors", "{file}: {count:,|tensor that config.json requires is|tensors that config.json requires are} "
                                             "missing. First: {first}",
            file=path, count=len(missing), first=missing[0][:80],
        )  # fmt: skip
    if extra := sorted(names - set(expected)):
        raise ExportError(
            "export_folder.extra_tensors", "{file}: {count:,|tensor does|tensors do} not belong to the model that config.json describes. "
                                           "First: {first}",
            file=path, count=len(extra), first=extra[0][:80],
        )  # fmt: skip
    for name, shape in expected.items():
        part = file.get_slice(name)
        if tuple(part.get_shape()) != shape or part.get_dtype() not in FLOATS:
            raise ExportError(
                "export_folder.other_tensor", "{file}: tensor {tensor}: expected floats of shape [{shape}], got {given_type} [{given}]",
                file=path, tensor=name, shape=list(shape), given_type=part.get_dtype(), given=list(part.get_shape()),
            )  # fmt: skip


def read_weights(folder: Path, config: ExportConfig) -> dict[str, torch.Tensor]:
    """Return all weights as fp32. Raises: ExportError for a tensor that is missing, extra, of another shape or not finite; NoMemoryError."""
    path = folder / "model.safetensors"
    expected = config.list_tensor_shapes()
    count = sum(math.prod(shape) for shape in expected.values())
    held = path.stat().st_size if path.is_file() else 0
    if 2 * count > held:
        raise ExportError(
            "export_folder.too_small", "{file}: {bytes:,} bytes are too few for the {weights:,} weights that config.json requires",
            file=path, bytes=held, weights=count,
        )  # fmt: skip
    needed = 4 * count
    available = psutil.virtual_memory().available
    if needed > available // 2:
        raise NoMemoryError(
            "export_folder.no_memory", "{file}: the weights need {needed:,} MiB of memory, more than half of the free {free:,} MiB",
            file=path, needed=needed >> 20, free=available >> 20,
        )  # fmt: skip
    weights: dict[str, torch.Tensor] = {}
    try:
        with (
            open(path, "rb"),  # raises with the reason; safe_open gives none
            safe_open(path, framework="pt") as file,
        ):
            check_tensors(path, file, config)
            for name in expected:
                # Copy: otherwise a tensor of the file's own type is mapped from the file and changes with it.
                weights[name] = file.get_tensor(name).to(torch.float32, copy=True)
    except (SafetensorError, OSError, ValueError) as error:
        if is_machine_fault_unrelated_to_files(error):
            raise
        raise make_unreadable_weights_error(path, error) from error
    broken = [name for name, weight in weights.items() if not torch.isfinite(weight).all()]
    if broken:
        raise ExportError(
            "export_folder.not_finite", "{file}: {count:,|tensor holds|tensors hold} NaN or infinity. First: {first}",
            file=path, count=len(broken), first=broken[0],
        )  # fmt: skip
    return weights


def make_unreadable_weights_error(path: Path, error: Exception) -> ExportError:
    """Return the error for a weights file that cannot be read."""
    return ExportError("export_folder.unreadable", "{file} cannot be read: {reason}", file=path, reason=str(error))


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of at most 1 MiB. Raises: ExportError."""
    try:
        if path.stat().st_size > 1 << 20:
            raise ExportError("export_folder.large_json", "{file} is larger than 1 MiB", file=path)
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if is_machine_fault_unrelated_to_files(error):
            raise
        raise ExportError(
            "export_folder.no_json", "{file} cannot be read as JSON: {reason}", file=path, reason=str(error)
        ) from error
    if not isinstance(data, dict):
        raise ExportError("export_folder.no_object", "{file}: expected a JSON object", file=path)
    return data
