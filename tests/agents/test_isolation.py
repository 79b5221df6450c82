"""An operation that is timed alone gets inputs as in the step: the same shapes, strides and dtypes, new floats, recorded integers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from agents.line_profiler.capture import OperationRecorder
from agents.line_profiler.isolation import (
    ITERATIONS,
    IsolatedTime,
    make_operation_inputs,
    time_operation_alone,
    time_operations_alone,
)
from agents.line_profiler.signature import copy_nonrandom_inputs, make_operation_signature

CPU = torch.device("cpu")
aten = torch.ops.aten


def fresh(func: Any, *args: Any, **kwargs: Any) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return make_operation_inputs(
        make_operation_signature(func, args, kwargs), copy_nonrandom_inputs(args, kwargs), CPU, generator
    )


def test_tensors_keep_shape_stride_and_dtype_and_get_new_floats() -> None:
    x = torch.zeros(8, 6, dtype=torch.bfloat16).t()
    y = torch.zeros(6, 1).expand(6, 8)
    a, b = fresh(aten.mul.Tensor, x, y)
    assert (a.shape, a.stride(), a.dtype) == (x.shape, x.stride(), x.dtype)
    assert (b.shape, b.stride()) == ((6, 8), (1, 0))
    assert a.float().std() > 0.5 and b.std() > 0.5


def test_integers_masks_and_scalars_keep_their_values() -> None:
    index = torch.tensor([3, 0, 2])
    table, again = fresh(aten.index.Tensor, torch.zeros(4, 2), [index])
    assert torch.equal(again, index) and table.std() > 0
    mask, found = torch.tensor([True, False]), fresh(aten.where.self, torch.tensor([True, False]), *[torch.ones(2)] * 2)
    assert torch.equal(found[0], mask)
    assert fresh(aten.mul.Tensor, torch.zeros(3), torch.tensor(0.25))[1] == 0.25  # such as a loss scale


def test_one_tensor_given_twice_stays_one() -> None:
    x = torch.zeros(4)
    a, b = fresh(aten.mul.Tensor, x, x)
    assert a is b
    c, d = fresh(aten.mul.Tensor, x, torch.zeros(4))
    assert c is not d


def test_an_in_place_update_is_undone_before_each_call() -> None:
    seen: list[Tensor] = []

    class Watched:
        is_view = False
        _schema = aten.mul_.Tensor._schema

        def __call__(self, x: Tensor, y: Tensor) -> Tensor:
            seen.append(x.clone())
            return x.mul_(1e3)

    signature = make_operation_signature(Watched(), (torch.ones(4), torch.ones(4)), {})
    assert time_operation_alone(signature, (None, None), CPU, 5.0).iterations == ITERATIONS
    assert len(seen) > ITERATIONS and max(x.abs().max().item() for x in seen) < 10


def test_the_time_of_a_failing_operation_names_the_error() -> None:
    signature = make_operation_signature(aten.mm.default, (torch.ones(2, 3), torch.ones(2, 3)), {})
    found = time_operation_alone(signature, (None, None), CPU, 1.0)
    assert found.iterations == 0 and "RuntimeError" in found.why_not


def test_identical_calls_are_measured_once_and_slow_calls_less_often() -> None:
    recorder = OperationRecorder()
    x, large = torch.randn(16, 16), torch.randn(1200, 1200)
    with recorder:
        for _ in range(5):
            x @ x
        large @ large
    estimates = {event.signature: event.seconds for event in recorder.events if event.signature}
    found = time_operations_alone(recorder.samples, estimates, CPU, budget_s=0.3)
    by_size = {signature.tensor_arguments[0].shape[0]: one for signature, one in found.items()}
    assert set(by_size) == {16, 1200} and len(recorder.events) == 6
    assert isinstance(by_size[16], IsolatedTime) and by_size[16].iterations == ITERATIONS
    assert 3 <= by_size[1200].iterations < ITERATIONS and by_size[1200].median_s > by_size[16].median_s


def test_bytes_and_flops_follow_from_the_shapes() -> None:
    recorder = OperationRecorder()
    x, w = torch.randn(4, 8), torch.randn(8, 2)
    with recorder:
        (x @ w).view(-1)
    product, view = recorder.events
    assert product.flops == 2 * 4 * 8 * 2 and product.bytes == 4 * (4 * 8 + 8 * 2 + 4 * 2)
    assert view.flops == view.bytes == 0 and view.reads == view.writes == ()
    assert product.seconds > 0 and product.host_s >= 0 and pytest.approx(0) == view.flops
