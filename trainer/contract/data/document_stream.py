"""A document stream: the pieces (see packing) of one domain of one generation, in a keyed random order, epoch by epoch.

A *place* counts the pieces of all epochs: place p is piece p % pieces of epoch p // pieces. The piece at a place follows from the place alone,
so a checkpoint keeps only the places.

If ``model.context`` changes within an epoch, documents are cut into other pieces, and the epoch is walked again from its first place. What was
read before is left out: a ``ReadLayer`` says up to which place the epoch was walked with another context, and whether a position was read follows
from that alone. So each position is drawn once an epoch, however often the context changes.

The numbers of the documents stay in the shards' mapped files. A stream itself keeps a quarter of a byte a document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.document_columns import AT_ONCE, DomainDocuments, PieceIndex, group_by_value, hash_keys
from trainer.contract.data.packing import count_pieces
from trainer.contract.data.permutation import BLOCK, Permutation
from trainer.contract.data.token_shard import TokenShard, format_row_ranges
from trainer.contract.errors import DataPlanError, TokenShardError

READ_AT_ONCE = 1 << 24  # tokens whose masks are read together


class DocumentPiece(NamedTuple):
    """Some neighbouring positions of one document."""

    stream: str
    place: int  # ~place for a piece of an epoch in which the context changed: its place does not say which positions it has
    document: int  # index in the stream
    start: int  # first token, in the document
    positions: int
    supervised: int  # positions whose target carries loss
    shard: int  # index in the stream
    first: int  # first token, in the shard
    document_positions: int  # of the whole document


class ReadLayer(NamedTuple):
    """The first ``places`` places of the present epoch were drawn in pieces of ``context`` positions, in this order of the pieces."""

    context: int
    places: int
    reshuffled: int  # the plan's key at that time


class StoredDocument(NamedTuple):
    """Where the tokens of a document lie."""

    shard: TokenShard
    start: int
    length: int


Pieces = list[
    tuple[int, int, int, int, int, bool, int]
]  # document, start, positions, shard, first, unmasked, document's positions


class DocumentStream:
    """The documents of one domain of one generation, and their pieces by place."""

    def __init__(
        self,
        name: str,
        plan: DataPlan,
        shards: list[TokenShard],
        parts: list[DomainDocuments],
        context: int,
        identities: list[str],
    ) -> None:
        self.name = name
        self.domain = parse_stream_domain(name)
        self.seed = plan.seed
        self.shards = shards
        self.context = context
        self.reshuffled = plan.reshuffled  # not part of the fingerprint, so that a cursor stays valid
        self.masked: frozenset[int] = frozenset()  # documents that the plan masks: they are counted, but have no weight
        self.documents = sum(part.count for part in parts)
        self.longest = max((part.total.longest for part in parts), default=0)  # tokens
        self.supervised_tokens = sum(part.total.supervised_tokens for part in parts)
        self.has_unsupervised_tokens = self.supervised_tokens < sum(part.total.tokens for part in parts)
        self.fingerprint = hashlib.sha256(":".join([str(plan.seed), *identities]).encode()).hexdigest()[:16]
        self._parts = parts
        self._first_document = np.cumsum([0, *(part.count for part in parts)])
        self._indices: dict[int, PieceIndex] = {}
        self.pieces = self._index(context).pieces
        self._tokens: list[npt.NDArray[Any] | None] = [None] * len(shards)
        self._orders: dict[tuple[int, int, int], Permutation] = {}
        self._block: tuple[tuple[int, int] | None, Pieces] = None, []
        self._left_block: tuple[Any, list[list[DocumentPiece]]] = None, []

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
            places = np.arange(block * BLOCK, min(self.pieces, (block + 1) * BLOCK), dtype=np.uint64)
            self._block = (epoch, block), self._cut(places, epoch, self.context, self.reshuffled)
        return self._make_piece(place, *self._block[1][offset])

    def find_pieces_left_at(self, place: int, layers: tuple[ReadLayer, ...]) -> list[DocumentPiece]:
        """The parts of the piece at a place that were not read in this epoch with another context, in the order of their positions."""
        if not layers:
            return [self.find_piece_at(place)]
        epoch, index = divmod(place, self.pieces)
        block, offset = divmod(index, BLOCK)
        if self._left_block[0] != (epoch, block, layers):
            places = np.arange(block * BLOCK, min(self.pieces, (block + 1) * BLOCK), dtype=np.uint64)
            whole = self._cut(places, epoch, self.context, self.reshuffled)
            left = self._leave_out_what_was_read(whole, epoch, layers)
            first = self.pieces * epoch + block * BLOCK
            found = [[self._make_piece(~(first + i), *part) for part in parts] for i, parts in enumerate(left)]
            self._left_block = (epoch, block, layers), found
        return self._left_block[1][offset]

    def find_piece_of_layer(self, place: int, layer: ReadLayer) -> DocumentPiece:
        """The piece at a place as it was when the context and the order were those of a layer, with a ``~place`` of this context."""
        pieces = self._index(layer.context).pieces
        epoch, index = divmod(place, pieces)
        (cut,) = self._cut(np.array([index], np.uint64), epoch, layer.context, layer.reshuffled)
        return self._make_piece(~(epoch * self.pieces), *cut)

    def count_pieces_with_context(self, context: int) -> int:
        """The number of pieces of an epoch if rows had this many positions."""
        return self._index(context).pieces

    def find_epoch(self, piece: DocumentPiece) -> int:
        """The epoch of a piece of this stream."""
        return max(piece.place, ~piece.place) // self.pieces

    def make_piece(self, place: int, document: int, start: int, positions: int) -> DocumentPiece:
        """Positions [start, start + positions) of a document. Raises: DataPlanError if the document has no such positions."""
        if not 0 <= document < self.documents:
            raise _make_unknown_position_error(self.name, document, start)
        stored, shard = self.find_document(document), self._find_shard(document)
        if not 0 <= start < start + positions < stored.length:
            raise _make_unknown_position_error(self.name, document, start)
        return self._make_piece(
            place, document, start, positions, shard, stored.start + start, False, stored.length - 1
        )

    def cut_part_of_piece(self, piece: DocumentPiece, start: int, positions: int) -> DocumentPiece:
        """The positions [start, start + positions) of a piece."""
        if (start, positions) == (0, piece.positions):
            return piece
        supervised = positions
        if piece.supervised < piece.positions:
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

    def find_document(self, document: int) -> StoredDocument:
        """Where a document lies."""
        start, length = (int(values[0]) for values in self._take(np.array([document]), "start", "length"))
        return StoredDocument(self.shards[self._find_shard(document)], start, length)

    def look_up_document_key(self, document: int) -> str:
        (row,) = self._take(np.array([document]), "row")
        return self.shards[self._find_shard(document)].columns.read_key(int(row[0]))

    def find_documents_in_rows(self, shard: int, rows: npt.NDArray[np.int64]) -> list[int]:
        """The documents of the stream that lie in these rows of a shard's documents.parquet. ``shard``: its index in the stream."""
        return (self._parts[shard].find_documents_in_rows(rows) + self._first_document[shard]).tolist()

    def find_places_of_documents(self, documents: Iterable[int], epoch: int) -> npt.NDArray[np.int64]:
        """The places of an epoch that hold pieces of these documents, in no order."""
        asked = np.array(sorted(documents), np.int64)
        (length,) = self._take(asked, "length")
        pieces = count_pieces(length.astype(np.int64), self.context)
        first = np.repeat(self._index(self.context).find_first_pieces(asked), pieces)
        flat = first + np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        found = self._permutation(epoch, self.context, self.reshuffled).indices_of(flat.astype(np.uint64))
        return found.astype(np.int64) + epoch * self.pieces

    def _find_shard(self, document: int) -> int:
        return int(np.searchsorted(self._first_document, document, side="right")) - 1

    def _take(self, documents: npt.NDArray[np.int64], *names: str) -> tuple[npt.NDArray[np.int64], ...]:
        """Columns of documents, each [N]."""
        found = tuple(np.zeros(len(documents), np.int64) for _ in names)
        part = np.searchsorted(self._first_document, documents, side="right") - 1
        for number, here in group_by_value(part):
            local = documents[here] - self._first_document[number]
            for name, values in zip(names, found):
                values[here] = self._parts[number].take(name, local)
        return found

    def _index(self, context: int) -> PieceIndex:
        if context not in self._indices:
            self._indices[context] = PieceIndex(self._parts, context)
        return self._indices[context]

    def _permutation(self, epoch: int, context: int, reshuffled: int) -> Permutation:
        wanted = epoch, context, reshuffled
        if wanted not in self._orders:
            again = f"/{reshuffled}" if reshuffled else ""
            order = Permutation(self._index(context).pieces, f"{self.seed}/{self.name}/{epoch}{again}")
            self._orders = {key: held for key, held in self._orders.items() if key[0] == epoch} | {wanted: order}
        return self._orders[wanted]

    def _cut(self, places: npt.NDArray[np.uint64], epoch: int, context: int, reshuffled: int) -> Pieces:
        """The pieces at some places of an epoch. ``places``: counted from 0 in each epoch."""
        flat = self._permutation(epoch, context, reshuffled).values_at(places).astype(np.int64)
        document, number, length = self._index(context).find_documents(flat)
        (begins,) = self._take(document, "start")
        supervised = length
        if self.has_unsupervised_tokens:
            (supervised,) = self._take(document, "supervised_tokens")
        start = number * context
        columns: tuple[npt.NDArray[Any], ...] = (
            document,
            start,
            np.minimum(context, length - 1 - start),
            np.searchsorted(self._first_document, document, side="right") - 1,
            begins + start,
            supervised == length,
            length - 1,
        )
        return list(zip(*(column.tolist() for column in columns)))

    def _make_piece(
        self, place: int, document: int, start: int, positions: int, shard: int, first: int, unmasked: bool, whole: int
    ) -> DocumentPiece:
        supervised = positions if unmasked else self.count_supervised_targets(shard, first, positions)
        return DocumentPiece(self.name, place, document, start, positions, supervised, shard, first, whole)

    def _leave_out_what_was_read(self, whole: Pieces, epoch: int, layers: tuple[ReadLayer, ...]) -> list[Pieces]:
        """For each piece, the parts of it that no layer has read."""
        document, start, positions = (np.array([piece[i] for piece in whole], np.int64) for i in range(3))
        read: list[list[tuple[int, int]]] = [[] for _ in whole]
        for layer in layers:
            first = start // layer.context
            count = (start + positions - 1) // layer.context - first + 1
            piece = np.repeat(np.arange(len(whole)), count)
            number = np.repeat(first, count) + np.arange(len(piece)) - np.repeat(np.cumsum(count) - count, count)
            flat = self._index(layer.context).find_first_pieces(document)[piece] + number
            places = self._permutation(epoch, layer.context, layer.reshuffled).indices_of(flat.astype(np.uint64))
            for i in np.flatnonzero(places < layer.places).tolist():
                begin = int(number[i]) * layer.context
                read[int(piece[i])].append((begin, begin + layer.context))
        return [list(_subtract(piece, sorted(spans))) for piece, spans in zip(whole, read)]


