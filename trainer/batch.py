"""Makes batches, which are rows of pieces as tensors. A thread makes them ahead, so that the step does not wait.

A batch is one block of host memory, 40 bytes a token, which a GPU copies at once. For a GPU the thread makes that block in pinned memory. The
host then does not wait for the copy; only the step's first kernel does. On the step's own stream, 2.6 MB of 65,536 tokens take some 0.1 ms at
PCIe 4's 25 GB/s (by the data sheet; no device has run this). A step takes a second, so a second stream would hide little. torch reuses a
pinned block only after the copies out of it are done.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage

from kernels.contract.op import round_up_document_runs
from trainer.contract.data.data_order import DataOrder, Row

PADDING = -1  # document number of empty positions
DTYPES = {
    "tokens_BT": torch.int64,
    "targets_BT": torch.int64,
    "weights_BT": torch.float32,
    "positions_BT": torch.int64,
    "documents_BT": torch.int32,
    "domains_BT": torch.int64,
}  # of a batch's tensors
ALIGNED = 256  # bytes: where each tensor begins in its batch's block, as in memory of its own on a GPU


@dataclass(frozen=True)
class Batch:
    """The part of a global batch that one rank trains on: B rows of T = ``model.context`` positions (see ``make_batch``)."""

    step: int
    tokens_BT: Tensor  # int64, inputs
    targets_BT: Tensor  # int64, the token after each input
    weights_BT: Tensor  # fp32: mask of the targets / supervised tokens of the *global* batch
    positions_BT: Tensor  # int64, from 0 in each piece
    documents_BT: Tensor  # int32, number of the piece in its row; PADDING where there is none
    domains_BT: Tensor  # int64, index into ``DataOrder.domains``
    rows: list[Row]  # of the global batch
    stretches_B: tuple[int, ...]  # for each row of this rank: the number of its pieces, plus one if it has padding
    supervised: int  # positions of the global batch that carry loss
    used: int  # positions of the global batch that hold a token
    state_after: dict[str, Any]  # the sampler's state after this batch

    def to(self, device: torch.device) -> Batch:
        """The batch on another device. A batch in pinned memory is copied without waiting; on a CPU the batch itself is returned."""
        if device.type == "cpu":
            return self
        moved: Any = copy_to_device(device, {n: v for n, v in vars(self).items() if isinstance(v, Tensor)})
        return replace(self, **moved)

    def split_into_micro_batches(self, rows: int | None) -> list[dict[str, Any]]:
        """Micro-batches of ``rows`` rows (None: one micro-batch of all rows), as the arguments of the loss: tensors, and ``stretches``, an upper
        bound of the number of stretches in each."""
        tensors = {n: v for n, v in vars(self).items() if isinstance(v, Tensor)}
        size = rows or len(self.tokens_BT)
        parts = {name: value.split(size) for name, value in tensors.items()}
        most = max((sum(self.stretches_B[at : at + size]) for at in range(0, len(self.stretches_B), size)), default=0)
        stretches = round_up_document_runs(most)
        return [
            {name: part[i] for name, part in parts.items()} | {"stretches": stretches}
            for i in range(len(parts["tokens_BT"]))
        ]


def copy_to_device(device: torch.device, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on another device, by name. Each block of memory that holds some of them is copied once."""
    blocks: dict[int, Tensor] = {}
    moved = {}
    for name, tensor in tensors.items():
        held = tensor.untyped_storage()
        if held.data_ptr() not in blocks:
            whole = make_tensor_in_block(held, torch.uint8, 0, torch.Size([held.nbytes()]), (1,))
            blocks[held.data_ptr()] = whole.to(device, non_blocking=True)
        block = blocks[held.data_ptr()].untyped_storage()
        moved[name] = make_tensor_in_block(
            block, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()
        )
    return moved


