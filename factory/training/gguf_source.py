"""Reads a .gguf file through transformers, in a sandboxed process without a network, as a folder that ``ImportSource`` can read."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agents.core.untrusted import fold_to_one_line
from factory.core.errors import DiskFullError
from factory.core.faults import has_room_for
from factory.core.path_removal import remove_path
from factory.ingest.tokenizing.fast_path import SPLIT_NAMES, name_split, spell_split
from factory.sandbox.sandbox import SandboxLimits, run_in_sandbox
from factory.training.import_source import Advance, ImportRefusedError, ImportSource, sign_file
from kernels.contract.message import Message
from models.adapters.config_reader import ModelFilesError
from models.files.safetensors_file import refuse_lfs_pointer

INSIDE = Path(__file__).with_name("inside_gguf.py")
MAGIC = b"GGUF"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # OWNER/NAME
LARGEST_RATIO = 20  # bytes of fp32 weights for each byte of the file: 4 for 8 bits, 16 for 2 bits, and some room
BASE_MEMORY = 4 << 30  # bytes for transformers itself
BYTE_LEVEL = "gpt2"  # the kind of tokenizer whose text is split by a rule that the file only names
UNNAMED = (None, "default")  # files of before the names; what transformers makes of them is kept
SECONDS_A_GB, BASE_SECONDS = 600.0, 300.0


def is_gguf(place: Path) -> bool:
    """Return whether a model's place is a file whose name ends with .gguf."""
    return place.suffix.lower() == ".gguf" and place.is_file()


def find_place(place: Path) -> Path:
    """Return the path of a model's folder or file, with ~ expanded. Raises: ImportRefusedError if nothing is there."""
    there = Path(os.path.expanduser(place))  # Path's own raises for an unknown user
    if not there.exists():
        if HUB_NAME.fullmatch(str(place)) and not place.parent.exists() and place.suffix.lower() != ".gguf":
            raise ImportRefusedError(
                "gguf_source.hub_name",
                "--from: there is no folder {place}. If this is the name of a model on the Hugging Face Hub, download the model first: "
                "'hf download {place} --local-dir {name}'. Then give the folder: '--from {name}'.",
                place=place,
                name=place.name,
            )
        raise ImportRefusedError(
            "gguf_source.no_place",
            "--from: {place} does not exist. Give the folder of a model with its config.json, or a .gguf file.",
            place=place,
        )
    return there


