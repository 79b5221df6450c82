"""Reads the folder of a public model that is to be imported: description, tensors, tokenizer files, licence and hashes.

``ImportSource.read`` finds everything that can make an import fail before the factory writes a file: each tensor by name, shape and type, and every
number for NaN and infinity (``models.files``). The folder is untrusted, and nothing in it is run.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from factory.core.errors import InputError
from factory.ingest.installing import AddedRow
from factory.ingest.tokenizing.description import (
    LEGACY_TEMPLATE,
    list_more_templates,
    read_chat_templates,
    read_optional_object,
)
from factory.ledger.imported_model import ImportedLicence
from kernels.contract.strict_yaml import read_yaml
from models.adapters.config_reader import ModelFilesError
from models.adapters.family import Family
from models.files.model_folder import INDEX, ONE_FILE, ModelSource, find_inside, open_model_folder
from models.files.safetensors_file import refuse_lfs_pointer
from models.spec import ModelSpec
from trainer.contract.checkpoint.export import TORCH_NAMES, make_dtype_keys

OTHER_FILES = (
    "config.json",
    INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
PER_TOKEN = ("embedding", "head")  # the native tensors with a row for each token
LONGEST_LICENCE = 1 << 16  # characters of a licence's text that the ledger keeps
LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "COPYING")
CARD = "README.md"
LARGEST_OTHER_FILE = 1 << 28  # bytes; a tokenizer.json of 256,000 tokens has 32 MiB
Advance = Callable[[float, str], object]
Signature = tuple[int, int, int]  # of a file: what changes when it is written or replaced (size, time, inode)


class ImportRefusedError(InputError):
    """A model cannot be imported. The message names the file, and what to do. Nothing was written."""


@dataclass(frozen=True)
class ImportSource:
    """A checked model. ``files``: name → SHA-256 of each file that the import depends on. ``spec.context`` is what the model allows.

    ``new_rows``: tokens that the chat template needs and the model never had. They get the rows of their ids: free rows if the embedding is
    larger than the vocabulary, else rows after its last."""

    folder: Path
    name: str
    model: ModelSource
    files: dict[str, str]
    licence: ImportedLicence
    signatures: dict[str, Signature]  # of ``files``, when they were hashed
    new_rows: tuple[AddedRow, ...] = ()

    @classmethod
    def read(cls, folder: Path, advance: Advance = lambda share, note: None) -> ImportSource:
        """Read and check a folder. ``advance(share, note)`` is called as the work goes on; the shares sum to one. Raises: ImportRefusedError."""
        folder = folder.expanduser().resolve()
        try:
            model = open_model_folder(folder)
            _refuse_odd_files(folder)
            for name in OTHER_FILES:
                if (folder / name).is_file():
                    refuse_lfs_pointer(folder / name)
            _refuse_two_templates(folder)
            names = sorted({ONE_FILE, *OTHER_FILES, *(path.name for path in folder.glob("*.safetensors"))})
            names = [name for name in names if (folder / name).is_file()]
            total = sum((folder / name).stat().st_size for name in names) or 1
            signatures = {name: sign_file(folder / name) for name in names}
            count = lambda size: advance(size / total / 2, "SHA-256")
            files = {name: _hash(folder / name, count) for name in names}
            for name in model.dtypes:
                model.read(name)  # raises for a number that is not finite
                advance(1 / len(model.dtypes) / 2, "numbers")
        except ModelFilesError as error:
            raise ImportRefusedError(error.message) from None
        source = cls(folder, folder.name, model, files, find_licence(folder), signatures)
        source.refuse_changed_files()
        return source

    @property
    def spec(self) -> ModelSpec:
        """The description, with the rows of ``new_rows``."""
        found = self.model.spec
        size = max([found.vocab_size, *(row.id + 1 for row in self.new_rows)])
        return found if size == found.vocab_size else found.model_copy(update={"vocab_size": size})

    @property
    def family(self) -> Family:
        return self.model.family

    @property
    def dtype_keys(self) -> dict[str, Any]:
        """Keys of a recipe with which an export has the dtype of each tensor of the source."""
        return make_dtype_keys(self.spec, self.family, self.model.dtypes)

    @property
    def dtype(self) -> str:
        """The type of most weights by torch's name."""
        return TORCH_NAMES[self.dtype_keys["export_dtype"]]

    def copy_as_file(self, file: Path, sha256: str) -> ImportSource:
        """The same model, identified by the one file from which its folder was made."""
        return replace(self, name=file.stem, files={file.name: sha256})

    def add_new_rows(self, rows: Sequence[AddedRow]) -> ImportSource:
        """The same model with rows for new tokens in its embedding, and in its head if the head is a matrix of its own."""
        return replace(self, new_rows=tuple(rows))

    def iterate_tensors(self, advance: Advance = lambda share, note: None) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of the checkpoint by name, as fp32, one at a time. Raises: ImportRefusedError."""
        try:
            for name, tensor in self.model.iterate_native():
                if self.new_rows and name in PER_TOKEN:
                    tensor = fill_new_rows(tensor, [row.id for row in self.new_rows], self._find_stored_dtype(name))
                yield name, tensor
                advance(tensor.numel() / self.spec.parameters, name)
        except ModelFilesError as error:
            raise ImportRefusedError(error.message) from None

    def _find_stored_dtype(self, native: str) -> torch.dtype:
        mappings = self.family.list_mappings(self.model.spec)
        theirs = next(one.theirs[0] for one in mappings if native in one.natives and not one.is_copy)
        found: torch.dtype = getattr(torch, self.model.dtypes[theirs])
        return found

    def refuse_changed_files(self) -> None:
        """Raises: ImportRefusedError if a file changed since it was hashed."""
        for name, signature in self.signatures.items():
            try:
                now = sign_file(self.folder / name)
            except FileNotFoundError:
                now = (0, 0, 0)
            if now != signature:
                raise ImportRefusedError(
                    "import_source.changed",
                    "--from: {file} changed while the model was read. Nothing was imported. Wait until the folder is complete, then import again.",
                    file=self.folder / name,
                )


def fill_new_rows(rows_VD: Tensor, ids: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an embedding or a head [V, D] in which each of ``ids`` has the mean of all rows before the first of them, and which has rows up to the
    last. The mean is rounded to ``dtype``, the type of the model's files, so that an export has it to the bit.

    A new row's logit is the mean of the other logits, so by Jensen's inequality the softmax over V tokens loses at most ln(1 + n/V) to n new ones:
    Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models". transformers (resize_token_embeddings, with mean_resizing)
    draws from a normal distribution around the same mean, with 1e-9 of the rows' covariance.

        >>> fill_new_rows(torch.tensor([[1.0, 0.0], [3.0, 2.0]]), [2]).tolist()
        [[1.0, 0.0], [3.0, 2.0], [2.0, 1.0]]
    """
    first, size = min(ids), max(len(rows_VD), max(ids) + 1)
    # numpy adds row by row, so the sum does not depend on the number of threads.
    mean_D = torch.from_numpy(rows_VD[:first].numpy().mean(0, dtype=np.float64)).to(dtype).to(rows_VD.dtype)
    filled_VD = rows_VD.new_empty(size, rows_VD.shape[1])
    filled_VD[: len(rows_VD)] = rows_VD
    filled_VD[list(ids)] = mean_D
    return filled_VD


