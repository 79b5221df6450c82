"""Data order: the global batch of any step is a pure function of (data plan, sampler state).

Each step draws pieces of documents until its rows can be filled. It draws from the stream (see document_stream) that is furthest behind its
share of the supervised tokens. The recipe's packing makes rows of the pieces; the rest waits for the next step. Every rank plans the whole
global batch and reads its own rows.

The state is a position and a credit for each stream, and the waiting pieces, a few bytes each. It holds nothing of other steps, so its size
does not grow with them. An order with another context continues from it. Documents that were not begun are then cut for the new rows. Of a
document that was read in part, the positions that are left follow in the same epoch, cut at the old and the new borders. Waiting pieces stay, and
are cut if they are longer than a row. After such a change the state names waiting pieces by document and token (format 3) until the epoch ends.

No piece is drawn twice in a stream's epoch. A stream that has finished an epoch waits until the other generations of its domain have
finished theirs: no document repeats before its domain's epoch ends.

The first steps of twelve texts of 4 tokens and four of 9, each domain with half of the loss, in two rows of 8 positions a
step. A row's pieces are shown as (domain, document, first token, positions):

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> import numpy as np
    >>> from trainer.contract.data.token_shard import TokenizedDocument, write_token_shard
    >>> def document(domain, i, length):
    ...     tokens = np.full(length, i, np.uint32)
    ...     return TokenizedDocument(f"{domain}-{i}", str(i), domain, "us", "MIT", tokens, np.ones(length, bool))
    >>> documents = [document("code", i, 4) for i in range(12)] + [document("docs", i, 9) for i in range(4)]
    >>> folder = TemporaryDirectory()
    >>> shard = write_token_shard(Path(folder.name), documents, vocab_size=64, tokenizer_sha256="")
    >>> planned = {"id": shard.id, "path": str(shard.path), "generation": 0}
    >>> plan = DataPlan.from_json({"token_shards": [planned], "weights": {"code": 0.5, "docs": 0.5}, "max_epochs": 2})
    >>> keywords = {"context": 8, "batch": BatchRecipe(sequences=2, packing="token-budget"), "vocab_size": 64}
    >>> order = DataOrder(plan, **keywords)
    >>> def shown(rows):
    ...     return [[(parse_stream_domain(p.stream), p.document, p.start, p.positions) for p in row] for row in rows]
    >>> shown(order.draw_next_rows())
    [[('docs', 3, 0, 8)], [('code', 9, 0, 3), ('code', 5, 0, 3)]]
    >>> state = order.state_dict()
    >>> shown(order.draw_next_rows())
    [[('code', 1, 0, 3)], [('docs', 2, 0, 8)]]
    >>> shown(DataOrder(plan, **keywords, state=state).draw_next_rows())  # resumed: the same step
    [[('code', 1, 0, 3)], [('docs', 2, 0, 8)]]
    >>> list_document_keys_at_step(DataOrder(plan, **keywords), step=1)
    ['code-1', 'docs-2']
    >>> folder.cleanup()
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.document_stream import (
    DocumentPiece,
    DocumentStream,
    ReadLayer,
    open_streams,
    parse_stream_domain,
    parse_stream_generation,
)
from trainer.contract.data.packing import STRATEGIES
from trainer.contract.data.waiting_pieces import (
    decode_pending_pieces,
    decode_pieces,
    encode_pending_pieces,
    encode_pieces,
)
from trainer.contract.errors import DataPlanError
from trainer.contract.recipe import BatchRecipe

FORMAT = 2  # of the state: waiting pieces by their places
FORMAT_OF_CHANGED_CONTEXT = 3  # and read layers; waiting pieces by document and token
REHEARSED_ROWS = 512  # rows that are packed in advance to estimate how many hold no target

Row = tuple[DocumentPiece, ...]


@dataclass
class StreamPosition:
    """The position in a stream."""

    fingerprint: str  # fingerprint of the seed and shards for which the position is valid
    joined: int  # epoch of the domain when the stream joined
    place: int  # of the next piece
    credit: float  # supervised tokens by which the stream is behind its share
    layers: tuple[ReadLayer, ...] = ()  # what was read of the present epoch with another context


class DataOrder:
    """The global batches of a plan. ``draw_next_rows`` advances by one step. ``state``: a ``state_dict`` to continue from."""

    def __init__(
        self,
        plan: DataPlan,
        *,
        context: int,
        batch: BatchRecipe,
        vocab_size: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises: DataPlanError if the plan does not fit the recipe or the state; TokenShardError for a bad shard."""
        self.plan = plan
        self.context = context
        self.batch = batch
        self.streams = open_streams(plan, context, vocab_size)
        # Generations in which documents changed domain. A state may have older streams of them; a changed stream begins anew.
        self._relabelled = {shard.generation for shard in plan.token_shards if shard.moved}
        self.domains = sorted({stream.domain for stream in self.streams.values()})
        self.step = 0
        self.documents_begun = 0  # documents whose first position was put in a batch
        self.cursors: dict[str, StreamPosition] = {}
        self.pending: list[DocumentPiece] = []  # drawn but not yet trained on, oldest first
        self.passed_over = 0  # positions of rows that this object left out because they hold no target
        self._shares: tuple[int, dict[str, float]] = -1, {}
        self._available: tuple[int, dict[str, float]] | None = None  # valid until a step or an epoch ends
        if state is not None:
            self._restore(state)
        self._join()
        for mixture in plan.list_mixtures():
            if mixture.stop > self.step and not compute_stream_shares(plan, self.streams, mixture.weights):
                raise DataPlanError(
                    "data_order.no_domain",
                    "{key}: no shard has supervised tokens of {domains}. The domains in the shards: {held}.",
                    key=mixture.key,
                    domains=sorted(mixture.weights),
                    held=self.domains or ["nothing"],
                )

    def draw_next_rows(self) -> list[Row]:
        """The rows of the next step's global batch: ``batch.count_sequences_at(step)`` of them, none empty.

        With ``plan.targets_in_every_batch`` each batch has a token that carries loss. A packing that cuts can leave a row with only a question,
        from which nothing is learned. If all rows are like that, they are passed over, and the next rows take their place.

        Raises: DataPlanError if every epoch is used up.
        """
        rows = self._pack()
        while self.plan.targets_in_every_batch and not any(piece.supervised for row in rows for piece in row):
            self.passed_over += sum(piece.positions for row in rows for piece in row)
            rows = self._pack()
        self.step += 1
        return rows

    def _pack(self) -> list[Row]:
        """Rows for the step, from the waiting pieces and new ones. Raises: DataPlanError."""
        wanted = self.batch.count_sequences_at(self.step)
        strategy = STRATEGIES[self.batch.packing]
        lengths = [piece.positions for piece in self.pending]
        waiting = sum(lengths)
        while not strategy.enough(len(lengths), waiting, self.context, wanted) and (pieces := self._draw()):
            self.pending += pieces
            lengths += [piece.positions for piece in pieces]
            waiting += sum(piece.positions for piece in pieces)
        long = [piece.document_positions > self.context for piece in self.pending]
        packed, left = strategy.pack(lengths, long, self.context, wanted, self.step)
        if len(packed) < wanted:
            raise DataPlanError(
                "data_order.data_ends",
                "max_epochs: the data ends at step {step}, because every document was used {epochs:,|time|times}. Add "
                "shards, raise max_epochs or plan fewer steps.",
                step=self.step,
                epochs=self.plan.max_epochs,
            )
        part_of = lambda part: self.streams[self.pending[part.piece].stream].cut_part_of_piece(
            self.pending[part.piece], part.start, part.positions
        )
        rows = [tuple(map(part_of, row)) for row in packed]
        self.pending = [part_of(part) for part in left]
        self.documents_begun += sum(piece.start == 0 for row in rows for piece in row)
        return rows

    def compute_current_stream_shares(self) -> dict[str, float]:
        """The share of the supervised tokens that each stream should have at this step. Streams without a share are left out."""
        if self._shares[0] != self.step:
            self._shares = (
                self.step,
                compute_stream_shares(self.plan, self.streams, self.plan.find_weights_at_step(self.step)),
            )
        return self._shares[1]

    def estimate_positions_left(self) -> int:
        """Positions that can still be drawn under the epoch cap: an upper bound of the positions that are left to train on.

        Rows that will be passed over because they hold no target are estimated and left out.
        """
        left = sum(piece.positions for piece in self.pending) + sum(
            self._left(name) for name in self.compute_current_stream_shares()
        )
        return round(left * self._kept_share())

    def _kept_share(self) -> float:
        """Share of the coming positions that are not passed over for want of targets, less two standard errors.

        Estimated by packing the next steps in a copy. Only plans with partly masked documents need that.
        """
        if not self.plan.targets_in_every_batch or not any(
            stream.has_unsupervised_tokens for stream in self.streams.values()
        ):
            return 1.0
        twin, kept, batches = self.copy_at_step(), 0, 0
        for _ in range(max(8, REHEARSED_ROWS // self.batch.sequences)):
            try:
                rows = twin.draw_next_rows()
            except DataPlanError:
                break
            kept, batches = kept + sum(piece.positions for row in rows for piece in row), batches + 1
        lost = twin.passed_over - self.passed_over
        passed = lost * batches / kept if kept else 0.0  # batches' worth
        return kept / (kept + lost * (1 + 2 / passed**0.5)) if passed else 1.0

    def _left(self, name: str) -> int:
        stream, cursor = self.streams[name], self.cursors[name]
        epochs = self.plan.max_epochs + cursor.joined - cursor.place / stream.pieces
        unread = 1.0  # share of the present epoch
        for layer in cursor.layers:
            unread *= 1 - layer.places / stream.count_pieces_with_context(layer.context)
        epochs -= (1 - unread) * (1 - cursor.place % stream.pieces / stream.pieces)
        return max(0, round(stream.positions_per_epoch * epochs))

    def count_positions_until(self, last_step: int, count_wanted: Callable[[int, int], int]) -> int:
        """The number of positions that the data can fill in the steps to ``last_step``, mixture by mixture.

        ``count_wanted(first, last)``: the number of positions in the steps [first, last). If a domain runs out, the others of its mixture take its
        share. If all run out, the run ends.
        """
        left = {name: float(self._left(name)) for name in self.streams}
        spare, filled, kept = float(sum(piece.positions for piece in self.pending)), 0.0, self._kept_share()
        left = {name: positions * kept for name, positions in left.items()}
        for mixture in self.plan.list_mixtures():
            first, last = max(self.step, mixture.start), min(last_step, mixture.stop)
            if first >= last:
                continue
            wanted = float(count_wanted(first, int(last)))
            taken = min(wanted, spare)
            spare -= taken
            shares = compute_stream_shares(self.plan, self.streams, mixture.weights)
            while wanted - taken > 0.5 and (here := {n: s for n, s in shares.items() if left[n] > 0}):
                need = wanted - taken
                for name, share in here.items():
                    part = min(left[name], need * share / sum(here.values()))
                    left[name] -= part
                    taken += part
            filled += taken
            if wanted - taken > 0.5:
                break
        return round(filled)

    def copy_at_step(self, step: int | None = None) -> DataOrder:
        """An independent copy at this step; or at ``step``, with the same next documents."""
        twin = copy.copy(self)
        twin.cursors = {name: replace(cursor) for name, cursor in self.cursors.items()}
        twin.pending = list(self.pending)
        twin.step = self.step if step is None else step
        twin._available = None
        return twin

    def copy_from_state(self, state: Mapping[str, Any]) -> DataOrder:
        """An independent copy that continues from a ``state_dict``. Raises: DataPlanError if the state does not fit."""
        twin = self.copy_at_step()
        twin.cursors = {}
        twin._restore(state)
        twin._join()
        return twin

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON values."""
        cursors = self.cursors.items()
        permuted = (
            {"reshuffled": self.plan.reshuffled} if self.plan.reshuffled else {}
        )  # older code can read a state without this key
        state = {
            "format": FORMAT,
            "step": self.step,
            "context": self.context,
            "documents_begun": self.documents_begun,
            "streams": {name: [c.fingerprint, c.joined, c.place, c.credit] for name, c in cursors},
        }
        if any(c.layers for _, c in cursors) or any(piece.place < 0 for piece in self.pending):
            layers = {name: [list(layer) for layer in c.layers] for name, c in cursors if c.layers}
            pending = encode_pieces(self.pending, list(self.cursors))
            return state | {"format": FORMAT_OF_CHANGED_CONTEXT, "layers": layers, "pending": pending} | permuted
        return state | {
            "pending": encode_pending_pieces(self.pending, {name: c.place for name, c in cursors}),
            # waiting pieces that were cut at a row's end: [index, positions already trained on]
            "begun": [[i, p.start % self.context] for i, p in enumerate(self.pending) if p.start % self.context],
            **permuted,
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        if state.get("format") not in (FORMAT, FORMAT_OF_CHANGED_CONTEXT):
            raise DataPlanError(
                "data_order.format",
                "The checkpoint's data order has format {found}, but this code reads format {expected}. Continue the run "
                "with the code that wrote the checkpoint, or begin a new run.",
                found=state.get("format", 1),
                expected=FORMAT,
            )
        self.step = state["step"]
        self.documents_begun = state["documents_begun"]
        for name, values in state["streams"].items():
            cursor = StreamPosition(*values)
            if name in self.streams and self.streams[name].fingerprint == cursor.fingerprint:
                cursor.layers = tuple(ReadLayer(*layer) for layer in state.get("layers", {}).get(name, ()))
                self.cursors[name] = cursor
            elif parse_stream_generation(name) not in self._relabelled:
                raise DataPlanError(
                    "data_order.other_shards",
                    "token_shards: domain {domain!r} of generation {generation} differs from the data that the checkpoint "
                    "was trained on. Keep these shards and the seed as they were, and add new shards as a new generation.",
                    domain=parse_stream_domain(name),
                    generation=parse_stream_generation(name),
                )
        context, reshuffled = state["context"], state.get("reshuffled", 0)
        if state["format"] == FORMAT_OF_CHANGED_CONTEXT:
            self.pending = self._decode_pieces(state["pending"], list(state["streams"]), context)
        else:
            self.pending = self._restore_pending_pieces(state, context, reshuffled)
        if context != self.context:
            for name, cursor in self.cursors.items():
                stream = self.streams[name]
                epoch, places = divmod(cursor.place, stream.count_pieces_with_context(context))
                read = (ReadLayer(context, places, reshuffled),) if places else ()
                cursor.place, cursor.layers = epoch * stream.pieces, cursor.layers + read
            self.pending = [part for piece in self.pending for part in self._cut_to_rows(piece)]

    def _restore_pending_pieces(self, state: Mapping[str, Any], context: int, reshuffled: int) -> list[DocumentPiece]:
        """The waiting pieces of a state that has their places."""
        places = {name: values[2] for name, values in state["streams"].items()}
        # Otherwise other pieces wait, and none of them is cut. Another context leaves the pieces as they were.
        same = reshuffled == self.plan.reshuffled or context != self.context
        begun = dict(state["begun"]) if same else {}
        found = []
        for i, (name, place) in enumerate(decode_pending_pieces(state["pending"], places)):
            if name in self.cursors:  # otherwise its stream begins anew
                stream = self.streams[name]
                if context == self.context:
                    piece = stream.find_piece_at(place)
                else:
                    piece = stream.find_piece_of_layer(place, ReadLayer(context, 0, reshuffled))
                start = begun.get(i, 0)
                found.append(stream.cut_part_of_piece(piece, start, piece.positions - start))
        return found

    def _decode_pieces(self, text: str, streams: list[str], context: int) -> list[DocumentPiece]:
        """The waiting pieces of a state that has their documents. Its places count pieces of ``context`` positions."""
        found = []
        for name, place, document, start, positions in decode_pieces(text, streams):
            if name in self.cursors:  # otherwise its stream begins anew
                stream = self.streams[name]
                if context != self.context:
                    epoch = max(place, ~place) // stream.count_pieces_with_context(context)
                    place = ~(epoch * stream.pieces)
                found.append(stream.make_piece(place, document, start, positions))
        return found

    def _cut_to_rows(self, piece: DocumentPiece) -> list[DocumentPiece]:
        """The piece in parts that fit a row."""
        cut, context = self.streams[piece.stream].cut_part_of_piece, self.context
        return [
            cut(piece, start, min(context, piece.positions - start)) for start in range(0, piece.positions, context)
        ]

    def _join(self) -> None:
        """Streams that the state lacks begin at the epoch of the others of their domain."""
        for name, stream in self.streams.items():
            if name not in self.cursors:
                others = [self._epoch(n) for n in self.cursors if parse_stream_domain(n) == stream.domain]
                epoch = min(others, default=0)
                self.cursors[name] = StreamPosition(stream.fingerprint, epoch, epoch * stream.pieces, 0.0)

    def _epoch(self, name: str) -> int:
        return self.cursors[name].place // self.streams[name].pieces

    def _draw(self) -> list[DocumentPiece]:
        """The next piece that carries loss, from the stream furthest behind: more than one if its middle was read before with another context.
        Empty if all are used up."""
        while available := self._may_draw():
            name = max(available, key=lambda n: (self.cursors[n].credit, n))
            stream, cursor = self.streams[name], self.cursors[name]
            pieces = [piece for piece in stream.find_pieces_left_at(cursor.place, cursor.layers) if piece.supervised]
            cursor.place += 1
            if cursor.place % stream.pieces == 0:
                cursor.layers = ()
                self._available = None
            if pieces:
                supervised = sum(piece.supervised for piece in pieces)
                for other, share in available.items():
                    self.cursors[other].credit += supervised * share
                cursor.credit -= supervised
                return pieces
        return []

    def _may_draw(self) -> dict[str, float]:
        """The streams that may be drawn from, each with its present share. The shares sum to one.

        A waiting stream's share goes to its domain.
        """
        if self._available is not None and self._available[0] == self.step:
            return self._available[1]
        found: dict[str, float] = {}
        shares = self.compute_current_stream_shares()
        by_domain: dict[str, list[str]] = {}
        for name in shares:
            if self._epoch(name) - self.cursors[name].joined < self.plan.max_epochs:
                by_domain.setdefault(parse_stream_domain(name), []).append(name)
        for domain, names in by_domain.items():
            epoch = min(map(self._epoch, names))
            ready = {n: shares[n] for n in names if self._epoch(n) == epoch}
            whole = sum(share for n, share in shares.items() if parse_stream_domain(n) == domain)
            part = sum(ready.values())
            found |= {n: (share / part if part > 0 else 1 / len(ready)) * whole for n, share in ready.items()}
        total = sum(found.values())
        found = {name: share / total for name, share in found.items()}
        self._available = self.step, found
        return found


def list_document_keys_at_step(order: DataOrder, step: int) -> list[str]:
    """Sorted keys of the documents in a step's global batch. ``order`` must be at or before that step, and is moved past it."""
    assert order.step <= step
    while order.step < step:
        order.draw_next_rows()
    return list_document_keys(order, order.draw_next_rows())


def list_document_keys(order: DataOrder, rows: list[Row]) -> list[str]:
    """Sorted keys of the documents in the rows."""
    return sorted({order.streams[p.stream].look_up_document_key(p.document) for row in rows for p in row})


def compute_stream_shares(
    plan: DataPlan, streams: Mapping[str, DocumentStream], weights: Mapping[str, float]
) -> dict[str, float]:
    """The share of each stream that holds data: the domain's weight × the generation's share of the domain. The shares sum to one."""
    size = dict.fromkeys((stream.domain for stream in streams.values()), 0)
    for stream in streams.values():
        size[stream.domain] += stream.supervised_tokens
    others = sum(n for domain, n in size.items() if domain not in weights)
    shares: dict[str, float] = {}
    for domain, tokens in size.items():
        weight = weights[domain] if domain in weights else weights.get("*", 0.0) * tokens / max(1, others)
        held = {n: s.supervised_tokens for n, s in streams.items() if s.domain == domain and s.supervised_tokens}
        if weight <= 0 or not held:
            continue
        newest = max(held, key=parse_stream_generation)
        older = sum(held.values()) - held[newest]
        has_new = parse_stream_generation(newest) == max(shard.generation for shard in plan.token_shards)
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
