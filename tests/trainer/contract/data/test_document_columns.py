"""``columns.arrow``: the numbers and keys of a shard's documents, made of documents.parquet wherever they are missing or wrong."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.file_hashes import file_hashes
from tests.support.messages import refused
from tests.support.paths import ROOT
from tests.support.trainer.segments import MakeShard, make_documents, plan_of
from trainer.contract.data import document_columns
from trainer.contract.data.data_order import DataOrder
from trainer.contract.data.document_columns import FILE, WINDOW, PieceIndex, is_same_as_documents
from trainer.contract.data.packing import count_pieces
from trainer.contract.data.token_shard import TokenizedDocument, TokenShard, format_row_ranges, write_token_shard
from trainer.contract.errors import DataPlanError, TokenShardError
from trainer.contract.recipe import BatchRecipe

COUNTS = {"code": 130, "docs": 70, "chat": 40}


def interleaved_shard(folder: Path, seed: int = 0, counts: dict[str, int] | None = None) -> TokenShard:
    """Documents of several domains in mixed order."""
    documents = make_documents(seed, counts or COUNTS)
    order = np.random.default_rng(seed).permutation(len(documents)).tolist()
    return write_token_shard(folder, [documents[i] for i in order], vocab_size=512, tokenizer_sha256="t")


def table_by_domain(shard: TokenShard) -> dict[str, list[tuple[int, int, int, int]]]:
    """(row, start, length, supervised tokens) of the documents of each domain, from documents.parquet."""
    found: dict[str, list[tuple[int, int, int, int]]] = {}
    for row, document in enumerate(shard.documents.to_pylist()):
        numbers = document["start"], document["length"], document["supervised_tokens"]
        found.setdefault(document["domain"], []).append((row, *numbers))
    return dict(sorted(found.items()))


def columns_by_domain(shard: TokenShard) -> dict[str, list[tuple[int, int, int, int]]]:
    names = ("row", "start", "length", "supervised_tokens")
    found = {}
    for domain, documents in shard.domains.items():
        parts = [documents.read_between(name, 0, documents.count).tolist() for name in names]
        found[domain] = list(zip(*parts, strict=True))
        numbers = np.arange(documents.count)
        assert [documents.take(name, numbers).tolist() for name in names] == parts
        total = documents.total
        assert (total.documents, total.tokens) == (documents.count, sum(parts[2]))
        assert (total.supervised_tokens, total.longest) == (sum(parts[3]), max(parts[2]))
    return found


def open_order(shard: TokenShard, **plan: object) -> DataOrder:
    keywords = {"context": 32, "batch": BatchRecipe(sequences=4), "vocab_size": 512}
    return DataOrder(plan_of(TokenShard(shard.path), **plan), **keywords)


def test_columns_hold_what_documents_parquet_holds(tmp_path: Path) -> None:
    shard = interleaved_shard(tmp_path)
    assert columns_by_domain(shard) == table_by_domain(shard)
    keys = shard.documents["key"].to_pylist()
    assert [shard.columns.read_key(row) for row in range(len(keys))] == keys
    asked = [*keys[::7], "nobody", "code-0-1 "]
    found = shard.columns.find_rows_of_keys(asked, document_columns.hash_keys(asked))
    assert sorted(found) == sorted((key, row) for row, key in enumerate(keys) if row % 7 == 0)
    assert is_same_as_documents(shard.path, shard.manifest)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    moves=st.lists(st.tuples(st.sampled_from(["code", "docs", "law"]), st.sets(st.integers(0, 59), min_size=1)), max_size=4),
)  # fmt: skip
def test_moved_documents_are_grouped_as_the_table_groups_them(
    tmp_path_factory: pytest.TempPathFactory, seed: int, moves: list[tuple[str, set[int]]]
) -> None:
    """Rows may be named twice, and may move to a domain that the shard does not have, or to their own."""
    made = interleaved_shard(tmp_path_factory.mktemp("shards"), seed, {"code": 30, "docs": 20, "chat": 10})
    shard = TokenShard(made.path, {domain: format_row_ranges(rows) for domain, rows in moves})
    assert columns_by_domain(shard) == table_by_domain(shard)
    own = table_by_domain(made)
    for domain, documents in shard.domains.items():
        assert documents.is_own == (own.get(domain) == table_by_domain(shard)[domain])
        rows = np.arange(0, 60, 3)
        held = documents.read_between("row", 0, documents.count).tolist()
        found = documents.find_documents_in_rows(rows).tolist()
        assert found == [number for number, row in enumerate(held) if row % 3 == 0]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3 * WINDOW), min_size=1, max_size=4),
    context=st.integers(1, 40),
    seed=st.integers(0, 999),
)
def test_a_piece_index_finds_every_piece_of_every_document(sizes: list[int], context: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = [rng.integers(1, 120, size).astype(np.uint32) for size in sizes]
    index = PieceIndex([FakeLengths(part) for part in lengths], context)  # type: ignore[list-item]
    every = np.concatenate(lengths).astype(np.int64)
    counts = count_pieces(every, context)
    assert index.pieces == counts.sum()
    documents, numbers, tokens = index.find_documents(np.arange(index.pieces))
    assert documents.tolist() == np.repeat(np.arange(len(every)), counts).tolist()
    assert numbers.tolist() == [number for count in counts for number in range(count)]
    assert tokens.tolist() == np.repeat(every, counts).tolist()
    assert index.find_first_pieces(np.arange(len(every))).tolist() == (np.cumsum(counts) - counts).tolist()


class FakeLengths:
    """The lengths of the documents of one part."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths, self.count = lengths, len(lengths)

    def take(self, name: str, documents: np.ndarray) -> np.ndarray:
        assert name == "length"
        return self.lengths[documents]

    def read_between(self, name: str, first: int, last: int) -> np.ndarray:
        assert name == "length"
        return self.lengths[first:last]