def _subtract(piece: tuple[int, int, int, int, int, bool, int], spans: list[tuple[int, int]]) -> Iterable[Any]:
    """The parts of a piece outside of sorted spans of its document's positions."""
    document, at, positions, shard, first, unmasked, whole = piece
    end = at + positions
    begin = at - first  # constant along the document
    for low, high in [*spans, (end, end)]:
        if at < min(low, end):
            yield document, at, min(low, end) - at, shard, at - begin, unmasked, whole
        at = max(at, high)


def _make_unknown_position_error(stream: str, document: int, start: int) -> DataPlanError:
    return DataPlanError(
        "document_stream.no_position",
        "The checkpoint's data order names document {document} of {stream}, from token {start} on, but the shards have no such tokens. "
        "Continue from another checkpoint.",
        stream=stream,
        document=document,
        start=start,
    )


@lru_cache(maxsize=1 << 14)  # the daemon asks again and again, and a shard never changes
def count_positions_with_loss(path: str, domain: str, context: int, moved: tuple[tuple[str, str], ...] = ()) -> int:
    """Positions of a token shard's documents of a domain that lie in pieces which carry loss. ``moved``: (domain, rows), as in ``TokenShard``.

    All pieces of unmasked documents carry loss. The masks of the others are read, ``READ_AT_ONCE`` tokens at a time.
    """
    shard = TokenShard(path, dict(moved))
    documents = shard.domains[domain]
    found = documents.total.tokens - documents.count
    if documents.total.supervised_tokens < documents.total.tokens:
        for first in range(0, documents.count, AT_ONCE):
            found -= _count_positions_without_loss(shard, documents, context, first)
    return found


