"""Where two programs that compute one model depart: what each of them has after the embedding, after each block, and as logits.

If names and shapes fit but one fact of the model differs (a RoPE base, where a norm stands, the order of rows), the first place that departs says
where to look. A fact that all layers share departs in block 0, a window in the first layer that has one, and a soft-cap of the logits at the end.

    >>> import torch
    >>> theirs = {"embedding": torch.ones(2), "blocks.0": torch.tensor([4.0, 8.0]), "logits": torch.zeros(2)}
    >>> report = compare_places(theirs, theirs | {"blocks.0": torch.tensor([4.0, 6.0])})
    >>> report.first.place, report.first.largest, report.first.relative
    ('blocks.0', 2.0, 0.25)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernels.contract.message import Message

if TYPE_CHECKING:
    from torch import Tensor, nn

TOLERANCE = 2e-5  # relative, of fp32. Programs that round differently depart by 2e-6, GELU from its tanh by 2e-4


@dataclass(frozen=True)
class PlaceDifference:
    """How far two programs are apart at one place."""

    place: str  # "embedding", "blocks.N" or "logits"
    largest: float  # the largest difference of two values
    relative: float  # divided by the largest value of the first program


@dataclass(frozen=True)
class DivergenceReport:
    """All places in order, and the first at which the programs depart; None: nowhere."""

    places: tuple[PlaceDifference, ...]
    first: PlaceDifference | None

    def to_lines(self) -> list[str]:
        """The report for a person, one line a place, the verdict last."""
        lines: list[str] = [
            Message(
                "models.place",
                "{place:<12} largest difference {largest:.2e}, relative {relative:.2e}",
                place=one.place,
                largest=one.largest,
                relative=one.relative,
            )  # fmt: skip
            for one in self.places
        ]
        if self.first is None:
            lines.append(Message("models.equal_function", "The two programs compute the same function."))
        else:
            lines.append(
                Message(
                    "models.departs",
                    "The two programs depart first at {place}, by {relative:.2e} of the largest value. What comes before is equal.",
                    place=self.first.place,
                    relative=self.first.relative,
                )
            )
        return lines


def record_places(blocks: Sequence[nn.Module], run: Callable[[], Tensor]) -> dict[str, Tensor]:
    """What ``run``, which returns the logits, has at each place.

    ``blocks``: the modules of the layers. The first argument and the (first) result of each is the residual stream [B, T, D].
    """
    found: dict[str, Tensor] = {}

    def keep_input(module: nn.Module, given: tuple[Any, ...]) -> None:
        found["embedding"] = given[0].detach()

    def keep_output(number: int) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, given: Any, result: Any) -> None:
            found[f"blocks.{number}"] = (result[0] if isinstance(result, tuple) else result).detach()

        return keep

    handles = [blocks[0].register_forward_pre_hook(keep_input)]
    handles += [block.register_forward_hook(keep_output(number)) for number, block in enumerate(blocks)]
    try:
        found["logits"] = run().detach()
    finally:
        for handle in handles:
            handle.remove()
    return found


def compare_places(
    theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor], tolerance: float = TOLERANCE
) -> DivergenceReport:
    """Compare what ``record_places`` found in two programs. NaN departs."""
    assert list(theirs) == list(ours), (list(theirs), list(ours))
    places = []
    for place, expected in theirs.items():
        largest = float((expected.float() - ours[place].float()).abs().max())
        places.append(PlaceDifference(place, largest, largest / max(float(expected.abs().max()), 1e-30)))
    first = next((one for one in places if not one.relative <= tolerance), None)
    return DivergenceReport(tuple(places), first)