def sign_file(path: Path) -> Signature:
    """The signature of a file. Raises: OSError."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def find_licence(folder: Path) -> ImportedLicence:
    """The licence that a model's folder names in the head of its card (README.md), and the text of its licence file."""
    text = _read_start(next((folder / name for name in LICENCE_FILES if (folder / name).is_file()), None))
    head = re.match(r"---\n(.*?)\n---", _read_start(folder / CARD if (folder / CARD).is_file() else None), re.S)
    try:
        said = read_yaml(head[1], CARD, ImportRefusedError) if head else None
    except ImportRefusedError:
        said = None  # a card that is not YAML names no licence
    own = [said.get("license_name"), said.get("license")] if isinstance(said, dict) else []
    named = [one for one in own if isinstance(one, str) and one not in ("", "other")]
    return ImportedLicence(named[0][:100], CARD, text) if named else ImportedLicence("", "", text)


def _refuse_odd_files(folder: Path) -> None:
    """Refuse files beside the weights that lie outside the folder, are no regular files, or are larger than such a file can be.

    Raises: ModelFilesError, ImportRefusedError.
    """
    blobs = folder.parent.parent / "blobs"  # of a cache of Hugging Face's hub
    homes = [folder, blobs] if folder.parent.name == "snapshots" else [folder]
    for path in list_more_templates(folder):
        if not (
            any(path.resolve().is_relative_to(home) for home in homes)
            and path.is_file()
            and path.stat().st_size <= LARGEST_OTHER_FILE
        ):
            raise _odd_file(path)
    for name in (*OTHER_FILES, LEGACY_TEMPLATE, *LICENCE_FILES, CARD):
        path = folder / name
        if not (path.is_symlink() or path.exists()):
            continue
        find_inside(folder, name)
        if path.is_file() and path.stat().st_size <= LARGEST_OTHER_FILE:
            continue
        if name in LICENCE_FILES and path.is_dir():
            continue  # licences of the parts; none of them is read
        raise _odd_file(path)


def _odd_file(path: Path) -> ImportRefusedError:
    return ImportRefusedError(
        "import_source.odd_file",
        "--from: {file} must be a regular file of at most {most} MiB.",
        file=path,
        most=LARGEST_OTHER_FILE >> 20,
    )


def _refuse_two_templates(folder: Path) -> None:
    """Raises: ImportRefusedError if two files have different chat templates. Programs choose between them differently."""
    try:
        config = read_optional_object(folder / "tokenizer_config.json")
    except InputError:
        return  # the tokenizer's reader says what is wrong with the file
    try:
        read_chat_templates(folder, config)
    except InputError as error:
        raise ImportRefusedError("import_source.two_templates", "--from: {reason}.", reason=error.message) from None


def _read_start(path: Path | None) -> str:
    if path is None:
        return ""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(LONGEST_LICENCE)


def _hash(path: Path, advance: Callable[[int], object]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()
