"""An export folder read as hostile input: its files and its weights, each checked before anything is allocated.

Safetensors only, never a pickle, never remote code. Everything that is wrong with it raises ``ExportError`` with the file and the key.
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
from factory.core.faults import is_of_no_file
from factory.evals.export_config import ExportConfig, ExportError, parse_config

ALLOWED_SUFFIXES = {".json", ".safetensors", ".jinja"}
# Keys that make transformers or vLLM run code from the folder or from elsewhere.
CODE_KEYS = ("auto_map", "custom_pipelines", "quantization_config", "trust_remote_code")
FLOATS = {"F32", "BF16", "F16"}


def read_config(folder: Path) -> ExportConfig:
    """Raises: ExportError for a file that has no place in an export, or a config.json of another kind of model."""
    if not folder.is_dir():
        raise ExportError(f"{folder}: no such export folder")
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not path.is_file():
            raise ExportError(f"{path}: an export holds plain files only")
        if path.suffix not in ALLOWED_SUFFIXES:
            raise ExportError(f"{path}: {path.suffix or 'such a'} file has no place in an export")
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        if (folder / name).exists():
            found = [key for key in CODE_KEYS if key in read_json(folder / name)]
            if found:
                raise ExportError(f"{folder / name}: {found[0]}: an export may not ask for code or quantisation")
    where = folder / "config.json"
    data = read_json(where)
    return parse_config(data, where)


def check_tensors(path: Path, file: Any, config: ExportConfig) -> None:
    """Raises: ExportError when an open safetensors file does not hold the tensors that config.json asks for, as floats."""
    expected, names = config.shapes(), set(file.keys())
    if names != set(expected):
        missing, extra = sorted(set(expected) - names), sorted(names - set(expected))
        words = [
            f"{len(part)} {word} (first: {part[0][:80]})"
            for word, part in (("missing", missing), ("extra", extra))
            if part
        ]
        raise ExportError(f"{path}: tensors {' and '.join(words)}")
    for name, shape in expected.items():
        part = file.get_slice(name)
        if tuple(part.get_shape()) != shape or part.get_dtype() not in FLOATS:
            raise ExportError(
                f"{path}: {name}: expected floats of shape {shape}, got {part.get_dtype()} {tuple(part.get_shape())}"
            )


def read_weights(folder: Path, config: ExportConfig) -> dict[str, torch.Tensor]:
    """All weights as fp32. Raises: ExportError for missing, extra, misshapen or non-finite tensors; NoMemoryError."""
    path = folder / "model.safetensors"
    expected = config.shapes()
    count = sum(math.prod(shape) for shape in expected.values())
    held = path.stat().st_size if path.is_file() else 0
    if 2 * count > held:
        raise ExportError(f"{path}: {held} bytes cannot hold the {count} weights that config.json asks for")
    needed = 4 * count
    available = psutil.virtual_memory().available
    if needed > available // 2:
        raise NoMemoryError(
            f"{path}: its weights take {needed >> 20} MiB, and {available >> 20} MiB are free, half of which may be taken"
        )
    weights: dict[str, torch.Tensor] = {}
    try:
        with (
            open(path, "rb"),
            safe_open(path, framework="pt") as file,
        ):  # the library does not say why it cannot open one
            check_tensors(path, file, config)
            for name in expected:
                # A copy: a tensor of the file's own type is its pages, and changes when someone writes into the file.
                weights[name] = file.get_tensor(name).to(torch.float32, copy=True)
    except (SafetensorError, OSError, ValueError) as error:
        if is_of_no_file(error):
            raise
        raise ExportError(f"{path} cannot be read: {error}") from error
    broken = [name for name, weight in weights.items() if not torch.isfinite(weight).all()]
    if broken:
        raise ExportError(f"{path}: {len(broken)} tensors hold NaN or infinity (first: {broken[0]})")
    return weights


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of at most 1 MiB. Raises: ExportError."""
    try:
        if path.stat().st_size > 1 << 20:
            raise ExportError(f"{path}: more than 1 MiB")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if is_of_no_file(error):
            raise
        raise ExportError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ExportError(f"{path}: expected a JSON object")
    return data
