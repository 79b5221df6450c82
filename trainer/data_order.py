"""Data order: the global batch of any step is a pure function of (data plan, sampler state).

A *stream* is the pieces (see packing) of one domain of one generation, walked in a keyed random order, epoch by epoch.
Each step draws pieces until its rows can be filled, always from the stream that lags furthest behind its share of the
supervised tokens, packs them best-fit, and keeps what is left over for the next step. The state is a cursor, an epoch
and a credit for each stream, and the few pieces left over. Every rank plans the whole global batch and reads its rows.

No piece is drawn twice in a stream's epoch, and a stream that has finished an epoch waits for the other generations of
its domain to finish theirs: no document repeats before its domain's epoch ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data_plan import DataPlan
from trainer.errors import DataPlanError
from trainer.packing import choose_rows, cut
from trainer.permutation import Permutation
from trainer.token_shard import TokenShard, TokenShardError

SPARE_ROWS = 16  # rows' worth of pieces that packing may choose from beyond those it fills
OLDEST_EVERY = 8  # steps; then the piece that has waited longest goes, whatever its row's fill


@dataclass(frozen=True)
class Piece:
    """Some neighbouring positions of one document."""

    stream: str
    document: int  # index in the stream
    index: int  # which piece of its document
    start: int  # first token, in the document
    positions: int
    supervised: int  # positions whose target carries loss


Row = tuple[Piece, ...]


class Stream:
    """One domain of one generation: where its documents lie, and which piece comes at which place of an epoch."""

    def __init__(
        self, name: str, seed: int, shards: list[TokenShard], tables: list[dict[str, Any]], context: int
    ) -> None:
        self.name = name
        self.seed = seed
        self.shards = shards
        self.context = context
        self.shard = np.concatenate([np.full(len(t["start"]), i, np.int32) for i, t in enumerate(tables)])
        self.start = np.concatenate([t["start"] for t in tables])
        self.length = np.concatenate([t["length"] for t in tables])
        self.row = np.concatenate([t["row"] for t in tables])
        self.supervised_tokens = int(sum(t["supervised_tokens"].sum() for t in tables))
        # the number of pieces of a document: packing.pieces_in, for all of them at once
        self.ends = np.cumsum(np.maximum(0, -(-(self.length - 1) // context)))
        self.pieces = int(self.ends[-1]) if len(self.ends) else 0
        self.positions = int(np.maximum(0, self.length - 1).sum())
        self.fingerprint = hashlib.sha256(":".join([str(seed), *(s.id for s in shards)]).encode()).hexdigest()[:16]
        self._epoch = -1
        self._order: Permutation | None = None

    def piece_at(self, epoch: int, cursor: int) -> Piece:
        """The piece at a place of an epoch's order."""
        if epoch != self._epoch or self._order is None:
            self._epoch, self._order = epoch, Permutation(self.pieces, f"{self.seed}/{self.name}/{epoch}")
        flat = self._order[cursor]
        document = int(np.searchsorted(self.ends, flat, side="right"))
        before = int(self.ends[document - 1]) if document else 0
        return self.piece(document, flat - before)

    def piece(self, document: int, index: int) -> Piece:
        part = cut(int(self.length[document]), self.context, index)
        mask = self.target_mask(document, part.start, part.positions)
        return Piece(self.name, document, index, part.start, part.positions, int(mask.sum()))

    def target_mask(self, document: int, start: int, positions: int) -> npt.NDArray[np.bool_]:
        first = int(self.start[document]) + start + 1
        return self.shards[self.shard[document]].loss_mask(first, first + positions)

    def tokens(self, document: int, start: int, positions: int) -> npt.NDArray[Any]:
        """``positions`` + 1 tokens: the inputs, and one further for the targets."""
        first = int(self.start[document]) + start
        return self.shards[self.shard[document]].tokens[first : first + positions + 1]

    def key(self, document: int) -> str:
        table = self.shards[self.shard[document]].documents
        return str(table["key"][int(self.row[document])].as_py())


@dataclass
class Cursor:
    """Where a stream stands."""

    fingerprint: str  # of the seed and the shards that the cursor counts in
    joined: int  # epoch of the domain when the stream joined
    epoch: int
    next: int  # place in the epoch's order of the next piece
    credit: float  # supervised tokens the stream lags behind its share


