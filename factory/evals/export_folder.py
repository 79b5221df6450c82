"""Reads an export folder as hostile input. Files and tensors are checked before memory is allocated.

Weights are read only from safetensors, in one file or in shards, never from a pickle, and no remote code is run. Every error is an ``ExportError``
that names file and key.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from factory.core.errors import InputError, NoMemoryError
from factory.core.faults import is_machine_fault_unrelated_to_files
from models.adapters import FAMILIES, convert_to_native, find_family_for_config
from models.adapters.config_reader import ConfigReader, ModelFilesError
from models.adapters.family import Family
from models.files.model_folder import ONE_FILE, read_tensor_headers
from models.files.safetensors_file import TORCH_NAMES, StoredTensor, read_tensor
from models.spec import ModelSpec
from models.tensors import is_multi_token

ALLOWED_SUFFIXES = {".json", ".safetensors", ".jinja"}
# Keys that make transformers or vLLM run code from the folder or download code.
CODE_KEYS = (
    "auto_map", "custom_pipelines", "quantization_config", "trust_remote_code", "attn_implementation", "_attn_implementation",
    "experts_implementation", "_experts_implementation",
)  # fmt: skip
FLOATS = {"F32", "BF16", "F16"}


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
        reader = ConfigReader(data, where)
        if data.get("architectures") is None:  # without it, vLLM finds no class
            raise reader.missing("architectures")
        return family.read_config(data, where)
    except ModelFilesError as error:
        raise ExportError(error.message) from error


def get_family(spec: ModelSpec) -> Family:
    """Return the family of an export's files. ``spec`` is that of ``read_config``."""
    assert spec.family is not None
    return FAMILIES[spec.family]


# -- weights -----------------------------------------------------------------------------------------------------------
class ExportWeights:
    """The tensors of an export by name, in one file or in several. Headers are read and checked at once, a tensor when it is asked for.

    Raises: ExportError for a file that is missing or damaged, or that no index names.
    """

    def __init__(self, folder: Path) -> None:
        with _name_unreadable_file(folder):
            self.tensors: Mapping[str, StoredTensor] = read_tensor_headers(folder)
        files = {one.file for one in self.tensors.values()}
        if unnamed := sorted(set(folder.glob("*.safetensors")) - files - {folder / ONE_FILE}):
            raise ExportError(
                "export_folder.unnamed_weights",
                "{file} holds no tensor of the model, but a server could read it. Remove it",
                file=unnamed[0],
            )
        self.folder = folder
        self.bytes = sum(file.stat().st_size for file in files)

    def read_tensor(self, name: str, dtype: torch.dtype | None = torch.float32) -> torch.Tensor:
        """Return a tensor; ``dtype`` None: as it is stored. Raises: ExportError for a tensor that is not finite, or a file that changed."""
        stored = self.tensors[name]
        with _name_unreadable_file(stored.file):
            return read_tensor(name, stored, dtype or getattr(torch, TORCH_NAMES.get(stored.dtype, "float32")))

    def check_tensors(self, spec: ModelSpec) -> None:
        """Check that the files hold exactly the tensors that config.json requires, as floats. Raises: ExportError."""
        # Before any list of tensors is made: a few bytes of config.json can ask for billions of weights.
        if 2 * spec.parameters > self.bytes:
            raise ExportError(
                "export_folder.too_small", "{folder}: {bytes:,} bytes are too few for the {weights:,} weights that config.json requires",
                folder=self.folder, bytes=self.bytes, weights=spec.parameters,
            )  # fmt: skip
        expected, found = list_file_shapes(spec), self.tensors
        if missing := sorted(expected.keys() - found.keys()):
            raise ExportError(
                "export_folder.missing_tensors", "{folder}: {count:,|tensor that config.json requires is|tensors that config.json requires are} "
                                                 "missing. First: {first}",
                folder=self.folder, count=len(missing), first=missing[0][:80],
            )  # fmt: skip
        # A tensor without elements is nothing: transformers writes some for a model without shared experts.
        if extra := sorted(name for name in found.keys() - expected.keys() if found[name].values):
            raise ExportError(
                "export_folder.extra_tensors", "{file}: {count:,|tensor does|tensors do} not belong to the model that config.json describes. "
                                               "First: {first}",
                file=found[extra[0]].file, count=len(extra), first=extra[0][:80],
            )  # fmt: skip
        for name, shape in expected.items():
            if found[name].shape != shape or found[name].dtype not in FLOATS:
                raise ExportError(
                    "export_folder.other_tensor", "{file}: tensor {tensor}: expected floats of shape [{shape}], got {given_type} [{given}]",
                    file=found[name].file, tensor=name, shape=list(shape), given_type=found[name].dtype, given=list(found[name].shape),
                )  # fmt: skip


def list_file_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of exactly the tensors that the files of an export must hold."""
    return {name: mapping.shape for mapping in get_family(spec).list_mappings(spec) for name in mapping.theirs}


@contextmanager
def _name_unreadable_file(path: Path) -> Iterator[None]:
    try:
        yield
    except ModelFilesError as error:
        raise ExportError(error.message) from error
    except (OSError, ValueError) as error:
        if is_machine_fault_unrelated_to_files(error):
            raise
        raise ExportError(
            "export_folder.unreadable", "{file} cannot be read: {reason}", file=path, reason=str(error)
        ) from error


def read_weights(folder: Path, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Return the weights that compute the logits as fp32, by their native names (``models.tensors``). Each is converted as it is read. Layers for
    multi-token prediction are read too, but not returned.

    Raises: ExportError for a tensor that is missing, extra, of another shape or not finite, or a copy that differs; NoMemoryError.
    """
    files = ExportWeights(folder)
    files.check_tensors(spec)
    needed, available = 4 * spec.without_multi_token.parameters, psutil.virtual_memory().available
    if needed > available // 2:
        raise NoMemoryError(
            "export_folder.no_memory", "{folder}: the weights need {needed:,} MiB of memory, more than half of the free {free:,} MiB",
            folder=folder, needed=needed >> 20, free=available >> 20,
        )  # fmt: skip
    family = get_family(spec)
    found = {
        name: tensor for name, tensor in convert_to_native(spec, family, files.read_tensor) if not is_multi_token(name)
    }
    for mapping in family.list_mappings(spec):
        if mapping.is_copy and any(
            not torch.equal(tensor, found[name]) for name, tensor in mapping.to_native(files.read_tensor)
        ):
            raise ExportError(
                "export_folder.other_copy",
                "{file}: tensor {tensor} differs from the model's own, of which it must be a copy",
                file=files.tensors[mapping.theirs[0]].file,
                tensor=mapping.theirs[0],
            )
    return found


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