def _count_positions_without_loss(shard: TokenShard, documents: DomainDocuments, context: int, first: int) -> int:
    """Positions in pieces without loss, of at most ``AT_ONCE`` documents."""
    names = ("start", "length", "supervised_tokens")
    start, length, supervised = (
        documents.read_between(name, first, first + AT_ONCE).astype(np.int64) for name in names
    )
    masked = np.flatnonzero((supervised < length) & (length > 1))
    found = 0
    while len(masked):
        ends = start[masked] + length[masked]
        count = max(1, int(np.searchsorted(ends, start[masked[0]] + READ_AT_ONCE)))
        block, masked = masked[:count], masked[count:]
        begins = int(start[block[0]])
        before = np.concatenate(([0], np.cumsum(shard.read_loss_mask(begins, int(ends[count - 1])), dtype=np.int64)))
        pieces = count_pieces(length[block], context)
        number = np.arange(pieces.sum()) - np.repeat(
            np.cumsum(pieces) - pieces, pieces
        )  # the number of each piece in its document
        stop = np.repeat(length[block] - 1, pieces)
        begin = number * context
        positions = np.minimum(context, stop - begin)
        target = np.repeat(start[block] - begins, pieces) + begin + 1
        found += int(positions[before[target + positions] == before[target]].sum())
    return found