class DataOrder:
    """Walks the plan. ``next_rows`` moves one step on; ``state_dict`` is all it takes to go on from here."""

    def __init__(
        self, plan: DataPlan, *, context: int, rows: int, vocab_size: int, state: dict[str, Any] | None = None
    ):
        """Raises: DataPlanError when the plan doesn't fit the recipe or the state; TokenShardError for a bad shard."""
        self.plan = plan
        self.context = context
        self.rows = rows
        self.streams = open_streams(plan, context, vocab_size)
        self.domains = sorted({domain_of(name) for name in self.streams})
        self.step = 0
        self.documents_begun = 0  # documents whose first piece was put in a batch
        self.cursors: dict[str, Cursor] = {}
        self.pending: list[Piece] = []
        self._shares_step = -1
        self._shares: dict[str, float] = {}
        if state is not None:
            self._restore(state)
        for name, stream in self.streams.items():
            if name not in self.cursors:
                others = [c.epoch for n, c in self.cursors.items() if domain_of(n) == domain_of(name)]
                epoch = min(others, default=0)
                self.cursors[name] = Cursor(stream.fingerprint, epoch, epoch, 0, 0.0)
        if not self.shares():
            raise DataPlanError(
                f"weights: none of {', '.join(sorted(plan.weights_at(self.step)))} names a domain with supervised "
                f"tokens; the shards hold: {', '.join(self.domains) or 'nothing'}"
            )

    def next_rows(self) -> list[Row]:
        """The rows of the next step's global batch. Raises: DataPlanError when every epoch is used up."""
        wanted = (self.rows + SPARE_ROWS) * self.context
        waiting = sum(piece.positions for piece in self.pending)
        while waiting < wanted and (piece := self._draw()) is not None:
            self.pending.append(piece)
            waiting += piece.positions
        lengths = [piece.positions for piece in self.pending]
        packed, left = choose_rows(lengths, self.context, self.rows, take_oldest=self.step % OLDEST_EVERY == 0)
        if len(packed) < self.rows:
            raise DataPlanError(
                f"max_epochs: the data ends at step {self.step}: every document was seen {self.plan.max_epochs} times; "
                "add shards, raise max_epochs or plan fewer steps"
            )
        rows = [tuple(self.pending[i] for i in row) for row in packed]
        self.pending = [self.pending[i] for i in left]
        self.documents_begun += sum(piece.index == 0 for row in rows for piece in row)
        self.step += 1
        return rows

    def shares(self) -> dict[str, float]:
        """Share of the supervised tokens that each stream should have at this step; those with none are left out."""
        if self._shares_step != self.step:
            self._shares_step, self._shares = self.step, stream_shares(self.plan, self.streams, self.step)
        return self._shares

    def positions_left(self) -> int:
        """Positions that can still be drawn under the epoch cap: an upper bound on what is left to train on."""
        left = sum(piece.positions for piece in self.pending)
        for name in self.shares():
            stream, cursor = self.streams[name], self.cursors[name]
            epochs = self.plan.max_epochs - (cursor.epoch - cursor.joined)
            left += max(0, round(stream.positions * (epochs - cursor.next / stream.pieces)))
        return left

    def state_dict(self) -> dict[str, Any]:
        """JSON values only."""
        return {
            "step": self.step,
            "context": self.context,
            "documents_begun": self.documents_begun,
            "streams": {n: [c.fingerprint, c.joined, c.epoch, c.next, c.credit] for n, c in self.cursors.items()},
            "pending": [[piece.stream, piece.document, piece.index] for piece in self.pending],
        }

    def _restore(self, state: dict[str, Any]) -> None:
        if state["context"] != self.context:
            raise DataPlanError(f"model.context is {self.context}, the checkpoint's order cut at {state['context']}")
        self.step = state["step"]
        self.documents_begun = state["documents_begun"]
        for name, values in state["streams"].items():
            cursor = Cursor(*values)
            if name not in self.streams or self.streams[name].fingerprint != cursor.fingerprint:
                raise DataPlanError(
                    f"token_shards: {name.rpartition('/')[0]!r} of generation {name.rpartition('/')[2]} is not what "
                    "the checkpoint was trained on; shards may only be added, as a new generation, and the seed stays"
                )
            self.cursors[name] = cursor
        self.pending = [self.streams[n].piece(document, index) for n, document, index in state["pending"]]

    def _draw(self) -> Piece | None:
        """The next piece that carries loss, from the stream furthest behind. None when all are used up."""
        while available := self._available():
            name = max(available, key=lambda n: (self.cursors[n].credit, n))
            stream, cursor = self.streams[name], self.cursors[name]
            piece = stream.piece_at(cursor.epoch, cursor.next)
            cursor.next += 1
            if cursor.next == stream.pieces:
                cursor.epoch, cursor.next = cursor.epoch + 1, 0
            if piece.supervised:
                total = sum(available.values())
                for other, share in available.items():
                    self.cursors[other].credit += piece.supervised * share / total
                cursor.credit -= piece.supervised
                return piece
        return None

    def _available(self) -> dict[str, float]:
        """Streams that may be drawn from, with the share each has now: a waiting stream's share goes to its domain."""
        found: dict[str, float] = {}
        shares = self.shares()
        by_domain: dict[str, list[str]] = {}
        for name in shares:
            cursor = self.cursors[name]
            if cursor.epoch - cursor.joined < self.plan.max_epochs:
                by_domain.setdefault(domain_of(name), []).append(name)
        for domain, names in by_domain.items():
            epoch = min(self.cursors[n].epoch for n in names)
            ready = {n: shares[n] for n in names if self.cursors[n].epoch == epoch}
            whole = sum(share for n, share in shares.items() if domain_of(n) == domain)
            part = sum(ready.values())
            found |= {n: (share / part if part > 0 else 1 / len(ready)) * whole for n, share in ready.items()}
        return found


