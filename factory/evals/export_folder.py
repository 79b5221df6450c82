"""Reads an export folder as hostile input. Files and tensors are checked before memory is allocated.

Weights are read only from safetensors, in one file or in shards, never from a pickle, and no remote code is run. Every error is an ``ExportError``
that names file and key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError, safe_open

from factory.core.errors import InputError, NoMemoryError
from factory.core.faults import is_machine_fault_unrelated_to_files
from models.adapters import FAMILIES, convert_to_native, find_family_for_config
from models.adapters.config_reader import ConfigReader, ModelFilesError
from models.adapters.family import Family
from models.spec import ModelSpec

ALLOWED_SUFFIXES = {".json", ".safetensors", ".jinja"}
# Keys that make transformers or vLLM run code from the folder or download code.
CODE_KEYS = (
    "auto_map", "custom_pipelines", "quantization_config", "trust_remote_code", "attn_implementation", "_attn_implementation",
    "experts_implementation", "_experts_implementation",
)  # fmt: skip
FLOATS = {"F32", "BF16", "F16"}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
INDEX_BYTES = 64 << 20
SHARD_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}\.safetensors")


class ExportError(InputError):
    """The export is not a plain folder of a known family of models. No code of the export was run."""


def read_config(folder: Path) -> ModelSpec:
    """Return the description of the model in config.json.

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
    return parse_config(read_json(where), where)


def parse_config(data: Mapping[str, Any], where: Path | str) -> ModelSpec:
    """Return the description in the content of a config.json, which must name its class. Raises: ExportError naming ``where`` and the key."""
    try:
        family = find_family_for_config(data, where)
        if data.get("architectures") is None:  # without it, vLLM finds no class
            raise ConfigReader(data, where).missing("architectures")
        return family.read_config(data, where)
    except ModelFilesError as error:
        raise ExportError(error.message) from error


def get_family(spec: ModelSpec) -> Family:
    """Return the family of an export's files. ``spec`` is that of ``read_config``."""
    assert spec.family is not None
    return FAMILIES[spec.family]


# -- weights -----------------------------------------------------------------------------------------------------------
class ExportWeights:
    """The open safetensors files of an export. ``names``: of all tensors. ``bytes``: of all files. A tensor is read when it is asked for."""

    def __init__(self, files: dict[Path, Any]) -> None:
        self._files = files
        self._path_of = {name: path for path, file in files.items() for name in file.keys()}  # noqa: SIM118 - not a mapping
        self.names = list(self._path_of)
        self.bytes = sum(path.stat().st_size for path in files)

    @property
    def first_file(self) -> Path:
        """Return the file that stands for all of them in a message."""
        return next(iter(self._files))

    def read_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored. Raises: ExportError."""
        path = self._path_of[name]
        with _name_unreadable_file(path):
            return self._files[path].get_tensor(name)  # type: ignore[no-any-return]

    def get_form(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return the shape and the dtype of a tensor, by safetensors' name, without reading it. Raises: ExportError."""
        path = self._path_of[name]
        with _name_unreadable_file(path):
            part = self._files[path].get_slice(name)
            return tuple(part.get_shape()), part.get_dtype()

    def check_tensors(self, spec: ModelSpec) -> None:
        """Check that the files hold exactly the tensors that config.json requires, as floats. Raises: ExportError."""
        # Before any list of tensors is made: a few bytes of config.json can ask for billions of weights.
        if 2 * spec.parameters > self.bytes:
            raise ExportError(
                "export_folder.too_small", "{file}: {bytes:,} bytes are too few for the {weights:,} weights that config.json requires",
                file=self.first_file, bytes=self.bytes, weights=spec.parameters,
            )  # fmt: skip
        expected, names = list_file_shapes(spec), set(self.names)
        if missing := sorted(set(expected) - names):
            raise ExportError(
                "export_folder.missing_tensors", "{file}: {count:,|tensor that config.json requires is|tensors that config.json requires are} "
                                                 "missing. First: {first}",
                file=self.first_file, count=len(missing), first=missing[0][:80],
            )  # fmt: skip
        # A tensor without elements is nothing: transformers writes some for a model without shared experts.
        if extra := sorted(name for name in names - set(expected) if 0 not in self.get_form(name)[0]):
            raise ExportError(
                "export_folder.extra_tensors", "{file}: {count:,|tensor does|tensors do} not belong to the model that config.json describes. "
                                               "First: {first}",
                file=self._path_of[extra[0]], count=len(extra), first=extra[0][:80],
            )  # fmt: skip
        for name, shape in expected.items():
            found, dtype = self.get_form(name)
            if found != shape or dtype not in FLOATS:
                raise ExportError(
                    "export_folder.other_tensor", "{file}: tensor {tensor}: expected floats of shape [{shape}], got {given_type} [{given}]",
                    file=self._path_of[name], tensor=name, shape=list(shape), given_type=dtype, given=list(found),
                )  # fmt: skip


