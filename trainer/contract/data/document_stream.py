"""A document stream: the pieces (see packing) of one domain of one generation, in a keyed random order, epoch by epoch.

A *place* counts the pieces of all epochs: place p is piece p % pieces of epoch p // pieces. The piece at a place follows from the place alone,
so a checkpoint keeps only the places.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.packing import count_pieces
from trainer.contract.data.permutation import BLOCK, Permutation
from trainer.contract.data.token_shard import TokenShard, format_row_ranges
from trainer.contract.errors import DataPlanError, TokenShardError

READ_AT_ONCE = 1 << 24  # tokens whose masks are read together


class DocumentPiece(NamedTuple):
    """Some neighbouring positions of one document."""

    stream: str
    place: int
    document: int  # index in the stream
    start: int  # first token, in the document
    positions: int
    supervised: int  # positions whose target carries loss
    shard: int  # index in the stream
    first: int  # first token, in the shard


class DocumentStream:
    """The documents of one domain of one generation, and their pieces by place."""

    def __init__(
        self,
        name: str,
        seed: int,
        shards: list[TokenShard],
        tables: list[dict[str, Any]],
        context: int,
        identities: list[str],
    ) -> None:
        self.name = name
        self.domain = parse_stream_domain(name)
        self.seed = seed
        self.shards = shards
        self.context = context
        self.shard = np.concatenate([np.full(len(t["start"]), i, np.int32) for i, t in enumerate(tables)])
        self.start = np.concatenate([t["start"] for t in tables])
        self.length = np.concatenate([t["length"] for t in tables])
        self.row = np.concatenate([t["row"] for t in tables])
        supervised = np.concatenate([t["supervised_tokens"] for t in tables])
        self.supervised_tokens = int(supervised.sum())
        self.unmasked = supervised == self.length  # documents whose tokens all carry loss: their mask is not read
        self.reshuffled = ""  # the plan's key; not part of the fingerprint, so that a cursor stays valid
        self.masked: frozenset[int] = frozenset()  # documents that the plan masks: they are counted, but have no weight
        self.ends = np.cumsum(count_pieces(self.length, context))
        self.pieces = int(self.ends[-1]) if len(self.ends) else 0
        self.fingerprint = hashlib.sha256(":".join([str(seed), *identities]).encode()).hexdigest()[:16]
        self._tokens: list[npt.NDArray[Any] | None] = [None] * len(shards)
        self._order: tuple[int | None, Permutation | None] = None, None
        self._block: tuple[tuple[int, int] | None, list[tuple[int, int, int, int, int, bool]]] = None, []

    @cached_property
    def positions_per_epoch(self) -> int:
        """Positions of an epoch in pieces that carry loss. Other pieces are never drawn."""
        moved = [tuple(sorted(shard.moved.items())) for shard in self.shards]
        each = zip(self.shards, moved, strict=True)
        return sum(count_positions_with_loss(str(shard.path), self.domain, self.context, rows) for shard, rows in each)

    def find_piece_at(self, place: int) -> DocumentPiece:
        """The whole piece at a place."""
        epoch, index = divmod(place, self.pieces)
        block, offset = divmod(index, BLOCK)
        if self._block[0] != (epoch, block):
            self._block = (epoch, block), self._pieces_of(epoch, block)
        document, start, positions, shard, first, unmasked = self._block[1][offset]
        supervised = positions if unmasked else self.count_supervised_targets(shard, first, positions)
        return DocumentPiece(self.name, place, document, start, positions, supervised, shard, first)

    def cut_part_of_piece(self, piece: DocumentPiece, start: int, positions: int) -> DocumentPiece:
        """The positions [start, start + positions) of a piece."""
        if (start, positions) == (0, piece.positions):
            return piece
        supervised = positions
        if not self.unmasked[piece.document]:
            supervised = self.count_supervised_targets(piece.shard, piece.first + start, positions)
        return piece._replace(
            start=piece.start + start, positions=positions, supervised=supervised, first=piece.first + start
        )

    def read_piece_tokens(self, piece: DocumentPiece) -> npt.NDArray[Any]:
        """The piece's tokens, [positions + 1]: inputs are all but the last, targets all but the first."""
        if self._tokens[piece.shard] is None:
            self._tokens[piece.shard] = np.asarray(self.shards[piece.shard].tokens)  # slices of a memmap are slow
        held = self._tokens[piece.shard]
        assert held is not None
        return held[piece.first : piece.first + piece.positions + 1]

    def read_target_mask(self, piece: DocumentPiece) -> npt.NDArray[np.bool_] | np.bool_:
        """True for each target that carries loss, [positions]; a scalar True if all do, False if the plan masks the document.

        ``piece.supervised`` counts masked targets too, so that no other document's weight changes.
        """
        if piece.document in self.masked:
            return np.False_
        if piece.supervised == piece.positions:
            return np.True_
        return self.shards[piece.shard].read_loss_mask(piece.first + 1, piece.first + 1 + piece.positions)

    def count_supervised_targets(self, shard: int, first: int, positions: int) -> int:
        """The number of targets that carry loss, among ``positions`` from token ``first`` of a shard on."""
        return int(np.count_nonzero(self.shards[shard].read_loss_mask(first + 1, first + 1 + positions)))

    def look_up_document_key(self, document: int) -> str:
        table = self.shards[self.shard[document]].documents
        return str(table["key"][int(self.row[document])].as_py())

    def find_places_of_documents(self, documents: Iterable[int], epoch: int) -> npt.NDArray[np.int64]:
        """The places of an epoch that hold pieces of these documents, in no order."""
        flat = [np.arange(self.ends[d - 1] if d else 0, self.ends[d], dtype=np.uint64) for d in documents]
        found = self._permutation(epoch).indices_of(np.concatenate([np.zeros(0, np.uint64), *flat]))
        return found.astype(np.int64) + epoch * self.pieces

    def _permutation(self, epoch: int) -> Permutation:
        if self._order[0] != epoch or self._order[1] is None:
            self._order = epoch, Permutation(self.pieces, f"{self.seed}/{self.name}/{epoch}{self.reshuffled}")
        order = self._order[1]
        assert order is not None
        return order

    def _pieces_of(self, epoch: int, block: int) -> list[tuple[int, int, int, int, int, bool]]:
        """(document, start, positions, shard, first token in the shard, unmasked) of a block of an epoch's pieces."""
        order = self._permutation(epoch)
        places = np.arange(block * BLOCK, min(self.pieces, (block + 1) * BLOCK), dtype=np.uint64)
        flat = order.values_at(places).astype(np.int64)
        document = np.searchsorted(self.ends, flat, side="right")
        before = np.where(document > 0, self.ends[document - 1], 0)
        start = (flat - before) * self.context
        positions = np.minimum(self.context, self.length[document] - 1 - start)
        columns: tuple[npt.NDArray[Any], ...] = (
            document,
            start,
            positions,
            self.shard[document],
            self.start[document] + start,
            self.unmasked[document],
        )
        return list(zip(*(column.tolist() for column in columns)))


