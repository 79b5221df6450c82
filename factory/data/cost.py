"""What training the trunk again without documents takes: from the newest checkpoint that never saw them to where it is now."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from factory.data.exposure import Exposure, UnknownExposureError, trained_in
from factory.ledger.ledger import Ledger
from factory.ledger.rows import SegmentRow
from factory.training.planning import last_segment
from trainer.contract.checkpoint.format import steps_in


@dataclass(frozen=True)
class RetrainingCost:
    """``first_step``: the first that saw one of the documents; None: the trunk never did, and nothing is to be trained again."""

    first_step: int | None = None
    segment: int | None = None  # of that step
    from_step: int = 0
    checkpoint: str = ""  # that it would start from; '': from the beginning
    until: int = 0  # the trunk's newest step
    steps: int = 0
    unknown: str = ""  # why none of it is known

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.unknown:
            return f"what training again without them takes is not known: {self.unknown}"
        if self.first_step is None:
            return "the trunk was never trained on them: nothing is to be trained again"
        start = (
            f"from {self.checkpoint}" if self.checkpoint else "from the beginning: no checkpoint from before is left"
        )
        return (
            f"the trunk first saw one at step {self.first_step} (segment {self.segment}); training again without them: "
            f"{self.steps:,} steps (to step {self.until}), {start}"
        )


def cost_of(ledger: Ledger, exposure: Exposure) -> RetrainingCost:
    """Of the trunk as it is now."""
    trunk = last_segment(ledger, "trunk")
    if trunk is None:
        return RetrainingCost()
    lineage = SegmentRow.lineage(ledger, trunk.id)
    try:
        seen = next(((row, step) for row in lineage if (step := exposure.first(row)) is not None), None)
    except UnknownExposureError as error:
        return RetrainingCost(unknown=str(error))
    if seen is None:
        return RetrainingCost(until=trunk.last_step)
    row, first = seen
    sound = [
        (step, path)
        for one in lineage[: lineage.index(row) + 1]
        for step, path in steps_in(Path(one.folder) / "checkpoints")
        if step <= first and (path / "manifest.json").is_file()
    ]
    start, checkpoint = max(sound, default=(0, None))
    return RetrainingCost(first, row.id, start, str(checkpoint or ""), trunk.last_step, trunk.last_step - start)


def releases_that_saw(
    ledger: Ledger, exposure: Exposure, segments: dict[int, int]
) -> dict[int, tuple[list[str], bool]]:
    """By release, the documents that it was trained on, and whether that is known: else that could have been, by its data plans.

    ``segments``: by release, its segment. Those that saw none are left out.
    """
    by_segment: dict[int, tuple[set[str], bool]] = {}
    found: dict[int, tuple[list[str], bool]] = {}
    for number, segment in segments.items():
        keys: set[str] = set()
        exact = True
        for row in trained_in(ledger, segment):
            if row.id not in by_segment:
                try:
                    by_segment[row.id] = set(exposure.of(row)), True
                except UnknownExposureError:
                    by_segment[row.id] = set(exposure.wanted(row)), False
            keys |= by_segment[row.id][0]
            exact = exact and by_segment[row.id][1]
        if keys:
            found[number] = sorted(keys), exact
    return found
