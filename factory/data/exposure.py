"""Computes from the data order at which steps segments were trained on documents.

Between two checkpoints, a document was drawn only in two cases: one of its pieces has a place between the checkpoints' cursors, or waited at the
first checkpoint. This test does not replay the data order, for any number of documents. Only the steps between two checkpoints where a document was
drawn are replayed. The module trusts the state of the data order in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factory.core.errors import FactoryError
from factory.data.metrics import read_metrics
from factory.ledger.ledger import Ledger
from factory.ledger.removals import replace_erased_token_shards
from factory.ledger.rows import IMPORT, SegmentRow, SqlReader
from factory.training.planning import read_data_plan, read_last_checkpoint
from trainer.contract.checkpoint.format import list_checkpoints, read_checkpoint_state
from trainer.contract.data.data_order import DataOrder
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.errors import TrainerError
from trainer.contract.recipe import Recipe

MALFORMED_STATE_ERRORS = (
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    AssertionError,
)  # errors of a malformed state
SamplerState = Mapping[str, Any] | None


class UnknownExposureError(FactoryError):
    """The data order of a segment cannot be computed any more."""


@dataclass(frozen=True)
class ExposureStep:
    """One training step on a document or on a part of it."""

    segment: int
    step: int
    epoch: int  # counted from 0 for the document's domain and generation


class DocumentExposure:
    """Finds the steps that trained on some documents. ``documents`` maps the key of each document to the id of its token shard."""

    def __init__(self, ledger: Ledger, documents: Mapping[str, str]) -> None:
        self.ledger, self.documents = ledger, documents
        self._orders: dict[str, DataOrder] = {}
        self._ends: dict[int, SamplerState] = {}

    def list_steps_by_document(self, segment: SegmentRow) -> dict[str, list[ExposureStep]]:
        """Return, for each document's key, the steps of a segment that trained on the document, in order. Raises: UnknownExposureError."""
        found: dict[str, list[ExposureStep]] = {}
        for seen, key in self.iterate_steps(segment):
            if seen not in found.setdefault(key, []):
                found[key].append(seen)
        return found

    def find_first_step(self, segment: SegmentRow) -> int | None:
        """Return the first step of a segment that trained on any of the documents. Raises: UnknownExposureError."""
        return next((seen.step for seen, _ in self.iterate_steps(segment)), None)

    def iterate_steps(self, segment: SegmentRow) -> Iterator[tuple[ExposureStep, str]]:
        """Yield (step, key of the document) in the order of the steps of a segment. Raises: UnknownExposureError."""
        try:
            yield from self._each(segment)
        except (TrainerError, OSError, *MALFORMED_STATE_ERRORS) as error:
            raise UnknownExposureError(
                "data.order_unknown",
                "the data order of segment {segment} cannot be computed: {error}",
                segment=segment.id,
                error=error,
            ) from error

    def _each(self, row: SegmentRow) -> Iterator[tuple[ExposureStep, str]]:
        last = _trained_until(row)
        if row.first_step >= last or not self.list_documents_in_plan(row):
            return
        order = self._order(row)
        stops: list[tuple[int, SamplerState]] = [(row.first_step, self._start(row))]
        stops += [(step, state) for step, state in _states(row) if row.first_step < step <= last]
        if stops[-1][0] < last:
            stops.append((last, None))
        for (first, state), (end, after) in zip(stops, stops[1:]):
            walk = order.copy_from_state(state) if state is not None else order.copy_at_step(first)
            if after is not None and not _drawn(walk, after):
                continue
            while walk.step < end:
                step, rows = walk.step, walk.draw_next_rows()
                for piece in (piece for one in rows for piece in one):
                    stream = walk.streams[piece.stream]
                    if piece.document in stream.masked:
                        yield (
                            ExposureStep(row.id, step, stream.find_epoch(piece)),
                            stream.look_up_document_key(piece.document),
                        )

    def list_documents_in_plan(self, segment: SegmentRow) -> list[str]:
        """Return the keys of the documents that are in a segment's plan and carry loss there."""
        plan = read_data_plan(self.ledger, segment)
        held, masked = {shard["id"] for shard in plan["token_shards"]}, set(plan.get("masked", ()))
        return [key for key, shard in self.documents.items() if shard in held and key not in masked]

    def _order(self, row: SegmentRow) -> DataOrder:
        """Return the data order at its beginning. It marks the wanted documents as masked, which does not change the order."""
        identity = f"{row.data_plan} {row.recipe_sha256}"
        if identity not in self._orders:
            recipe = Recipe.parse(row.recipe_json)
            plan = DataPlan.from_json(replace_erased_token_shards(self.ledger, read_data_plan(self.ledger, row)))
            plan = plan.model_copy(update={"masked": self.list_documents_in_plan(row)})
            model = recipe.model
            order = DataOrder(plan, batch=recipe.batch, context=model.context, vocab_size=model.vocab_size)
            self._orders[identity] = order
        return self._orders[identity]

    def _start(self, row: SegmentRow) -> SamplerState:
        """Return the sampler's state at a segment's start; None at the beginning of the data."""
        if row.parent is None:
            return None
        parent = SegmentRow.get(self.ledger, row.parent)
        if parent.kind == IMPORT:
            return None
        if parent.id not in self._ends:
            state = _read(Path(read_last_checkpoint(self.ledger, parent.id)["path"]))
            self._ends[parent.id] = state if state is not None else self._walked(parent)
        return self._ends[parent.id]

    def _walked(self, row: SegmentRow) -> SamplerState:
        """Return the sampler's state at the end of a segment whose last checkpoint is gone."""
        state = self._start(row)
        walk = (
            self._order(row).copy_from_state(state)
            if state is not None
            else self._order(row).copy_at_step(row.first_step)
        )
        while walk.step < row.last_step:
            walk.draw_next_rows()
        return walk.state_dict()


