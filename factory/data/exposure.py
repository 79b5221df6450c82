"""At which steps segments were trained on documents, worked out again from the data order.

Between two checkpoints a document was drawn only if one of its pieces stands at a place between their cursors, or waited at the first:
that is seen without walking there, however many documents there are. Only the stretches where one was drawn are walked, step by step.
What a checkpoint says of the order is believed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factory.core.errors import FactoryError
from factory.data.metrics import metrics_of
from factory.ledger.ledger import Ledger
from factory.ledger.removals import with_contents
from factory.ledger.rows import Reads, SegmentRow
from factory.training.planning import last_checkpoint, plan_of
from trainer.contract.checkpoint.format import read_state, steps_in
from trainer.contract.data.data_order import DataOrder
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.errors import TrainerError
from trainer.contract.recipe import Recipe

MALFORMED = (ValueError, KeyError, TypeError, IndexError, AttributeError, AssertionError)  # a state that is none
State = Mapping[str, Any] | None


class UnknownExposureError(FactoryError):
    """The data order of a segment cannot be worked out any more: says why."""


@dataclass(frozen=True)
class SeenStep:
    """One step that a document, or a part of it, was trained on."""

    segment: int
    step: int
    epoch: int  # of the document's domain and generation, from 0


class Exposure:
    """Of these documents: ``{key: id of its token shard}``."""

    def __init__(self, ledger: Ledger, documents: Mapping[str, str]) -> None:
        self.ledger, self.documents = ledger, documents
        self._orders: dict[str, DataOrder] = {}
        self._ends: dict[int, State] = {}

    def of(self, row: SegmentRow) -> dict[str, list[SeenStep]]:
        """The documents that a segment was trained on, with the steps, in order. Raises: UnknownExposureError."""
        found: dict[str, list[SeenStep]] = {}
        for seen, key in self.each(row):
            if seen not in found.setdefault(key, []):
                found[key].append(seen)
        return found

    def first(self, row: SegmentRow) -> int | None:
        """The first step of a segment that was trained on any of them. Raises: UnknownExposureError."""
        return next((seen.step for seen, _ in self.each(row)), None)

    def each(self, row: SegmentRow) -> Iterator[tuple[SeenStep, str]]:
        """(step, key) in the order of the steps. Raises: UnknownExposureError."""
        try:
            yield from self._each(row)
        except (TrainerError, OSError, *MALFORMED) as error:
            raise UnknownExposureError(f"the data order of segment {row.id} cannot be worked out: {error}") from error

    def _each(self, row: SegmentRow) -> Iterator[tuple[SeenStep, str]]:
        last = _trained_until(row)
        if row.first_step >= last or not self.wanted(row):
            return
        order = self._order(row)
        stops: list[tuple[int, State]] = [(row.first_step, self._start(row))]
        stops += [(step, state) for step, state in _states(row) if row.first_step < step <= last]
        if stops[-1][0] < last:
            stops.append((last, None))
        for (first, state), (end, after) in zip(stops, stops[1:]):
            walk = order.at(state) if state is not None else order.fork(first)
            if after is not None and not _drawn(walk, after):
                continue
            while walk.step < end:
                step, rows = walk.step, walk.next_rows()
                for piece in (piece for one in rows for piece in one):
                    stream = walk.streams[piece.stream]
                    if piece.document in stream.masked:
                        yield SeenStep(row.id, step, piece.place // stream.pieces), stream.key(piece.document)

    def wanted(self, row: SegmentRow) -> list[str]:
        """The documents that a segment's plan holds and that carry loss there."""
        plan = plan_of(self.ledger, row)
        held, masked = {shard["id"] for shard in plan["token_shards"]}, set(plan.get("masked", ()))
        return [key for key, shard in self.documents.items() if shard in held and key not in masked]

    def _order(self, row: SegmentRow) -> DataOrder:
        """At the beginning, with the wanted documents as those that are masked: the order is the same."""
        identity = f"{row.data_plan} {row.recipe_sha256}"
        if identity not in self._orders:
            recipe = Recipe.parse(row.recipe_json)
            plan = DataPlan.from_json(with_contents(self.ledger, plan_of(self.ledger, row)))
            plan = plan.model_copy(update={"masked": self.wanted(row)})
            model = recipe.model
            order = DataOrder(plan, batch=recipe.batch, context=model.context, vocab_size=model.vocab_size)
            self._orders[identity] = order
        return self._orders[identity]

    def _start(self, row: SegmentRow) -> State:
        """The sampler's state that a segment began with; None: the data's beginning."""
        if row.parent is None:
            return None
        parent = SegmentRow.get(self.ledger, row.parent)
        if parent.id not in self._ends:
            state = _read(Path(last_checkpoint(self.ledger, parent.id)["path"]))
            self._ends[parent.id] = state if state is not None else self._walked(parent)
        return self._ends[parent.id]

    def _walked(self, row: SegmentRow) -> State:
        """At the end of a segment whose last checkpoint is gone."""
        state = self._start(row)
        walk = self._order(row).at(state) if state is not None else self._order(row).fork(row.first_step)
        while walk.step < row.last_step:
            walk.next_rows()
        return walk.state_dict()


def trained_in(db: Reads, segment: int) -> list[SegmentRow]:
    """The segments whose steps a segment's weights come from, oldest first: its lineage; of an average also those of what was averaged."""
    found: dict[int, SegmentRow] = {}
    pending: list[int] = [segment]
    while pending:
        for row in SegmentRow.lineage(db, pending.pop()):
            if row.id not in found:
                found[row.id] = row
                parts = ((row.result or {}).get("averaged") or {}).get("sources") or ()
                pending += [part["segment"] for part in parts if part.get("segment") is not None]
    return sorted(found.values(), key=lambda row: row.id)


def _drawn(walk: DataOrder, after: Mapping[str, Any]) -> bool:
    """Does a wanted document wait, or stand between two states?"""
    if any(piece.document in walk.streams[piece.stream].masked for piece in walk.pending):
        return True
    for name, stream in walk.streams.items():
        first, end = walk.cursors[name].place, after["streams"].get(name, (0, 0, 0, 0))[2]
        if not stream.masked or end <= first:
            continue
        if end > stream.pieces * (walk.cursors[name].joined + walk.plan.max_epochs):
            raise ValueError(f"a checkpoint says that {name} was read {end / stream.pieces:.3g} times")
        for epoch in range(first // stream.pieces, (end - 1) // stream.pieces + 1):
            places = stream.places_of(sorted(stream.masked), epoch)
            if ((places >= first) & (places < end)).any():
                return True
    return False


def _trained_until(row: SegmentRow) -> int:
    """The step after the last one that a segment was trained on, so far."""
    if row.result is not None:
        return row.last_step
    lines = metrics_of(row)
    return min(row.last_step, lines[-1]["step"] + 1) if lines else row.first_step


def _states(row: SegmentRow) -> Sequence[tuple[int, State]]:
    """(step, state of the sampler) of the checkpoints of a segment that are left, in order."""
    listed = sorted(steps_in(Path(row.folder) / "checkpoints"))
    return [(step, state) for step, path in listed if (state := _read(path)) is not None]


def _read(checkpoint: Path) -> State:
    try:
        return dict(read_state(checkpoint)["sampler"])
    except (TrainerError, OSError, *MALFORMED):
        return None