@lru_cache(maxsize=1 << 14)  # the daemon asks again and again, and a shard never changes
def count_positions_with_loss(path: str, domain: str, context: int, moved: tuple[tuple[str, str], ...] = ()) -> int:
    """Positions of a token shard's documents of a domain that lie in pieces which carry loss. ``moved``: (domain, rows), as in ``TokenShard``.

    All pieces of unmasked documents carry loss. The masks of the others are read, ``READ_AT_ONCE`` tokens at a time.
    """
    shard = TokenShard(path, dict(moved))
    table = dict(_tables(shard))[domain]
    start, length = table["start"], table["length"]
    masked = np.flatnonzero((table["supervised_tokens"] < length) & (length > 1))
    found = int(np.maximum(0, length - 1).sum() - (length[masked] - 1).sum())
    while len(masked):
        ends = start[masked] + length[masked]
        count = max(1, int(np.searchsorted(ends, start[masked[0]] + READ_AT_ONCE)))
        block, masked = masked[:count], masked[count:]
        first = int(start[block[0]])
        before = np.concatenate(([0], np.cumsum(shard.read_loss_mask(first, int(ends[count - 1])), dtype=np.int64)))
        pieces = count_pieces(length[block], context)
        number = np.arange(pieces.sum()) - np.repeat(
            np.cumsum(pieces) - pieces, pieces
        )  # the number of each piece in its document
        stop = np.repeat(length[block] - 1, pieces)
        begin = number * context
        positions = np.minimum(context, stop - begin)
        target = np.repeat(start[block] - first, pieces) + begin + 1
        found += int(positions[before[target + positions] > before[target]].sum())
    return found