def test_an_old_shard_gets_its_columns_once_and_keeps_its_id(tmp_path: Path) -> None:
    shard = interleaved_shard(tmp_path)
    made, order = file_hashes(shard.path), open_order(shard).draw_next_rows()
    assert set(made) == {"tokens.bin", "loss_mask.bin", "documents.parquet", "manifest.json", FILE}
    assert FILE not in shard.manifest["files"]
    (shard.path / FILE).unlink()
    assert open_order(shard).draw_next_rows() == order
    assert file_hashes(shard.path) == made
    written = (shard.path / FILE).stat()
    assert open_order(shard).draw_next_rows() == order
    assert (shard.path / FILE).stat().st_mtime_ns == written.st_mtime_ns


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def change_length(path: Path) -> None:
    """One length becomes another: Arrow itself does not notice."""
    shard = TokenShard(path.parent)
    data, lengths = path.read_bytes(), shard.columns.length.tobytes()
    at = data.index(lengths)
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def take_from_another_shard(path: Path) -> None:
    other = interleaved_shard(path.parent.parent / "others", 5)
    shutil.copy(other.path / FILE, path)


@pytest.mark.parametrize(
    "damage",
    [truncate, change_length, take_from_another_shard, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(bytes(5000))],
    ids=["short", "length", "stale", "empty", "zeros"],
)  # fmt: skip
def test_damaged_columns_are_noticed_and_made_again(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    shard = interleaved_shard(tmp_path)
    made, rows = file_hashes(shard.path), open_order(shard).draw_next_rows()
    damage(shard.path / FILE)
    assert file_hashes(shard.path) != made and not is_same_as_documents(shard.path, shard.manifest)
    assert open_order(shard).draw_next_rows() == rows
    assert file_hashes(shard.path) == made


def test_any_changed_byte_of_a_column_is_found_by_the_comparison(tmp_path: Path) -> None:
    shard = interleaved_shard(tmp_path)
    path = shard.path / FILE
    data = path.read_bytes()
    columns = shard.columns
    for column in (columns.row, columns.start, columns.supervised_tokens, columns.key_hash, columns.key_row):
        at = data.index(column.tobytes())
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert not is_same_as_documents(shard.path, shard.manifest)
    path.write_bytes(data)
    assert is_same_as_documents(shard.path, shard.manifest)


def test_columns_are_not_made_of_damaged_documents(tmp_path: Path) -> None:
    shard = interleaved_shard(tmp_path)
    (shard.path / FILE).unlink()
    path = shard.path / "documents.parquet"
    data = path.read_bytes()
    path.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
    with refused("document_columns.damaged_documents", TokenShardError):
        open_order(shard)


def test_a_shard_whose_folder_takes_no_columns_is_opened_all_the_same(tmp_path: Path) -> None:
    """A folder in the file's place refuses the rename, for root too."""
    shard = interleaved_shard(tmp_path)
    rows = open_order(shard).draw_next_rows()
    (shard.path / FILE).unlink()
    (shard.path / FILE).mkdir()
    before = sorted(os.listdir(shard.path)), sorted(os.listdir("/proc/self/fd"))
    assert open_order(shard).draw_next_rows() == rows
    assert (sorted(os.listdir(shard.path)), sorted(os.listdir("/proc/self/fd"))) == before


def test_processes_that_open_an_old_shard_together_leave_one_file(tmp_path: Path) -> None:
    shard = interleaved_shard(tmp_path)
    made = file_hashes(shard.path)
    (shard.path / FILE).unlink()
    script = f"from trainer.contract.data.token_shard import TokenShard; print(len(TokenShard({str(shard.path)!r}).columns.row))"
    command = [sys.executable, "-c", script]
    started = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate()[0] for process in started] == [f"{sum(COUNTS.values())}\n"] * 4
    assert file_hashes(shard.path) == made