def parse_stream_domain(stream: str) -> str:
    """The domain in a stream's name, ``domain/generation``."""
    return stream.rpartition("/")[0]


def parse_stream_generation(stream: str) -> int:
    """The generation in a stream's name, ``domain/generation``."""
    return int(stream.rpartition("/")[2])


def open_streams(plan: DataPlan, context: int, vocab_size: int) -> dict[str, DocumentStream]:
    """The streams of a plan by name, ``domain/generation``. Raises: DataPlanError, also for a weight without documents; TokenShardError."""
    groups: dict[str, tuple[list[TokenShard], list[DomainDocuments], list[str]]] = {}
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
        for domain, documents in shard.domains.items():
            shards, parts, identities = groups.setdefault(f"{domain}/{planned.generation}", ([], [], []))
            shards.append(shard)
            parts.append(documents)
            # the shard's own id also if its content was replaced, and if no document of this domain moved: cursors stay valid
            rows = "" if documents.is_own else format_row_ranges(documents.read_between("row", 0, documents.count))
            identities.append(f"{planned.id} {rows}".rstrip())
    plan.refuse_missing_domains({parse_stream_domain(name) for name in groups})
    streams = {
        name: DocumentStream(name, plan, shards, parts, context, identities)
        for name, (shards, parts, identities) in sorted(groups.items())
    }
    if plan.masked:
        _mask(streams, set(plan.masked))
    return {name: stream for name, stream in streams.items() if stream.pieces}


def _mask(streams: dict[str, DocumentStream], keys: set[str]) -> None:
    """Mask documents in their streams. Raises: DataPlanError for a document that no shard holds."""
    unsorted = sorted(keys)
    hashes = hash_keys(unsorted)
    order = np.argsort(hashes, kind="stable")  # neighbours are looked up in neighbouring pages
    wanted, hashes, missing = [unsorted[i] for i in order.tolist()], hashes[order], set(keys)
    rows_by_shard: dict[str, npt.NDArray[np.int64]] = {}
    for stream in streams.values():
        found: list[int] = []
        for number, shard in enumerate(stream.shards):
            if shard.id not in rows_by_shard:
                rows = shard.columns.find_rows_of_keys(wanted, hashes)
                missing -= {key for key, _ in rows}
                rows_by_shard[shard.id] = np.array(sorted(row for _, row in rows), np.int64)
            if len(rows_by_shard[shard.id]):
                found += stream.find_documents_in_rows(number, rows_by_shard[shard.id])
        stream.masked = frozenset(found)
    if missing:
        raise DataPlanError(
            "document_stream.masked_document",
            "The key 'masked' of the data plan names document {document!r}, but no token shard of the plan has "
            "this document.",
            document=min(missing),
        )