@contextmanager
def open_gguf(place: Path, advance: Advance = lambda share, note: None) -> Iterator[ImportSource]:
    """Read and check a .gguf file. Its weights are in a temporary folder, as fp32, during the block.

    Raises: ImportRefusedError for a file that transformers cannot read, or a model that cannot be imported; DiskFullError; IsolationError.
    """
    place = place.expanduser().resolve()
    _refuse_other_file(place)
    before = sign_file(place)
    with open(place, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    size = before[0]
    with tempfile.TemporaryDirectory(prefix="factory-gguf-") as name:
        out = Path(name) / "model"
        if not has_room_for(Path(name), 8 * size):
            raise DiskFullError(
                "gguf_source.disk", "--from: {folder} has too little free space for the weights of {file}, about {size:.1f} GB.",
                folder=name, file=place, size=8 * size / 1e9,
            )  # fmt: skip
        advance(0.0, str(Message("gguf_source.reads", "transformers reads {file}", file=place.name)))
        facts = _read_in_sandbox(place, size, out)
        remove_path(out / "cache")
        _refuse_losses(place, facts)
        if facts["tokenizer"] == BYTE_LEVEL:
            _set_split(place, out / "tokenizer.json", facts["pre"])
        source = ImportSource.read(out, advance)
        if sign_file(place) != before:
            raise ImportRefusedError(
                "gguf_source.changed", "--from: {file} changed while it was read. Import it again.", file=place
            )
        yield source.copy_as_file(place, sha256)


@contextmanager
def open_gguf_config(place: Path) -> Iterator[Path]:
    """A temporary folder with the config.json of a .gguf file, made of its head alone, during the block.

    Raises: ImportRefusedError for a file that transformers cannot read, or a key that it would lose; IsolationError.
    """
    place = place.expanduser().resolve()
    _refuse_other_file(place)
    with tempfile.TemporaryDirectory(prefix="factory-gguf-") as name:
        out = Path(name) / "model"
        _refuse_losses(place, _read_in_sandbox(place, place.stat().st_size, out, "--config"))
        yield out


def _refuse_other_file(place: Path) -> None:
    """Raises: ImportRefusedError for a file that is not GGUF, or if the library that reads it is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise ImportRefusedError(
            "gguf_source.no_library",
            "--from: reading .gguf files needs the package gguf. Install it: pip install 'gguf>=0.19'",
        )
    try:
        refuse_lfs_pointer(place)
    except ModelFilesError as error:
        raise ImportRefusedError("gguf_source.pointer", "--from: {problem}.", problem=error.message) from None
    with open(place, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ImportRefusedError("gguf_source.not_gguf", "--from: {file} is not a GGUF file.", file=place)


def _read_in_sandbox(place: Path, size: int, out: Path, *options: str) -> dict[str, Any]:
    """Let transformers write a file of ``size`` bytes as a folder. Returns what the process saw. Raises: ImportRefusedError, IsolationError."""
    limits = SandboxLimits(
        wall_seconds=BASE_SECONDS + SECONDS_A_GB * size / 1e9, memory=BASE_MEMORY + 2 * LARGEST_RATIO * size, file=LARGEST_RATIO * size,
        output=LARGEST_RATIO * size + (1 << 28),
    )  # fmt: skip
    done = run_in_sandbox(
        [sys.executable, "-I", str(INSIDE), str(place), str(out), *options],
        output=out,
        readonly=[INSIDE, place],
        limits=limits,
    )
    if not done.ok:
        raise ImportRefusedError(
            "gguf_source.unreadable",
            "--from: transformers cannot read {file}: {reason}. If the file is complete, use the model's Hugging Face folder: transformers reads "
            "GGUF files of some architectures only.",
            file=place,
            reason=done.describe_ending(),
        )
    facts: dict[str, Any] = json.loads((out / "facts.json").read_text(encoding="utf-8"))
    remove_path(out / "facts.json")
    return facts


def _refuse_losses(place: Path, facts: dict[str, Any]) -> None:
    """Refuse a file of which transformers made another model, by what the sandboxed process saw."""
    if facts["refused"] == "missing":
        raise ImportRefusedError(
            "gguf_source.missing_tensor",
            "--from: {file} lacks tensors of its model, or they have another shape: {count}, the first is {name}. Download the file again.",
            file=place,
            count=int(facts["count"]),
            name=fold_to_one_line(str(facts["name"]), 100),
        )
    if facts["refused"] == "tensor":
        raise ImportRefusedError(
            "gguf_source.unread_tensor",
            "--from: {file} has tensors that transformers does not read: {count}, the first is {name}. "
            "A model from which they would be lost cannot be imported from GGUF. Use its Hugging Face folder.",
            file=place,
            count=int(facts["count"]),
            name=fold_to_one_line(str(facts["name"]), 100),
        )
    if facts["refused"] == "token":
        none = Message("gguf_source.no_token", "no token")
        token, saved = (
            none if one is None else fold_to_one_line(repr(one), 100) for one in (facts["token"], facts["saved"])
        )
        raise ImportRefusedError(
            "gguf_source.other_token",
            "--from: transformers reads the tokenizer of {file} differently. Token {id} is {token} in the file, and {saved} for transformers. "
            "Use the model's Hugging Face folder.",
            file=place,
            id=int(facts["number"]),
            token=token,
            saved=saved,
        )
    if facts["refused"] == "key":
        raise ImportRefusedError(
            "gguf_source.unread_key",
            "--from: {file} has the key {key} = {value}, which transformers does not read. "
            "A model from which it would be lost cannot be imported from GGUF. Use its Hugging Face folder.",
            file=place,
            key=fold_to_one_line(str(facts["name"]), 100),
            value=fold_to_one_line(str(facts["value"]), 100),
        )


def _set_split(place: Path, library: Path, pre: str | None) -> None:
    """Make a written tokenizer.json split text by the rule that llama.cpp means by ``pre``; transformers does not read that name."""
    if pre in UNNAMED:
        return
    known = {name: (split, whole_words) for split, (name, whole_words) in SPLIT_NAMES.items()}
    if pre not in known:
        raise ImportRefusedError(
            "gguf_source.unknown_split",
            "--from: the tokenizer of {file} splits text by the rule {rule!r}, and the factory knows {known}. Use the model's Hugging Face folder.",
            file=place,
            rule=fold_to_one_line(str(pre), 100),
            known=[*known],
        )
    split, whole_words = known[pre]
    data = json.loads(library.read_text(encoding="utf-8"))
    if name_split(data) != split:
        data["pre_tokenizer"] = spell_split(split)
    data["model"]["ignore_merges"] = whole_words
    library.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