def parse_stream_domain(stream: str) -> str:
    """The domain in a stream's name, ``domain/generation``."""
    return stream.rpartition("/")[0]


def parse_stream_generation(stream: str) -> int:
    """The generation in a stream's name, ``domain/generation``."""
    return int(stream.rpartition("/")[2])


def open_streams(plan: DataPlan, context: int, vocab_size: int) -> dict[str, DocumentStream]:
    """The streams of a plan by name, ``domain/generation``. Raises: DataPlanError, also for a weight without documents; TokenShardError."""
    groups: dict[str, tuple[list[TokenShard], list[dict[str, Any]], list[str]]] = {}
    for planned in sorted(plan.token_shards, key=lambda shard: (shard.generation, shard.id)):
        shard = TokenShard(planned.path, planned.moved)
        if shard.manifest["vocab_size"] > vocab_size:
            raise DataPlanError(
                "document_stream.vocabulary",
                "model.vocab_size is {vocab_size}, but token shard {shard} was made with a vocabulary of {found} "
                "entries. Set model.vocab_size to at least {found}.",
                vocab_size=vocab_size,
                shard=shard.id,
                found=shard.manifest["vocab_size"],
            )
        if shard.id != (planned.content or planned.id):
            raise TokenShardError(
                "document_stream.other_shard",
                "{folder}: the plan expects token shard {planned} in this folder, but the folder has another shard.",
                folder=planned.path,
                planned=planned.content or planned.id,
            )
        own = {domain: table["row"] for domain, table in _tables(TokenShard(planned.path))} if planned.moved else {}
        for domain, table in _tables(shard):
            shards, tables, identities = groups.setdefault(f"{domain}/{planned.generation}", ([], [], []))
            shards.append(shard)
            tables.append(table)
            same = not planned.moved or np.array_equal(table["row"], own.get(domain, []))
            # the shard's own id also if its content was replaced, and if no document of this domain moved: cursors stay valid
            identities.append(planned.id if same else f"{planned.id} {format_row_ranges(table['row'].tolist())}")
    plan.refuse_missing_domains({parse_stream_domain(name) for name in groups})
    streams = {
        name: DocumentStream(name, plan.seed, shards, tables, context, identities)
        for name, (shards, tables, identities) in sorted(groups.items())
    }
    for stream in streams.values() if plan.reshuffled else ():
        stream.reshuffled = f"/{plan.reshuffled}"
    if plan.masked:
        _mask(streams, set(plan.masked))
    return {name: stream for name, stream in streams.items() if stream.pieces}


def _mask(streams: dict[str, DocumentStream], keys: set[str]) -> None:
    """Mask documents in their streams. Raises: DataPlanError for a document that no shard holds."""
    missing, wanted = set(keys), pa.array(sorted(keys))
    for stream in streams.values():
        found: list[int] = []
        for number, shard in enumerate(stream.shards):
            named = shard.documents["key"]
            rows = np.flatnonzero(np.array(pc.is_in(named, value_set=wanted).to_pylist(), bool))
            found += np.flatnonzero((stream.shard == number) & np.isin(stream.row, rows)).tolist()
            missing -= {str(named[int(row)].as_py()) for row in rows}
        stream.masked = frozenset(found)
    if missing:
        raise DataPlanError(
            "document_stream.masked_document",
            "The key 'masked' of the data plan names document {document!r}, but no token shard of the plan has "
            "this document.",
            document=min(missing),
        )


def _tables(shard: TokenShard) -> Iterator[tuple[str, dict[str, Any]]]:
    """The documents of a shard by domain, as columns of numbers; ``row`` is the row in documents.parquet."""
    documents = shard.documents
    domains = np.array(documents["domain"].to_pylist(), dtype=object)
    # not to_numpy(), which imports pandas if it is installed: a fifth of a second
    column = lambda name: np.from_dlpack(documents[name].combine_chunks())
    columns = {name: column(name) for name in ("start", "length", "supervised_tokens")}
    for domain in sorted(set(domains.tolist())):
        rows = np.flatnonzero(domains == domain)
        yield domain, {name: column[rows] for name, column in columns.items()} | {"row": rows}
