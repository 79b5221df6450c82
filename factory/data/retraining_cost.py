"""Estimates the cost of training the trunk again without some documents.

The cost is the number of steps from the newest checkpoint that never saw the documents to the trunk's newest step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from factory.data.exposure import DocumentExposure, UnknownExposureError, list_segments_contributing_to_weights
from factory.ledger.ledger import Ledger
from factory.ledger.rows import SegmentRow
from factory.training.planning import find_last_finished_segment
from kernels.contract.message import Message
from trainer.contract.checkpoint.format import list_checkpoints


@dataclass(frozen=True)
class RetrainingCost:
    """The cost of training the trunk again without some documents.

    ``find_first_step`` is the trunk's first step on one of the documents; None if there is none, and then no training must be repeated.
    """

    first_step: int | None = None
    segment: int | None = None  # of that step
    from_step: int = 0
    checkpoint: str = ""  # to start from; '': from the beginning
    until: int = 0  # the trunk's newest step
    steps: int = 0
    unknown: str = ""  # why the cost cannot be computed; '': it can

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def message(self) -> Message:
        """The cost as a sentence for a person."""
        if self.unknown:
            return Message(
                "data.cost_unknown",
                "the cost of training again without the documents is not known: {why}",
                why=self.unknown,
            )
        if self.first_step is None:
            return Message(
                "data.no_cost", "the trunk was never trained on the documents, so no training has to be repeated"
            )
        known = {"first_step": self.first_step, "segment": self.segment, "steps": self.steps, "until": self.until}
        if not self.checkpoint:
            return Message(
                "data.cost_from_start",
                "the trunk was first trained on one of the documents at step {first_step} (segment {segment}). No earlier checkpoint is "
                "left. Training again without the documents takes {steps:,} steps from the beginning to step {until}",
                **known,
            )
        return Message(
            "data.cost",
            "the trunk was first trained on one of the documents at step {first_step} (segment {segment}). Training again without "
            "the documents takes {steps:,} steps from {checkpoint} to step {until}",
            checkpoint=self.checkpoint,
            **known,
        )

    def __str__(self) -> str:
        return self.message


def estimate_retraining_cost(ledger: Ledger, exposure: DocumentExposure) -> RetrainingCost:
    """Return the cost of training the present trunk again without the documents of ``exposure``."""
    trunk = find_last_finished_segment(ledger, "trunk")
    if trunk is None:
        return RetrainingCost()
    lineage = SegmentRow.read_lineage(ledger, trunk.id)
    try:
        seen = next(((row, step) for row in lineage if (step := exposure.find_first_step(row)) is not None), None)
    except UnknownExposureError as error:
        return RetrainingCost(unknown=str(error))
    if seen is None:
        return RetrainingCost(until=trunk.last_step)
    row, first = seen
    sound = [
        (step, path)
        for one in lineage[: lineage.index(row) + 1]
        for step, path in list_checkpoints(Path(one.folder) / "checkpoints")
        if step <= first and (path / "manifest.json").is_file()
    ]
    start, checkpoint = max(sound, default=(0, None))
    return RetrainingCost(first, row.id, start, str(checkpoint or ""), trunk.last_step, trunk.last_step - start)


def find_releases_trained_on(
    ledger: Ledger, exposure: DocumentExposure, segments: dict[int, int]
) -> dict[int, tuple[list[str], bool]]:
    """Return, for each release that saw some of the documents: (their keys, whether this is certain). ``segments`` maps each release to its segment.

    If the exact steps of a segment are unknown, the keys are those in its data plan, and the release may have been trained on them.
    """
    by_segment: dict[int, tuple[set[str], bool]] = {}
    found: dict[int, tuple[list[str], bool]] = {}
    for number, segment in segments.items():
        keys: set[str] = set()
        exact = True
        for row in list_segments_contributing_to_weights(ledger, segment):
            if row.id not in by_segment:
                try:
                    by_segment[row.id] = set(exposure.list_steps_by_document(row)), True
                except UnknownExposureError:
                    by_segment[row.id] = set(exposure.list_documents_in_plan(row)), False
            keys |= by_segment[row.id][0]
            exact = exact and by_segment[row.id][1]
        if keys:
            found[number] = sorted(keys), exact
    return found
