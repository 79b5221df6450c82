"""Reads the folder of a public model that is to be imported: its description, tensors, tokenizer files, licence and hashes.

A folder is untrusted. Only JSON and safetensors are parsed. ``ImportSource.read`` checks everything that can make an import fail before the factory
writes a file: each tensor by name, shape and type, and every number for NaN and infinity.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from factory.core.errors import InputError
from factory.core.faults import is_machine_fault_unrelated_to_files
from factory.ledger.imported_model import ImportedLicence
from kernels.contract.strict_yaml import read_yaml
from models.adapters import convert_to_native, find_family_for_config
from models.adapters.config_reader import ModelFilesError
from models.adapters.family import Family
from models.spec import ModelSpec

CONFIG, WEIGHTS, INDEX, TOKENIZER, TEMPLATE = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "chat_template.jinja",
)
TOKENIZER_CONFIG = "tokenizer_config.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
LARGEST_JSON = 1 << 28  # bytes of a JSON file, of which tokenizer.json is the largest
LONGEST_LICENCE = 1 << 16  # characters of a licence's text that the ledger keeps
LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "COPYING")
CARD = "README.md"
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
IDLE_TENSORS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")  # older versions of transformers stored these computed values
Advance = Callable[[float, str], object]


class ImportRefusedError(InputError):
    """A model cannot be imported. The message names the file, and what to do. Nothing was written."""


@dataclass(frozen=True)
class ImportSource:
    """A checked folder of a model. ``files``: name → SHA-256 of each file that the import depends on."""

    folder: Path
    name: str
    family: Family
    spec: ModelSpec  # context: the number of positions that the model allows
    dtype: str  # of the weights, by torch's name: of all of them, else 'float32'
    files: dict[str, str]
    licence: ImportedLicence
    weights: dict[str, Path]  # name of a tensor in the files → its file
    signatures: dict[str, tuple[int, int, int]]  # of ``files``, when they were read

    @classmethod
    def read(cls, folder: Path, advance: Advance = lambda share, note: None) -> ImportSource:
        """Read and check a folder. ``advance(share, note)`` is called as the work goes on; the shares sum to one.

        Raises: ImportRefusedError.
        """
        folder = folder.expanduser().resolve()
        if not folder.is_dir():
            raise ImportRefusedError(
                "import_source.no_folder", "--from: {folder} is not a folder or a .gguf file.", folder=folder
            )
        config = read_json_object(folder, CONFIG)
        try:
            family = find_family_for_config(config, folder / CONFIG)
            spec = family.read_config(config, folder / CONFIG)
        except ModelFilesError as error:
            raise ImportRefusedError("import_source.config", "--from: {reason}", reason=error.message) from None
        weights = _list_weights(folder)
        shards = sorted({path.name for path in weights.values()})
        names = [CONFIG, *((INDEX,) if (folder / INDEX).exists() else ()), *shards]
        names += [name for name in (TOKENIZER, TOKENIZER_CONFIG, TEMPLATE) if (folder / name).exists()]
        _check_tokenizer_files(folder, spec)
        total = sum((folder / name).stat().st_size for name in names) or 1
        signatures = {name: sign_file(folder / name) for name in names}
        files = {}
        for name in names:
            files[name] = _hash(folder / name, lambda size: advance(size / total / 2, "SHA-256"))
        source = cls(
            folder, folder.name, family, spec, "float32", files, find_licence(folder), weights, signatures
        )  # fmt: skip
        dtypes = set(source._check_tensors(advance))
        source.refuse_changed_files()
        return cls(**vars(source) | {"dtype": dtypes.pop() if len(dtypes) == 1 else "float32"})

    @cached_property
    def stored_spec(self) -> ModelSpec:
        """The description as the family's files hold it."""
        return self.family.as_stored(self.spec)

    def read_tensor(self, name: str) -> Tensor:
        """A tensor of the files by its name, on the CPU. Raises: ImportRefusedError."""
        path = self.weights[name]
        try:
            with safe_open(str(path), framework="pt") as file:
                return file.get_tensor(name)  # type: ignore[no-any-return]
        except (SafetensorError, OSError, ValueError) as error:
            raise _unreadable(path, error) from error

    def convert_tensors(self, advance: Advance = lambda share, note: None) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of the checkpoint by name, as fp32, one at a time."""
        total = sum(path.stat().st_size for path in {*self.weights.values()}) or 1
        for name, tensor in convert_to_native(self.spec, self.family, self.read_tensor):
            yield name, tensor.to(torch.float32)
            advance(tensor.numel() * tensor.element_size() / total, name)

    def refuse_changed_files(self) -> None:
        """Raises: ImportRefusedError if a file changed since it was hashed."""
        for name, signature in self.signatures.items():
            try:
                now = sign_file(self.folder / name)
            except OSError:
                now = (0, 0, 0)
            if now != signature:
                raise ImportRefusedError(
                    "import_source.changed",
                    "--from: {file} changed while the model was read. Nothing was imported. Wait until the folder is complete, then import again.",
                    file=self.folder / name,
                )

    def _check_tensors(self, advance: Advance) -> Iterator[str]:
        """Check names, shapes, types and numbers of all tensors; yields the type of each matrix."""
        expected: dict[str, tuple[int, ...]] = {}
        for mapping in self.family.list_mappings(self.spec):
            expected |= dict.fromkeys(mapping.theirs, mapping.shape)
        odd = sorted(name for name in self.weights.keys() - expected.keys() if not self._is_idle(name))
        if missing := sorted(expected.keys() - self.weights.keys()):
            raise ImportRefusedError(
                "import_source.missing_tensors",
                "--from: {folder} lacks {count:,|tensor|tensors} of the model that config.json describes. First: {first}",
                folder=self.folder, count=len(missing), first=missing[0],
            )  # fmt: skip
        if odd:
            raise ImportRefusedError(
                "import_source.extra_tensors",
                "--from: {folder} has {count:,|tensor|tensors} that the model in config.json does not have. First: {first}",
                folder=self.folder, count=len(odd), first=odd[0][:200],
            )  # fmt: skip
        total = sum(path.stat().st_size for path in {*self.weights.values()}) or 1
        for name, shape in expected.items():
            tensor = self.read_tensor(name)
            if tuple(tensor.shape) != shape or tensor.dtype not in FLOATS.values():
                raise ImportRefusedError(
                    "import_source.other_tensor",
                    "--from: {file}: tensor {tensor}: config.json needs floats of shape {shape}, but the tensor is {given} {given_shape}.",
                    file=self.weights[name], tensor=name, shape=str(list(shape)), given=str(tensor.dtype), given_shape=str(list(tensor.shape)),
                )  # fmt: skip
            if not bool(torch.isfinite(tensor).all()):
                raise ImportRefusedError(
                    "import_source.not_finite",
                    "--from: {file}: tensor {tensor} has NaN or infinity. The file is damaged, or the model's training failed.",
                    file=self.weights[name], tensor=name,
                )  # fmt: skip
            advance(tensor.numel() * tensor.element_size() / total / 2, "numbers")
            yield str(tensor.dtype).removeprefix("torch.")

    def _is_idle(self, name: str) -> bool:
        """Return whether a tensor may be left out: computed values, and a second copy of a tied embedding."""
        if IDLE_TENSORS.fullmatch(name):
            return True
        copied = name == "lm_head.weight" and self.spec.tied and "model.embed_tokens.weight" in self.weights
        return copied and torch.equal(self.read_tensor(name), self.read_tensor("model.embed_tokens.weight"))


def sign_file(path: Path) -> tuple[int, int, int]:
    """What changes when a file is written or replaced: its size, its time and its inode. Raises: OSError."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def read_json_object(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of a model's folder. Raises: ImportRefusedError."""
    path = folder / name
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise ValueError(f"the file is larger than {LARGEST_JSON >> 20} MiB")
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ImportRefusedError(
            "import_source.no_model",
            "--from: {folder} is not a model's folder: it has no {name}. Give a folder with config.json, safetensors files and tokenizer.json.",
            folder=folder, name=name,
        ) from None  # fmt: skip
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(found, dict):
        raise _unreadable(path, ValueError("it is not a JSON object"))
    return found


