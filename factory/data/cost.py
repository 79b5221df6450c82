"""What training the trunk again without documents takes: from the newest checkpoint that never saw them to where it is now."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from factory.data.exposure import Exposure, UnknownExposureError, trained_in
from factory.data.metrics import metrics_of
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
    supervised_tokens: int | None = None  # None: the metrics of these steps are gone
    hours: float | None = None  # at the rate measured in these steps
    unknown: str = ""  # why none of it is known

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.unknown:
            return f"what training again without them takes is not known: {self.unknown}"
        if self.first_step is None:
            return "the trunk was never trained on them: nothing is to be trained again"
        tokens = f", {self.supervised_tokens:,} supervised tokens" if self.supervised_tokens is not None else ""
        hours = f", {self.hours:.2g} hours at the rate measured then" if self.hours is not None else ""
        start = (
            f"from {self.checkpoint}" if self.checkpoint else "from the beginning: no checkpoint from before is left"
        )
        return (
            f"the trunk first saw one at step {self.first_step} (segment {self.segment}); training again without them: "
            f"{self.steps:,} steps (to step {self.until}){tokens}{hours}, {start}"
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
    tokens, hours = _measured(lineage, start)
    return RetrainingCost(
        first, row.id, start, str(checkpoint or ""), trunk.last_step, trunk.last_step - start, tokens, hours
    )  # fmt: skip


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


def _measured(lineage: list[SegmentRow], start: int) -> tuple[int | None, float | None]:
    """(supervised tokens, hours) of a lineage's steps from ``start`` on, by its metrics."""
    tokens, steps, before = 0, 0, 0.0
    seconds: list[float] = []
    for row in lineage:
        lines = metrics_of(row)
        counts = [(line["step"], line["supervised_tokens"]) for line in lines]
        if counts and row.last_step > start:
            base = before if counts[0][1] >= before else 0.0  # some count from their segment's beginning
            base = next((count for step, count in reversed(counts) if step < start), base)
            tokens += int(counts[-1][1] - base)
            steps += sum(step >= start for step, _ in counts)
            seconds += [
                b["time"] - a["time"] for a, b in pairwise(lines) if a["step"] >= start and b["step"] == a["step"] + 1
            ]
        before = counts[-1][1] if counts else before
    whole = steps == lineage[-1].last_step - start
    median = sorted(seconds)[len(seconds) // 2] if seconds else None
    return tokens if whole else None, median * (lineage[-1].last_step - start) / 3600 if median is not None else None