def documents_of(order: DataOrder, step: int) -> list[str]:
    """Keys of the documents in a step's global batch. ``order`` stands at or before it, and is moved past it."""
    assert order.step <= step
    while order.step < step:
        order.next_rows()
    return document_keys(order, order.next_rows())


def document_keys(order: DataOrder, rows: list[Row]) -> list[str]:
    """Sorted keys of the documents that rows are made of."""
    return sorted({order.streams[p.stream].key(p.document) for row in rows for p in row})


def domain_of(stream: str) -> str:
    return stream.rpartition("/")[0]


def stream_shares(plan: DataPlan, streams: dict[str, Stream], step: int) -> dict[str, float]:
    """Domain weight × share of the generation within the domain, over the streams that hold data; sums to one."""
    weights = plan.weights_at(step)
    size = dict.fromkeys(map(domain_of, streams), 0)
    for name, stream in streams.items():
        size[domain_of(name)] += stream.supervised_tokens
    others = sum(n for domain, n in size.items() if domain not in weights)
    shares: dict[str, float] = {}
    for domain, tokens in size.items():
        weight = weights[domain] if domain in weights else weights.get("*", 0.0) * tokens / max(1, others)
        held = {n: s.supervised_tokens for n, s in streams.items() if domain_of(n) == domain and s.supervised_tokens}
        if weight <= 0 or not held:
            continue
        newest = max(held, key=lambda n: int(n.rpartition("/")[2]))
        older = sum(held.values()) - held[newest]
        has_new = int(newest.rpartition("/")[2]) == max(shard.generation for shard in plan.token_shards)
        for name, count in held.items():
            if not older:
                share = 1.0
            elif not has_new:  # nothing new in this domain: all of it by size
                share = count / sum(held.values())
            else:
                share = 1 - plan.replay if name == newest else plan.replay * count / older
            shares[name] = weight * share
    total = sum(shares.values())
    return {name: share / total for name, share in shares.items()} if total > 0 else {}


def open_streams(plan: DataPlan, context: int, vocab_size: int) -> dict[str, Stream]:
    """Streams by name, ``domain/generation``. Raises: DataPlanError, TokenShardError."""
    groups: dict[str, tuple[list[TokenShard], list[dict[str, Any]]]] = {}
    for planned in sorted(plan.token_shards, key=lambda shard: (shard.generation, shard.id)):
        shard = TokenShard(planned.path)
        if shard.manifest["vocab_size"] > vocab_size:
            raise DataPlanError(
                f"model.vocab_size is {vocab_size}, token shard {shard.id} was made with {shard.manifest['vocab_size']}"
            )
        if shard.id != planned.id:
            raise TokenShardError(f"{planned.path}: the plan names token shard {planned.id}")
        for domain, table in _tables(shard):
            shards, tables = groups.setdefault(f"{domain}/{planned.generation}", ([], []))
            shards.append(shard)
            tables.append(table)
    streams = {name: Stream(name, plan.seed, *group, context) for name, group in sorted(groups.items())}
    return {name: stream for name, stream in streams.items() if stream.pieces}


def _tables(shard: TokenShard) -> Iterator[tuple[str, dict[str, Any]]]:
    """The documents of a shard by domain, as columns of numbers; ``row`` is the row in documents.parquet."""
    documents = shard.documents
    domains = np.array(documents["domain"].to_pylist(), dtype=object)
    columns = {name: documents[name].to_numpy() for name in ("start", "length", "supervised_tokens")}
    for domain in sorted(set(domains.tolist())):
        rows = np.flatnonzero(domains == domain)
        yield domain, {name: column[rows] for name, column in columns.items()} | {"row": rows}