def allocate_tensors_in_one_block(shape: tuple[int, int], dtypes: Sequence[torch.dtype], pin: bool) -> list[Tensor]:
    """A tensor of zeros of each dtype, one after the other in one block of memory."""
    sizes = [-(-shape[0] * shape[1] * dtype.itemsize // ALIGNED) * ALIGNED for dtype in dtypes]
    block = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pin)
    block.numpy().fill(0)  # torch would start threads of its own, which take the cores from the step
    starts = accumulate(sizes, initial=0)
    return [
        make_tensor_in_block(block.untyped_storage(), dtype, start // dtype.itemsize, shape, (shape[1], 1))
        for dtype, start in zip(dtypes, starts, strict=False)
    ]


def make_tensor_in_block(
    block: UntypedStorage, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """A tensor in existing memory, ``offset`` elements from its start. To torch it is not a view of another tensor."""
    return torch.empty(0, dtype=dtype, device=block.device).set_(block, offset, shape, stride)  # type: ignore[call-overload]


def make_batch(order: DataOrder, rank: int = 0, ranks: int = 1, pin: bool = False) -> Batch:
    """Advance ``order`` by one step and read the rows of ``rank``: every ``ranks``-th, from ``rank`` on. ``pin``: for a GPU.

    The loss is Σ weight · nll. A weight is 1 / (supervised targets of the global batch), 0 where the target carries no loss,
    so that the sum over rows, micro-batches and ranks is the mean over the batch's supervised tokens. In a batch without any supervised
    token all weights are 0. An example: a text of 5 tokens and a chat of 4, of which only the last two carry loss, in one row of 8 positions:

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from trainer.contract.data.data_plan import DataPlan
    >>> from trainer.contract.data.token_shard import TokenizedDocument, write_token_shard
    >>> from trainer.contract.recipe import BatchRecipe
    >>> text, text_mask = np.array([11, 12, 13, 14, 0], np.uint32), np.ones(5, bool)
    >>> chat, chat_mask = np.array([21, 22, 23, 24], np.uint32), np.array([False, False, True, True])
    >>> documents = [TokenizedDocument("text", "1", "all", "us", "MIT", text, text_mask)]
    >>> documents += [TokenizedDocument("chat", "2", "all", "us", "MIT", chat, chat_mask)]
    >>> with TemporaryDirectory() as folder:
    ...     shard = write_token_shard(Path(folder), documents, vocab_size=32, tokenizer_sha256="")
    ...     planned = {"id": shard.id, "path": str(shard.path), "generation": 0}
    ...     plan = DataPlan.from_json({"token_shards": [planned], "weights": {"all": 1.0}})
    ...     batch = make_batch(DataOrder(plan, context=8, batch=BatchRecipe(sequences=1), vocab_size=32))
    >>> batch.tokens_BT.tolist()
    [[11, 12, 13, 14, 21, 22, 23, 0]]
    >>> batch.targets_BT.tolist()
    [[12, 13, 14, 0, 22, 23, 24, 0]]
    >>> batch.documents_BT.tolist()
    [[0, 0, 0, 0, 1, 1, 1, -1]]
    >>> batch.positions_BT.tolist()
    [[0, 1, 2, 3, 0, 1, 2, 0]]
    >>> (batch.weights_BT * batch.supervised).tolist()
    [[1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0]]
    >>> batch.supervised, batch.used
    (6, 7)
    """
    step = order.step
    rows = order.draw_next_rows()
    mine = rows[rank::ranks]
    shape = (len(mine), order.context)
    tensors = dict(zip(DTYPES, allocate_tensors_in_one_block(shape, list(DTYPES.values()), pin)))
    tokens, targets, weights, positions, documents, domains = (tensor.numpy() for tensor in tensors.values())
    documents.fill(PADDING)
    supervised = sum(piece.supervised for row in rows for piece in row)
    counted = np.arange(order.context)
    domain_numbers = {name: order.domains.index(stream.domain) for name, stream in order.streams.items()}
    for b, row in enumerate(mine):
        at = 0
        for number, piece in enumerate(row):
            place = np.s_[b, at : at + piece.positions]
            pair = order.streams[piece.stream].read_piece_tokens(piece)
            tokens[place], targets[place] = pair[:-1], pair[1:]
            weights[place] = order.streams[piece.stream].read_target_mask(piece) / np.float32(max(1, supervised))
            positions[place] = counted[: piece.positions]
            documents[place] = number
            domains[place] = domain_numbers[piece.stream]
            at += piece.positions
    return Batch(
        step,
        **tensors,
        rows=rows,
        stretches_B=tuple(len(row) + (sum(piece.positions for piece in row) < order.context) for row in mine),
        supervised=supervised,
        used=sum(piece.positions for row in rows for piece in row),
        state_after=order.state_dict(),
    )


def prefetch_batches(
    order: DataOrder, stop: int, rank: int = 0, ranks: int = 1, ahead: int = 4, pin: bool = False
) -> Generator[Batch, None, None]:
    """Batches of the steps from ``order.step`` to ``stop``, made in a thread, at most ``ahead`` of them waiting.

    ``pin``: make the batches in pinned memory, from which a GPU copies without waiting; only with a GPU.
    """
    steps = stop - order.step  # before the thread moves it
    waiting: queue.Queue[Batch | BaseException] = queue.Queue(ahead)
    closed = threading.Event()

    def put(item: Batch | BaseException) -> None:
        while not closed.is_set():
            try:
                waiting.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    def produce() -> None:
        try:
            while order.step < stop and not closed.is_set():
                put(make_batch(order, rank, ranks, pin))
        except BaseException as error:  # handed to the consumer, which raises it
            put(error)

    thread = threading.Thread(target=produce, name="prefetch", daemon=True)
    thread.start()
    try:
        for _ in range(steps):
            item = waiting.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        thread.join()
