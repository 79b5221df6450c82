"""What the chunked head promises beside the right numbers: no logits in memory, no work for tokens without loss,
compile sees it."""

from __future__ import annotations

import pytest
import torch

from kernels import linear_cross_entropy as head


def test_custom_op_registration_is_sound() -> None:
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    targets, weights = torch.arange(5), torch.tensor([1.0, 0.0, 2.0, 0.5, 0.0])
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(head.chunked_op, (x, weight, targets, weights, 1e-3, True, False), test_utils=tests)


def test_nothing_carries_loss() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    loss, nll = head.chunked(x, weight, torch.arange(3), torch.zeros(3), 1e-3)
    loss.backward()
    assert loss == 0 and not nll.any()
    assert x.grad is not None and not x.grad.any()


def test_several_chunks_and_a_ragged_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_however_many_tokens_carry_loss_chunks_have_few_shapes(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps code for each shape: another one each step was 1.7 MiB a step, up to 600 MiB."""
    shapes: set[torch.Size] = set()
    rows = head.rows_eager
    monkeypatch.setattr(head, "rows_eager", lambda logits, *rest: shapes.add(logits.shape) or rows(logits, *rest))
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