def list_file_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of exactly the tensors that the files of an export must hold."""
    return {name: mapping.shape for mapping in get_family(spec).list_mappings(spec) for name in mapping.theirs}


@contextmanager
def open_weights(folder: Path) -> Iterator[ExportWeights]:
    """Open model.safetensors, or the shards that model.safetensors.index.json names. Raises: ExportError."""
    shards = _read_index(folder)
    paths = [folder / name for name in sorted(set(shards.values()))] if shards is not None else [folder / WEIGHTS]
    if other := sorted(set(folder.glob("*.safetensors")) - set(paths)):
        raise ExportError(
            "export_folder.extra_shard",
            "{file} is not among the files of the model's weights ({expected}). A server could read it",
            file=other[0],
            expected=INDEX if shards is not None else WEIGHTS,
        )
    files: dict[Path, Any] = {}
    with ExitStack() as stack:
        for path in paths:
            with _name_unreadable_file(path):
                stack.enter_context(open(path, "rb"))  # raises with the reason; safe_open gives none
                files[path] = stack.enter_context(safe_open(path, framework="pt"))
        if shards is not None:
            held = {name: path.name for path, file in files.items() for name in file.keys()}  # noqa: SIM118
            count = sum(len(file.keys()) for file in files.values())
            wrong = sorted(name for name in held.keys() | shards.keys() if held.get(name) != shards.get(name))
            if wrong or count != len(held):
                raise ExportError(
                    "export_folder.other_index", "{file} does not name each tensor with the one file that holds it. First: {first}",
                    file=folder / INDEX, first=wrong[0][:80] if wrong else "?",
                )  # fmt: skip
        yield ExportWeights(files)


def _read_index(folder: Path) -> dict[str, str] | None:
    """Return tensor → name of its file; None without an index. Raises: ExportError."""
    path = folder / INDEX
    if not path.exists():
        return None
    found = read_json(path, INDEX_BYTES).get("weight_map")
    if (
        not isinstance(found, dict)
        or not found
        or not all(isinstance(name, str) and SHARD_NAME.fullmatch(name) for name in found.values())
    ):
        raise ExportError(
            "export_folder.odd_index",
            "{file}: weight_map must be a mapping of each tensor to the plain name of a safetensors file of the same folder",
            file=path,
        )
    return found


@contextmanager
def _name_unreadable_file(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        if is_machine_fault_unrelated_to_files(error):
            raise
        raise ExportError(
            "export_folder.unreadable", "{file} cannot be read: {reason}", file=path, reason=str(error)
        ) from error


def read_weights(folder: Path, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Return all weights as fp32, by their native names (``models.tensors``).

    Raises: ExportError for a tensor that is missing, extra, of another shape or not finite; NoMemoryError.
    """
    broken: list[str] = []
    with open_weights(folder) as files:
        files.check_tensors(spec)
        needed, available = 4 * spec.parameters, psutil.virtual_memory().available
        if needed > available // 2:
            raise NoMemoryError(
                "export_folder.no_memory", "{file}: the weights need {needed:,} MiB of memory, more than half of the free {free:,} MiB",
                file=files.first_file, needed=needed >> 20, free=available >> 20,
            )  # fmt: skip

        def read(name: str) -> torch.Tensor:
            # Copy: otherwise a tensor of the file's own type is mapped from the file and changes with it.
            tensor = files.read_tensor(name).to(torch.float32, copy=True)
            if not torch.isfinite(tensor).all():
                broken.append(name)
            return tensor

        weights = dict(convert_to_native(spec, get_family(spec), read))
        if broken:
            raise ExportError(
                "export_folder.not_finite", "{file}: {count:,|tensor holds|tensors hold} NaN or infinity. First: {first}",
                file=files.first_file, count=len(broken), first=broken[0],
            )  # fmt: skip
    return weights


def read_json(path: Path, most_bytes: int = 1 << 20) -> dict[str, Any]:
    """Return the JSON object in a file of at most 1 MiB, or of at most ``most_bytes``. Raises: ExportError."""
    try:
        if path.stat().st_size > most_bytes:
            raise ExportError(
                "export_folder.large_json", "{file} is larger than {limit} MiB", file=path, limit=most_bytes >> 20
            )
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
