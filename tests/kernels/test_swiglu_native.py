"""SwiGLU in C++ beyond the oracle's cases: views of a joined product, any number of threads, compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kernels import swiglu
from kernels.swiglu import cpp as swiglu_native


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def made(dtype: torch.dtype, F: int = 77) -> tuple[Tensor, Tensor, Tensor]:
    """(gate, up, the gradient of the output). A width of 77 is a multiple of no vector's length."""
    generator = torch.Generator().manual_seed(0)
    gate, up, upstream = (torch.randn(3, 5, F, generator=generator).to(dtype) for _ in range(3))
    return gate, up, upstream


def results(function: Callable[[Tensor, Tensor], Tensor], gate: Tensor, up: Tensor, upstream: Tensor) -> list[Tensor]:
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    out = function(gate, up)
    return [out.detach(), *torch.autograd.grad(out, (gate, up), upstream)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_swiglu_gives_the_same_bits_for_joined_views_and_any_number_of_threads(
    dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    gate, up, upstream = made(dtype)
    plain = results(swiglu.native, gate, up, upstream)
    joined = torch.cat((gate, up), dim=-1).split(gate.shape[-1], dim=-1)
    spread = torch.cat((upstream, upstream), dim=-1)[..., : gate.shape[-1]]
    assert not joined[1].is_contiguous() and not spread.is_contiguous()
    for count in (1, 2, 5):
        threads(count)
        for views in ((gate, up, upstream), (*joined, spread)):
            assert all(torch.equal(a, b) for a, b in zip(results(swiglu.native, *views), plain))


def test_the_custom_op_of_swiglu_is_registered_soundly() -> None:
    gate, up, _ = made(torch.float32)
    arguments = (gate.requires_grad_(), up.requires_grad_())
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(swiglu_native.forward_op, arguments, test_utils=tests)


@pytest.mark.long("a compilation; the fast tier has the registration alone, and attention's in a compiled block")
def test_native_swiglu_gives_the_same_results_inside_a_compiled_block() -> None:
    inputs = made(torch.bfloat16)

    def block(gate: Tensor, up: Tensor) -> Tensor:
        return swiglu.native(gate * 2, up) + 1

    compiled = torch.compile(block, dynamic=False, fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(results(block, *inputs), results(compiled, *inputs)))


def test_native_swiglu_keeps_nan_and_leaves_another_dtype_to_the_reference() -> None:
    gate, up, upstream = made(torch.bfloat16)
    gate[0, 0, 3] = up[1, 1, 4] = float("nan")
    for found in results(swiglu.native, gate, up, upstream)[:2]:
        assert found[0, 0, 3].isnan() and found[1, 1, 4].isnan() and int(found.isnan().sum()) == 2
    wide = [x.double() for x in made(torch.float32)]
    assert all(torch.equal(a, b) for a, b in zip(results(swiglu.native, *wide), results(swiglu.reference, *wide)))
