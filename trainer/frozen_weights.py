"""The weights with which a run starts, and those of them that it does not change.

A frozen matrix is held in the dtype of the products, which may round it. The checkpoint from which the segment starts is its record: every save takes
frozen weights from there, so they stay the same to the bit, and no save copies them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.contract.checkpoint.format import (
    Regions,
    StoredTensors,
    UnchangedWeights,
    iterate_tensors,
    read_checkpoint_state,
)
from trainer.contract.errors import CheckpointError
from trainer.contract.lora import AdaptRecipe, MergedWeights


class PartsOfWhole(Mapping[str, Tensor]):
    """The regions of whole tensors; a tensor without a region is whole."""

    def __init__(self, whole: Mapping[str, Tensor], regions: Regions) -> None:
        self.whole, self.regions = whole, regions

    def __getitem__(self, name: str) -> Tensor:
        found = self.whole[name]
        return self.regions[name].view_in_whole_tensor(found) if name in self.regions else found

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)


def read_adapt_recipe(state: Mapping[str, Any]) -> AdaptRecipe | None:
    """How the checkpoint with this state.json was adapted."""
    adapt = (state.get("recipe") or {}).get("adapt")
    return AdaptRecipe.model_validate(adapt) if adapt else None


def open_weights(start: Path, adapt: AdaptRecipe | None, regions: Regions) -> Mapping[str, Tensor]:
    """This rank's part of a checkpoint's weights, each read when it is asked for. ``adapt``: of this run. If the checkpoint was adapted in another
    way, LoRA's matrices are merged into the weights. Raises: CheckpointError, also for each tensor."""
    adapted = read_adapt_recipe(read_checkpoint_state(start))
    if adapted is None or adapted == adapt:
        return StoredTensors(start, "model", regions)
    return PartsOfWhole(MergedWeights(StoredTensors(start, "model"), adapted), regions)


def iterate_weights(start: Path, weights: Mapping[str, Tensor], regions: Regions) -> Iterator[tuple[str, Tensor]]:
    """All of ``weights``, which is a result of ``open_weights``, with each file of the checkpoint opened once if nothing is merged."""
    return iterate_tensors(start, "model", regions) if isinstance(weights, StoredTensors) else iter(weights.items())


def compute_crc(tensor: Tensor) -> int:
    """CRC-32 of the bytes of a tensor on the CPU."""
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def describe_unchanged(
    start: Path, weights: Mapping[str, Tensor], sums: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]
) -> UnchangedWeights:
    """The frozen weights as ``start`` has them. ``shapes``: of this rank's part of each that it writes. ``sums``: ``compute_crc`` of each when the
    segment began; reading one that differs raises CheckpointError."""

    def read(name: str) -> Tensor:
        found = weights[name]
        if compute_crc(found) != sums[name]:
            raise CheckpointError(
                "trainer.frozen_weight_changed",
                "{checkpoint}: the frozen weight {tensor} is not the one with which this segment began. Check the disk, and start the segment again.",
                checkpoint=str(start),
                tensor=name,
            )
        return found

    return UnchangedWeights({name: (torch.float32, shape) for name, shape in shapes.items()}, read, start)