def test_keys_with_one_hash_are_told_apart(tmp_path: Path) -> None:
    """Two words with one CRC-32, of which the shard holds one."""
    first, second = "plumless", "buckeroo"
    assert zlib.crc32(first.encode()) == zlib.crc32(second.encode())
    document = lambda key: TokenizedDocument(key, key, "code", "s", "", np.ones(9, np.uint32), np.ones(9, bool))
    shard = write_token_shard(tmp_path, [document("a"), document(second)], vocab_size=512, tokenizer_sha256="t")
    plan = plan_of(shard, weights={"code": 1.0})
    keywords = {"context": 32, "batch": BatchRecipe(sequences=1), "vocab_size": 512}
    (stream,) = DataOrder(plan.copy_with_masked_documents([second]), **keywords).streams.values()
    assert stream.masked == {1}
    with refused("document_stream.masked_document", DataPlanError, document=first):
        DataOrder(plan.copy_with_masked_documents([first]), **keywords)


def test_masked_and_moved_documents_are_found_in_every_stream(tmp_path: Path, make_shard: MakeShard) -> None:
    shards = [interleaved_shard(tmp_path, seed) for seed in range(3)]
    keys = [shard.documents["key"].to_pylist() for shard in shards]
    masked = {key for own in keys for key in own[::5]}
    plan = plan_of(*shards, generations=[0, 0, 1], weights={"*": 1.0}).copy_with_masked_documents(masked)
    listed = [shard.model_copy(update={"moved": {"docs": "3-30,41"}}) for shard in plan.token_shards]
    plan = plan.model_copy(update={"token_shards": listed})
    order = DataOrder(plan, context=32, batch=BatchRecipe(sequences=4), vocab_size=512)
    found = set()
    for stream in order.streams.values():
        every = {document: stream.look_up_document_key(document) for document in range(stream.documents)}
        assert stream.masked == {document for document, key in every.items() if key in masked}
        found |= {every[document] for document in stream.masked}
    assert found == masked


@pytest.mark.long("three fresh processes and 400,000 documents: memory is a whole process's")
def test_a_rank_holds_few_bytes_of_its_own_for_each_document(tmp_path: Path) -> None:
    """Anonymous memory, which ranks do not share. The table with its strings took some 250 bytes a document; 20 leave room for the interpreter."""
    command = [sys.executable, "-m", "benchmarks.training.opened_documents", "--documents", "400000", "--json"]
    done = subprocess.run([*command, "--folder", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    private = [float(found) for found in re.findall(r'"private_mib": ([0-9.]+)', done.stdout)]
    assert len(private) == 2 and private[1] * 2**20 < 20 * 400_000, private
