"""What the chunked head promises beside the right numbers: no logits in memory, no work for tokens without loss,
compile sees it."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import linear_cross_entropy as head
from kernels.linear_cross_entropy import chunks


def test_the_custom_op_is_registered_soundly() -> None:
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    targets, weights = torch.arange(5), torch.tensor([1.0, 0.0, 2.0, 0.5, 0.0])
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(head.chunked_op, (x, weight, targets, weights, 1e-3, True, True, False), test_utils=tests)


def test_loss_and_gradients_are_zero_if_no_token_carries_loss() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    loss, nll = head.chunked(x, weight, torch.arange(3), torch.zeros(3), 1e-3)
    loss.backward()
    assert loss == 0 and not nll.any()
    assert x.grad is not None and not x.grad.any()


def test_several_chunks_with_a_shorter_last_one_equal_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "ROWS", 16)
    x, weight = torch.randn(53, 8, requires_grad=True), torch.randn(31, 8, requires_grad=True)
    arguments = (torch.randint(31, (53,)), torch.rand(53) / 53, 1e-3)
    found, expected = head.chunked(x, weight, *arguments), head.reference(x, weight, *arguments)
    for a, b in zip(
        (*found[:1], *torch.autograd.grad(found[0], (x, weight))),
        (*expected[:1], *torch.autograd.grad(expected[0], (x, weight))),
    ):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(found[1], expected[1])


def test_autocast_rounds_the_operands_as_linear_does() -> None:
    x, weight = torch.randn(9, 16, requires_grad=True), torch.randn(31, 16, requires_grad=True)
    arguments = (torch.randint(31, (9,)), torch.rand(9), 1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = head.chunked(x, weight, *arguments)[0], head.reference(x, weight, *arguments)[0]
    torch.testing.assert_close(found, expected)
    assert [g.dtype for g in torch.autograd.grad(found, (x, weight))] == [torch.float32, torch.float32]


@pytest.mark.parametrize("tokens", [40, 2 * head.ROWS + 300])
def test_chunks_have_few_shapes_however_many_tokens_carry_loss(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps code for each shape. With a new shape at each step, memory grew by 1.7 MiB a step, up to 600 MiB."""
    shapes: set[torch.Size] = set()
    rows = head.compute_loss_rows_eagerly
    monkeypatch.setattr(
        head, "compute_loss_rows_eagerly", lambda logits, *rest: shapes.add(logits.shape) or rows(logits, *rest)
    )
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 16, generator=generator, requires_grad=True) for size in (tokens, 24))
    targets = torch.randint(24, (tokens,), generator=generator)
    counts = range(1, tokens, 1 + tokens // 100)
    for carry in counts:
        weights = torch.zeros(tokens)
        weights[torch.randperm(tokens, generator=generator)[:carry]] = 1 / carry
        found, expected = (f(x, weight, targets, weights, 1e-3) for f in (head.chunked, head.reference))
        torch.testing.assert_close(found, expected)
        for ours, exact in zip(*(torch.autograd.grad(loss, (x, weight)) for loss, _ in (found, expected))):
            torch.testing.assert_close(ours, exact)
    assert len(shapes) <= max(1, min(tokens, head.ROWS) // head.PADDED_TO) < len(counts)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("N", "V", "itemsize", "memory", "chunk"),
    [
        (16384, 131072, 2, 80 * GIB, 8192),  # 2 GiB of logits
        (16384, 151936, 2, 80 * GIB, 4096),
        (16384, 32768, 2, 80 * GIB, 8192),
        (16384, 32768, 2, 16 * GIB, 8192),
        (16384, 131072, 2, 16 * GIB, 4096),  # 1 GiB of logits
        (16384, 131072, 4, 80 * GIB, 4096),
        (8192, 131072, 2, 80 * GIB, 8192),
        (300, 131072, 2, 80 * GIB, 300),
        (9000, 32768, 2, 80 * GIB, 4608),  # even chunks: 4,608 and 4,392
        (8200, 32768, 2, 80 * GIB, 4224),
        (0, 32768, 2, 80 * GIB, 1),
        (5, 1 << 40, 2, 80 * GIB, 1),
    ],
)
def test_the_size_of_a_chunk_on_a_gpu_follows_from_its_cost(
    N: int, V: int, itemsize: int, memory: int, chunk: int
) -> None:
    assert chunks.choose_gpu_chunk_tokens(N, V, itemsize, memory) == chunk
    assert chunk * V * itemsize <= max(V * itemsize, min(2 * GIB, memory // 16))
    if chunk < N:
        assert chunk % 128 == 0 or chunk == 1
        traffic, products = (
            12 * V / 3.35e12,
            6 * chunk * V / 989e12,
        )  # seconds an embedding dimension, an H100's data sheet
        assert chunk == 1 or traffic / products < 0.15


@pytest.mark.parametrize("tokens", [0, 1, 7, 16, 17, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_chunks_for_a_gpu_cover_every_token_with_loss(
    tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run on CPU tensors. A token without loss changes no result, however many chunks there are."""
    monkeypatch.setattr(chunks, "GPU_TOKENS", 16)
    monkeypatch.setattr(chunks, "EVEN", 4)
    generator = torch.Generator().manual_seed(tokens)
    x, weight = (torch.randn(size, 8, generator=generator).to(dtype) for size in (tokens, 31))
    targets, weights = torch.randint(31, (tokens,), generator=generator), torch.rand(tokens, generator=generator)
    weights[::3] = 0
    loss, nll = head.reference(x, weight, targets, weights, 1e-3)
    size = chunks.find_gpu_chunk_tokens(x, weight)
    poisoned = x.clone()
    poisoned[::3] = torch.finfo(dtype).max / 4  # their logits overflow
    found = chunks.compute_in_chunks(
        head.compute_loss_rows_eagerly_and_mask, poisoned, weight, targets, weights, 1e-3, True, True, size
    )
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found[0], loss, **tolerance)
    torch.testing.assert_close(found[1], nll, **tolerance)
    leaves = x.requires_grad_(), weight.requires_grad_()
    exact = torch.autograd.grad(head.reference(*leaves, targets, weights, 1e-3)[0], leaves)
    for mine, theirs in zip(found[2:], exact):
        torch.testing.assert_close(mine.to(dtype), theirs, **tolerance)
    with FakeTensorMode():
        empty = [torch.empty(t.shape, dtype=t.dtype) for t in (x, weight)]
        promised = chunks.make_fake_outputs(chunks.find_gpu_chunk_tokens, *empty, True, True)
    assert [(t.shape, t.dtype, t.stride()) for t in promised] == [(t.shape, t.dtype, t.stride()) for t in found]


@pytest.mark.parametrize("tokens", [100, 20000])
def test_the_host_never_waits_for_the_gpu(tokens: int) -> None:
    """The head runs on tensors without values, where an operation that needs a value, or a size that depends on values, raises."""
    with torch.device("meta"):
        x, weight = (torch.empty(n, 64, dtype=torch.bfloat16) for n in (tokens, 131072))
        targets, weights = torch.empty(tokens, dtype=torch.long), torch.empty(tokens)
    with pytest.raises((RuntimeError, NotImplementedError)):
        head.chunked_op._init_fn(
            x, weight, targets, weights, 1e-4, True, True, False
        )  # a CPU's: it begins with nonzero
    size = chunks.find_gpu_chunk_tokens(x, weight)
    found = chunks.compute_in_chunks(
        head.compute_loss_rows_eagerly_and_mask, x, weight, targets, weights, 1e-4, True, True, size
    )
    with FakeTensorMode():
        cuda = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in (x, weight, targets, weights)]
        promised = torch.ops.factory.linear_cross_entropy_chunked(*cuda, 1e-4, True, True, True)
    assert {t.device.type for t in promised} == {"cuda"}
    assert [(t.shape, t.dtype) for t in promised] == [(t.shape, t.dtype) for t in found]
    assert found[3].dtype == (torch.bfloat16 if tokens == 100 else torch.float32)