def find_licence(folder: Path) -> ImportedLicence:
    """The licence that a model's folder names: in the head of its card (README.md), and the text of its licence file."""
    text = ""
    for name in LICENCE_FILES:
        if (folder / name).is_file() and not (folder / name).is_symlink():
            with open(folder / name, encoding="utf-8", errors="replace") as file:
                text = file.read(LONGEST_LICENCE)
            break
    card = folder / CARD
    if card.is_file():
        with open(card, encoding="utf-8", errors="replace") as file:
            head = re.match(r"---\n(.*?)\n---", file.read(LONGEST_LICENCE), re.S)
        if head:
            try:
                said = read_yaml(head[1], CARD, ImportRefusedError)
            except ImportRefusedError:
                said = None  # a card that is not YAML names no licence
            if isinstance(said, dict):
                own = [said.get("license_name"), said.get("license")]
                named = [one for one in own if isinstance(one, str) and one not in ("", "other")]
                if named:
                    return ImportedLicence(named[0][:100], CARD, text)
    return ImportedLicence("", "", text)


def _list_weights(folder: Path) -> dict[str, Path]:
    """The file of each tensor. Raises: ImportRefusedError."""
    if (folder / INDEX).exists():
        listed = read_json_object(folder, INDEX).get("weight_map")
        if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
            raise _unreadable(folder / INDEX, ValueError("weight_map is missing"))
        files = sorted({*listed.values()})
    elif (folder / WEIGHTS).exists():
        listed, files = None, [WEIGHTS]
    else:
        if pickled := sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED):
            raise ImportRefusedError(
                "import_source.pickled",
                "--from: {folder} has its weights only as Python pickles ({files}), which could run code when they are read. Convert them: load the "
                "model with transformers where you trust the file, and save it with 'save_pretrained', which writes safetensors.",
                folder=folder, files=pickled[:4],
            )  # fmt: skip
        raise ImportRefusedError(
            "import_source.no_weights", "--from: {folder} has no {name} and no {index}.",
            folder=folder, name=WEIGHTS, index=INDEX,
        )  # fmt: skip
    found: dict[str, Path] = {}
    for name in files:
        path = folder / name
        if os.path.basename(name) != name or not path.is_file():
            raise ImportRefusedError(
                "import_source.no_shard",
                "--from: {index} names {file}, which is not in the folder. The folder is not complete.",
                index=folder / INDEX, file=name[:200],
            )  # fmt: skip
        try:
            with safe_open(str(path), framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - no mapping
                    found[key] = path
        except (SafetensorError, OSError, ValueError) as error:
            raise _unreadable(path, error) from error
    if listed is not None and (wrong := sorted(key for key, name in listed.items() if found.get(key) != folder / name)):
        raise ImportRefusedError(
            "import_source.other_index", "--from: {index} says that {file} has the tensor {tensor}, but the file does not have it.",
            index=folder / INDEX, file=listed[wrong[0]], tensor=wrong[0][:200],
        )  # fmt: skip
    return found


def _check_tokenizer_files(folder: Path, spec: ModelSpec) -> None:
    """Raises: ImportRefusedError without a tokenizer, with two chat templates that differ, or with more tokens than the embedding has rows."""
    library = read_json_object(folder, TOKENIZER)
    config = read_json_object(folder, TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).exists() else {}
    named, own = config.get("chat_template"), folder / TEMPLATE
    text = own.read_text(encoding="utf-8", errors="replace") if own.is_file() else None
    if isinstance(named, str) and text is not None and text.strip() != named.strip():
        raise ImportRefusedError(
            "import_source.two_templates",
            "--from: {folder} has two chat templates that differ: {file} and the key chat_template of {other}. Remove the one that is wrong.",
            folder=folder, file=TEMPLATE, other=TOKENIZER_CONFIG,
        )  # fmt: skip
    model = library.get("model")
    entries = model.get("vocab") if isinstance(model, dict) else None
    ids = [*entries.values()] if isinstance(entries, dict) else [*range(len(entries or ()))]
    ids += [token.get("id") for token in library.get("added_tokens") or () if isinstance(token, dict)]
    largest = max((one for one in ids if type(one) is int), default=-1)
    if largest >= spec.vocab_size:
        raise ImportRefusedError(
            "import_source.large_vocabulary",
            "--from: {file} has {tokens:,} tokens, but the model's embedding has only {rows:,} rows. The tokenizer belongs to another model.",
            file=folder / TOKENIZER, tokens=largest + 1, rows=spec.vocab_size,
        )  # fmt: skip


def _hash(path: Path, advance: Callable[[int], object]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def _unreadable(path: Path, error: Exception) -> ImportRefusedError:
    """Raises: ``error`` itself if a fault of the machine caused it."""
    if is_machine_fault_unrelated_to_files(error):
        raise error
    return ImportRefusedError(
        "import_source.unreadable", "--from: {file} cannot be read: {reason}", file=path, reason=str(error)[:300]
    )
