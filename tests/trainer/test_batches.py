"""The memory of a batch, and its copy to another device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.support.waits import waits
from tests.support.trainer.segments import MakeShard, plan_of, recipe_with
from trainer.batch import ALIGNED, Batch, make_batch, prefetch_batches
from trainer.contract.data.data_order import DataOrder


def order_of(make_shard: MakeShard) -> DataOrder:
    recipe = recipe_with()
    shape = recipe.model
    return DataOrder(plan_of(make_shard()), context=shape.context, batch=recipe.batch, vocab_size=shape.vocab_size)


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    return {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}


def test_a_batch_lies_in_one_block_of_memory(make_shard: MakeShard) -> None:
    tensors = tensors_of(make_batch(order_of(make_shard)))
    blocks = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    places = sorted((t.storage_offset() * t.element_size(), t.nbytes) for t in tensors.values())
    assert len(blocks) == 1 and len(places) == 6 and all(t.is_contiguous() for t in tensors.values())
    assert all(start % ALIGNED == 0 for start, _ in places)
    assert all(start + size <= after for (start, size), (after, _) in zip(places, places[1:]))


def test_a_batch_is_moved_with_one_copy_for_each_block_of_memory(make_shard: MakeShard) -> None:
    batch = make_batch(order_of(make_shard))
    changed = replace(batch, tokens_BT=batch.tokens_BT.clone(), weights_BT=batch.weights_BT[1:])
    for made, blocks in ((batch, 1), (changed, 2)):
        moved = tensors_of(made.to(torch.device("meta")))
        assert len({tensor.untyped_storage()._cdata for tensor in moved.values()}) == blocks
        for name, tensor in tensors_of(made).items():
            there = moved[name]
            assert (there.shape, there.dtype, there.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
            assert there.device.type == "meta" and there.storage_offset() == tensor.storage_offset()


def test_a_pinning_error_in_the_thread_reaches_the_consumer(make_shard: MakeShard) -> None:
    batches: Iterator[Batch] = prefetch_batches(order_of(make_shard), 2, pin=True)
    if torch.cuda.is_available():
        assert all(tensor.is_pinned() for batch in batches for tensor in tensors_of(batch).values())
    else:
        with pytest.raises(RuntimeError, match="pin|NVIDIA"):  # torch 2.13, the CUDA build of 2.11
            next(batches)
    assert not any(
        t.is_pinned() for batch in prefetch_batches(order_of(make_shard), 2) for t in tensors_of(batch).values()
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_pinned_batch_reaches_the_gpu_whole_and_without_a_wait(make_shard: MakeShard) -> None:
    order, device = order_of(make_shard), torch.device("cuda", 0)
    moved: list[Batch] = []
    for batch in prefetch_batches(order_of(make_shard), 12, pin=True):  # more than wait: blocks are lent again
        assert waits(lambda batch=batch: moved.append(batch.to(device))) == []  # type: ignore[misc]
    for there in moved:
        here = tensors_of(make_batch(order))
        assert all(torch.equal(tensor.cpu(), here[name]) for name, tensor in tensors_of(there).items())
