"""AdamW in Triton: one launch over all tensors. A program looks up in a table of addresses whose block it has."""

from __future__ import annotations

from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.adamw import dense

BLOCK = 4096  # elements a program


@triton.jit
def update_kernel(  # type: ignore[no-untyped-def]
    like, addresses, ends, counts, rates, roots, divide_by, skip, tensors, beta1, rest1, beta2, rest2, eps, keep,
    TENSORS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(skip) > 0:
        return
    program = tl.program_id(0)
    every = tl.arange(0, TENSORS)
    which = tl.sum((tl.load(ends + every, mask=every < tensors, other=1 << 30) <= program).to(tl.int32), axis=0)
    begun = tl.load(ends + which - 1, mask=which > 0, other=0)
    element = (program - begun).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < tl.load(counts + which)
    pointer = tl.pointer_type(like.dtype.element_ty)
    weight = tl.load(addresses + which).to(pointer) + element
    gradient = tl.load(addresses + tensors + which).to(pointer) + element
    exp_avg = tl.load(addresses + 2 * tensors + which).to(pointer) + element
    exp_avg_sq = tl.load(addresses + 3 * tensors + which).to(pointer) + element
    g = tl.load(gradient, mask=inside, other=0.0).to(tl.float32) / tl.load(divide_by)
    mean = tl.load(exp_avg, mask=inside, other=0.0).to(tl.float32) * beta1 + rest1 * g
    square = tl.load(exp_avg_sq, mask=inside, other=0.0).to(tl.float32) * beta2 + rest2 * g * g
    tl.store(exp_avg, mean, mask=inside)
    tl.store(exp_avg_sq, square, mask=inside)
    w = tl.load(weight, mask=inside, other=0.0).to(tl.float32) * keep
    w -= tl.load(rates + which) * mean / (tl.sqrt(square) / tl.load(roots + which) + eps)
    tl.store(weight, w, mask=inside)


@torch.library.custom_op(
    "factory::adamw_triton", mutates_args=("weights", "exp_avgs", "exp_avg_sqs", "steps"), device_types=("cuda", "cpu")
)
def adamw(
    weights: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    divide_by: Tensor,
    skip: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """As ``kernels.adamw.reference``. Tensors that are not dense are updated as dense copies."""
    counts = [x.numel() for x in weights]
    ends = list(accumulate(triton.cdiv(count, BLOCK) for count in counts))
    if not weights or not ends[-1]:
        return
    on = skip.device
    t = torch.stack(steps).double() + 1
    with dense((weights, gradients, exp_avgs, exp_avg_sqs)) as lists:
        addresses = torch.tensor([x.data_ptr() for tensors in lists for x in tensors], dtype=torch.int64, device=on)
        update_kernel[(ends[-1],)](
            weights[0],
            addresses,
            torch.tensor(ends, dtype=torch.int32, device=on),
            torch.tensor(counts, dtype=torch.int64, device=on),
            (lr / (1 - beta1**t)).float(),
            (1 - beta2**t).sqrt().float(),
            divide_by,
            skip,
            len(weights),
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            eps,
            1 - lr * weight_decay,
            TENSORS=triton.next_power_of_2(len(weights)),
            BLOCK=BLOCK,
        )
    torch._foreach_add_(steps, 1 - skip)