def list_segments_contributing_to_weights(db: SqlReader, segment: int) -> list[SegmentRow]:
    """Return the segments whose steps made a segment's weights, oldest first.

    They are its lineage. For an average, they are also the lineages of the averaged segments.
    """
    found: dict[int, SegmentRow] = {}
    pending: list[int] = [segment]
    while pending:
        for row in SegmentRow.read_lineage(db, pending.pop()):
            if row.id not in found:
                found[row.id] = row
                parts = ((row.result or {}).get("averaged") or {}).get("sources") or ()
                pending += [part["segment"] for part in parts if part.get("segment") is not None]
    return sorted(found.values(), key=lambda row: row.id)


def _drawn(walk: DataOrder, after: Mapping[str, Any]) -> bool:
    """Return whether a wanted document waits in the first state, or has a place between the two states."""
    if any(piece.document in walk.streams[piece.stream].masked for piece in walk.pending):
        return True
    for name, stream in walk.streams.items():
        first, end = walk.cursors[name].place, after["streams"].get(name, (0, 0, 0, 0))[2]
        if not stream.masked or end <= first:
            continue
        if end > stream.pieces * (walk.cursors[name].joined + walk.plan.max_epochs):
            raise ValueError(f"a checkpoint says that {name} was read {end / stream.pieces:.3g} times")
        for epoch in range(first // stream.pieces, (end - 1) // stream.pieces + 1):
            places = stream.find_places_of_documents(sorted(stream.masked), epoch)
            if ((places >= first) & (places < end)).any():
                return True
    return False


def _trained_until(row: SegmentRow) -> int:
    """Return the step after the last step that a segment has trained so far."""
    if row.result is not None:
        return row.last_step
    lines = read_metrics(row)
    return min(row.last_step, lines[-1]["step"] + 1) if lines else row.first_step


def _states(row: SegmentRow) -> Sequence[tuple[int, SamplerState]]:
    """Return (step, state of the sampler) of each remaining checkpoint of a segment, in order."""
    listed = sorted(list_checkpoints(Path(row.folder) / "checkpoints"))
    return [(step, state) for step, path in listed if (state := _read(path)) is not None]


def _read(checkpoint: Path) -> SamplerState:
    try:
        return dict(read_checkpoint_state(checkpoint)["sampler"])
    except (TrainerError, OSError, *MALFORMED_STATE_ERRORS):
        return None
