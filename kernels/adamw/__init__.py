"""AdamW over many tensors at once, in place (Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2).

The update is that of torch's fused AdamW with the two inputs of a gradient scaler: gradients are divided by ``divide_by``, and nothing changes if
``skip`` is one, even if the gradients are not finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kernels.contract.op import (
    Cost,
    Implementation,
    Inputs,
    Shape,
    compile_lazily,
    draw_normal_tensor,
    make_op,
    make_triton_implementation,
)

Tensors = list[Tensor]
SETTINGS = (1e-3, 0.9, 0.95, 1e-8, 0.1)  # lr, beta1, beta2, eps, weight decay


def reference(
    weights: Tensors,
    gradients: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Tensors,
    divide_by: Tensor,
    skip: Tensor,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Update weights, moments and steps in place. All lists have the same order. Their tensors have one dtype. ``steps``: the number of updates
    so far, a floating-point scalar for each weight. ``divide_by`` and ``skip`` (0 or 1) are scalars."""
    skipped = skip > 0
    for weight, gradient, exp_avg, exp_avg_sq, step in zip(weights, gradients, exp_avgs, exp_avg_sqs, steps):
        gradient = gradient / divide_by.to(gradient.dtype)
        t = step + 1
        mean = exp_avg.lerp(gradient, 1 - beta1)
        square = exp_avg_sq * beta2 + (1 - beta2) * gradient * gradient
        rate = (lr / (1 - beta1 ** t.double())).to(weight.dtype)
        root = (1 - beta2 ** t.double()).sqrt().to(weight.dtype)
        moved = weight * (1 - lr * weight_decay) - rate * mean / (square.sqrt() / root + eps)
        for held, new in ((weight, moved), (exp_avg, mean), (exp_avg_sq, square), (step, t)):
            torch.where(skipped, held, new, out=held)  # selected, not multiplied by zero, so that a NaN is dropped


@contextmanager
def swap_in_dense_copies(lists: Sequence[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """Yields the lists with a dense copy in place of each tensor that is not dense. At the end the copies are written back."""
    copies = [[x.contiguous() for x in tensors] for tensors in lists]
    yield copies
    for tensors, changed in zip(lists, copies):
        for x, copy in zip(tensors, changed):
            if copy is not x:
                x.copy_(copy)


def fused_adamw(
    weights: Tensors,
    gradients: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Tensors,
    divide_by: Tensor,
    skip: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """The same update as ``reference``, by torch's fused kernel. Tensors that are not dense are updated through dense copies."""
    if not weights:
        return
    # as torch's optimiser does: the counts rise first, and fall again if the kernel changed nothing
    torch._foreach_add_(steps, 1.0)
    with swap_in_dense_copies((weights, gradients, exp_avgs, exp_avg_sqs)) as (held, grads, means, squares):
        torch._fused_adamw_(
            held,
            grads,
            means,
            squares,
            [],
            steps,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divide_by,
            found_inf=skip,
        )
    torch._foreach_sub_(steps, [skip] * len(steps))


one_region = compile_lazily(reference)


def compiled_adamw(
    weights: Tensors,
    gradients: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Tensors,
    divide_by: Tensor,
    skip: Tensor,
    lr: float,
    *rest: float,
) -> None:
    """The same update as ``reference``, through torch.compile. The rate is passed as a tensor: torch would compile again for each new value of
    a number."""
    rate = torch.full((), lr, dtype=torch.float64, device=skip.device)
    one_region(weights, gradients, exp_avgs, exp_avg_sqs, steps, divide_by, skip, rate, *rest)


def cost(shape: Shape, itemsize: int) -> Cost:
    """The update reads weight, gradient and both moments, and writes weight and moments."""
    elements = sum(torch.Size(size).numel() for size in list_test_tensor_sizes(shape))
    return Cost(7 * elements * itemsize, 15 * elements, 0, 0)


def list_test_tensor_sizes(shape: Shape) -> list[tuple[int, ...]]:
    """The shapes of the test tensors: a layer's MLP, a norm, the embedding, and one matrix that depends on the batch."""
    D, F = shape.d_model, shape.d_ff
    return [(F, D), (F, D), (D, F), (D,), (shape.vocab_size, D), (shape.batch, D)]


def make_inputs(shape: Shape, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Inputs as after three updates, with moments as from gradients of size 0.1."""
    made = [
        [draw_normal_tensor(generator, size, device, dtype, 0.1) for size in list_test_tensor_sizes(shape)]
        for _ in range(3)
    ]
    exp_avg_sqs = [
        draw_normal_tensor(generator, size, device, dtype, 0.03).square() for size in list_test_tensor_sizes(shape)
    ]
    steps = [torch.tensor(3.0, device=device) for _ in exp_avg_sqs]
    scalars = torch.tensor(1.7, device=device), torch.tensor(0.0, device=device)
    return *made, exp_avg_sqs, steps, *scalars, *SETTINGS


COMPILED = Implementation(
    "compiled", compiled_adamw, description="the reference through torch.compile", eager=reference
)
FUSED = Implementation(
    "fused", fused_adamw, description="torch's own fused kernel, as torch.optim.AdamW(fused=True) calls it"
)
TRITON = make_triton_implementation(
    "kernels.adamw.triton", function="adamw", about="one Triton kernel over all tensors"
)
OP = make_op(
    "adamw",
    reference,
    cost=cost,
    make_inputs=make_inputs,
    gradients=(),
    hostile=(1,),
    writes=(0, 2, 3, 4),
    clobbers=(1,),  # torch's kernel leaves the divided gradients in place
    in_block=False,
    implementations=(COMPILED, FUSED, TRITON),
)
