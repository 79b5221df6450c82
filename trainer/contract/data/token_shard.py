"""Token shard: the tokenised documents of one shard, as a folder of four files (DESIGN §5).

``tokens.bin``      little-endian uint16 (uint32 when the vocabulary needs it), documents end to end, each with its end token
``loss_mask.bin``   one bit a token, numpy ``packbits`` order: 1 if the token carries loss as a *target*
``documents.parquet``  id, key, start, length, supervised_tokens, domain, source, license; one row a document
``manifest.json``   counts, SHA-256 of the three files, tokenizer hash; its canonical JSON's SHA-256 is the shard's id

A token shard is immutable and memory-mapped: it is written aside, renamed, then only read. ``columns.arrow`` is made from ``documents.parquet``
(see document_columns) and can be made again; it is not part of the shard's id. In the example, the assistant's tokens of the
chat and the ``<|im_end|>`` after them carry loss, and so does every token of the text (0 is the end token):

    >>> from tempfile import TemporaryDirectory
    >>> #                  <|im_start|> user  \\n  Hi <|im_end|> <|im_start|> assistant \\n Hello <|im_end|> <|endoftext|>
    >>> chat_tokens = np.array([      1,  20, 10, 31,         2,           1,       21, 10,   32,         2,            0])
    >>> chat_mask = np.array([        0,   0,  0,  0,         0,           0,        0,  0,    1,         1,            0])
    >>> chat = TokenizedDocument("key-1", "1", "chat", "us", "MIT", chat_tokens.astype(np.uint32), chat_mask.astype(bool))
    >>> text = TokenizedDocument("key-2", "2", "text", "us", "MIT", np.array([40, 41, 0], np.uint32), np.ones(3, bool))
    >>> with TemporaryDirectory() as folder:
    ...     shard = write_token_shard(Path(folder), [chat, text], vocab_size=64, tokenizer_sha256="")
    ...     shard.tokens.tolist()
    ...     shard.read_loss_mask(8, 14).tolist()
    ...     shard.documents.select(["start", "length", "supervised_tokens"]).to_pylist()
    [1, 20, 10, 31, 2, 1, 21, 10, 32, 2, 0, 40, 41, 0]
    [True, True, False, True, True, True]
    [{'start': 0, 'length': 11, 'supervised_tokens': 2}, {'start': 11, 'length': 3, 'supervised_tokens': 3}]
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from kernels.contract.files import sync_folder
from trainer.contract.data import document_columns
from trainer.contract.errors import TokenShardError

FORMAT = 1
FILES = ("tokens.bin", "loss_mask.bin", "documents.parquet")


@dataclass(frozen=True)
class TokenizedDocument:
    """One document ready to be stored, of L > 0 tokens."""

    key: str  # unique among all documents of the factory
    id: str  # the name that the data's owner gave it
    domain: str
    source: str
    license: str
    tokens: npt.NDArray[np.uint32]  # [L], the end token last
    loss_mask: npt.NDArray[np.bool_]  # [L]: True if the token carries loss as a target


def write_token_shard(
    parent: Path, documents: Iterable[TokenizedDocument], *, vocab_size: int, tokenizer_sha256: str
) -> TokenShard:
    """Write ``parent/<id>`` atomically and return it open. The same content has the same id; an existing folder stays.

    Tokens are stored as uint16 if ``vocab_size`` allows it. Raises: OSError.
    """
    dtype = np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")
    aside = parent / f".writing-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        columns: dict[str, list[Any]] = {
            n: [] for n in ("key", "id", "start", "length", "supervised_tokens", "domain", "source", "license")
        }
        masks: list[npt.NDArray[np.bool_]] = []
        position = 0
        with open(aside / "tokens.bin", "wb") as out:
            for document in documents:
                assert len(document.tokens) == len(document.loss_mask) > 0, document.key
                assert int(document.tokens.max()) < vocab_size, document.key
                out.write(document.tokens.astype(dtype).tobytes())
                masks.append(document.loss_mask)
                row = (
                    document.key,
                    document.id,
                    position,
                    len(document.tokens),
                    int(document.loss_mask.sum()),
                    document.domain,
                    document.source,
                    document.license,
                )
                for name, value in zip(columns, row, strict=True):
                    columns[name].append(value)
                position += len(document.tokens)
        bits = np.packbits(np.concatenate(masks)) if masks else np.zeros(0, np.uint8)
        (aside / "loss_mask.bin").write_bytes(bits.tobytes())
        text = {n: pa.array(columns[n], pa.string()) for n in ("key", "id", "domain", "source", "license")}
        whole = {n: pa.array(columns[n], pa.int64()) for n in ("start", "length", "supervised_tokens")}
        table = pa.table({n: (text | whole)[n] for n in columns})
        pq.write_table(table, aside / "documents.parquet")
        files = {name: hash_file(aside / name) for name in FILES}
        manifest = {
            "format": FORMAT,
            "dtype": dtype.str,
            "documents": len(columns["key"]),
            "tokens": position,
            "supervised_tokens": int(sum(columns["supervised_tokens"])),
            "vocab_size": vocab_size,
            "tokenizer_sha256": tokenizer_sha256,
            "files": files,
        }
        encoded = json.dumps(manifest, sort_keys=True, indent=1).encode()
        (aside / "manifest.json").write_bytes(encoded)
        derived = document_columns.make_columns(table, files["documents.parquet"])
        document_columns.write_columns(derived, aside / document_columns.FILE)
        for name in (*FILES, "manifest.json", document_columns.FILE):
            with open(aside / name, "rb") as handle:
                os.fsync(handle.fileno())
        sync_folder(aside)
        target = parent / hashlib.sha256(encoded).hexdigest()[:32]
        if not target.exists():
            os.rename(aside, target)
        sync_folder(parent)  # also for a folder that a killed process renamed
        return TokenShard(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


class TokenShard:
    """An open token shard; a file is read when it is first used. ``moved``: documents that belong to another domain than the shard itself
    says, ``{domain: rows}`` as in a data plan. Raises: TokenShardError, on reading, for a wrong manifest or rows that do not exist."""

    def __init__(self, path: Path | str, moved: Mapping[str, str] | None = None) -> None:
        self.path = Path(path)
        self.id = self.path.name
        self.moved = dict(moved or {})

    @cached_property
    def manifest(self) -> dict[str, Any]:
        try:
            encoded = (self.path / "manifest.json").read_bytes()
        except OSError as error:
            raise TokenShardError(
                "token_shard.not_a_shard",
                "{folder} is not a token shard: {problem}",
                folder=str(self.path),
                problem=error.strerror,
            ) from error
        if hashlib.sha256(encoded).hexdigest()[:32] != self.id:
            raise TokenShardError(
                "token_shard.other_manifest",
                "{folder}: the hash of manifest.json differs from the folder's name.",
                folder=str(self.path),
            )
        manifest: dict[str, Any] = json.loads(encoded)
        if manifest["format"] != FORMAT:
            raise TokenShardError(
                "token_shard.format",
                "{folder}: the token shard has format {found}, but this code reads format {expected}.",
                folder=str(self.path),
                found=manifest["format"],
                expected=FORMAT,
            )
        return manifest

    @cached_property
    def tokens(self) -> npt.NDArray[Any]:
        """All tokens, memory-mapped, shape [tokens], read-only.

        Arrow's map outlives its file, which is closed here. Python's own (``np.memmap``) would keep a file descriptor as long as it lives, and a
        plan may have thousands of shards.
        """
        dtype, count = self.manifest["dtype"], self.manifest["tokens"]
        if count == 0:
            return np.zeros(0, dtype)
        path = self.path / "tokens.bin"
        with pa.memory_map(str(path)) as file:
            mapped = file.read_buffer()
        if mapped.size < count * np.dtype(dtype).itemsize:
            raise TokenShardError(
                "token_shard.too_short",
                "{file} is too short: it has {found} bytes, but its manifest says that it holds {tokens} tokens of type {dtype}.",
                file=str(path),
                found=mapped.size,
                tokens=count,
                dtype=dtype,
            )
        return np.frombuffer(mapped, dtype, count)

    @cached_property
    def _mask_bits(self) -> npt.NDArray[np.uint8]:
        if self.manifest["tokens"] == 0:
            return np.zeros(0, np.uint8)
        with pa.memory_map(str(self.path / "loss_mask.bin")) as file:
            return np.frombuffer(file.read_buffer(), np.uint8)

    def read_loss_mask(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """True for each of the tokens [start, stop) that carries loss as a target, [stop - start]."""
        first = start // 8
        bits = np.unpackbits(self._mask_bits[first : (stop + 7) // 8])
        return bits[start - first * 8 : stop - first * 8].astype(bool)

    @cached_property
    def columns(self) -> document_columns.DocumentColumns:
        """The numbers of the documents, memory-mapped, and their keys one at a time. Raises: TokenShardError if they cannot be made."""
        return document_columns.open_columns(self.path, self.manifest)

    @cached_property
    def domains(self) -> dict[str, document_columns.DomainDocuments]:
        """The documents of each domain that has some, by ``moved`` where it says another domain than the shard."""
        moved = {}
        for domain, text in self.moved.items():
            moved[domain] = _expand_row_ranges(text)
            self._refuse_missing_row(int(moved[domain].max()), domain)
        return self.columns.group_by_domain(moved)

    @cached_property
    def documents(self) -> pa.Table:
        """One row a document, in the order of its tokens, with all strings in memory. Use ``columns`` for many documents."""
        # not pq.read_table, which imports pandas if it is installed: a fifth of a second
        with pq.ParquetFile(self.path / "documents.parquet", memory_map=True) as file:
            table = file.read()
        return self._with_domains(table) if self.moved else table

    def _with_domains(self, table: pa.Table) -> pa.Table:
        domains = table["domain"].to_pylist()
        for domain, text in self.moved.items():
            for row in parse_row_ranges(text):
                self._refuse_missing_row(row, domain)
                domains[row] = domain
        at = table.column_names.index("domain")
        return table.set_column(at, "domain", pa.array(domains, pa.string()))

    def _refuse_missing_row(self, row: int, domain: str) -> None:
        if row >= self.manifest["documents"]:
            raise TokenShardError(
                "token_shard.no_document",
                "{folder}: the shard has no document {row}, which the plan moves to domain {domain!r}.",
                folder=str(self.path),
                row=row,
                domain=domain,
            )


def format_row_ranges(rows: Iterable[int] | npt.NDArray[Any]) -> str:
    """Row numbers as text: ranges in ascending order.

    >>> format_row_ranges([7, 0, 1, 2, 9, 8]), format_row_ranges([])
    ('0-2,7-9', '')
    """
    found = np.unique(rows if isinstance(rows, np.ndarray) else np.fromiter(rows, np.int64))
    if not len(found):
        return ""
    edges = np.flatnonzero(np.diff(found) > 1)
    firsts = found[np.concatenate(([0], edges + 1))].tolist()
    lasts = found[np.concatenate((edges, [len(found) - 1]))].tolist()
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in zip(firsts, lasts))


def parse_row_ranges(text: str) -> list[int]:
    """The row numbers in a text that ``format_row_ranges`` made.

    >>> parse_row_ranges("0-2,7-9")
    [0, 1, 2, 7, 8, 9]
    """
    return _expand_row_ranges(text).tolist()


def _expand_row_ranges(text: str) -> npt.NDArray[np.int64]:
    runs = [run.partition("-") for run in text.split(",") if run]
    each = [np.arange(int(first), int(last or first) + 1) for first, _, last in runs]
    return np.concatenate([np.zeros(0, np.int64), *each])


def hash_file(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
