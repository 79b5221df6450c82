"""Attention with a window, a soft-cap, sinks and ALiBi: every combination in blocks, and against what transformers' models compute."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from kernels.contract.op import CASES, OracleCase
from kernels.contract.registry import OPS, list_idle_ops
from kernels.general_attention import blocks, flex, reference
from kernels.general_attention.visible_keys import VisibleKeys, make_visibility_mask
from models.rope import compute_alibi_slopes
from models.spec import ModelSpec

B, T, H, G, K = 2, 150, 4, 2, 6  # three blocks of queries


def draw(dtype: torch.dtype = torch.float64, length: int = T) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = lambda *size: torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return normal(B, length, H, K), normal(B, length, G, K), normal(B, length, G, K), normal(H)


def make_documents(length: int = T) -> Tensor:
    starts = torch.rand((B, length), generator=torch.Generator().manual_seed(1)) < 0.02
    return starts.cumsum(1)


@pytest.mark.parametrize(
    ("window", "softcap", "sinks", "slopes"), product((None, 1, 20, T + 5), (None, 1.5), (False, True), (False, True))
)
def test_blocks_compute_the_reference_and_its_gradients(
    window: int | None, softcap: float | None, sinks: bool, slopes: bool
) -> None:
    q, k, v, sink = draw()
    visible = VisibleKeys(make_documents(), window, torch.tensor(compute_alibi_slopes(H)) if slopes else None)
    given = (q, k, v, sink if sinks else None)
    inputs = [x for x in given if x is not None]
    upstream = torch.randn(q.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    results = []
    for compute in (reference, blocks.attend_in_blocks):
        o = compute(*given, softcap, visible)
        results.append([o, *torch.autograd.grad((o * upstream).sum(), inputs)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    with torch.no_grad():
        alone = flex.flex(*given, softcap, visible)  # on a CPU without its backward pass
    torch.testing.assert_close(alone, results[0][0], atol=1e-6, rtol=1e-5)


def test_a_window_bounds_the_products_that_are_computed() -> None:
    """Twice the row is twice the work, not four times, and documents change nothing about it."""
    counted = {}
    for length, window in ((1024, None), (1024, 100), (2048, 100)):
        q, k, v, sink = draw(torch.float32, length)
        with FlopCounterMode(display=False) as counter:
            blocks.attend_in_blocks(
                q, k, v, sink, None, VisibleKeys(make_documents(length), window, None)
            ).sum().backward()
        counted[length, window] = counter.get_total_flops()
    assert counted[2048, 100] / counted[1024, 100] == pytest.approx(2, rel=0.1)
    assert counted[1024, None] == 14 * B * H * K * 1024 * 1024 * 9 / 16  # eight blocks: 36 of 64 squares
    assert counted[1024, 100] < 0.3 * counted[1024, None]


def test_sinks_take_the_share_that_gpt_oss_gives_them() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    q, k, v, sink = draw()
    visible = VisibleKeys(torch.zeros(B, T, dtype=torch.int32), 20, None)
    mask = torch.zeros(B, T, T, dtype=torch.float64).masked_fill(~make_visibility_mask(visible), float("-inf"))
    layer: Any = SimpleNamespace(sinks=sink, num_key_value_groups=H // G, training=False)
    heads = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    expected, _ = eager_attention_forward(layer, heads[0], heads[1], heads[2], mask.unsqueeze(1), scaling=K**-0.5)
    torch.testing.assert_close(reference(q, k, v, sink, None, visible), expected.view(B, T, H, K))


def test_slopes_penalise_distance_as_bloom_does() -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    q, k, v, _ = draw()
    visible = VisibleKeys(torch.zeros(B, T, dtype=torch.int32), None, torch.tensor(compute_alibi_slopes(H)))
    alibi_BH1T = build_alibi_tensor(torch.ones(B, T, dtype=torch.int64), H, torch.float32).view(B, H, 1, T)
    heads = lambda x: x.repeat_interleave(H // x.shape[2], dim=2).transpose(1, 2)
    score = heads(q) @ heads(k).transpose(2, 3) * K**-0.5 + alibi_BH1T
    score = score.masked_fill(~make_visibility_mask(visible).unsqueeze(1), float("-inf"))
    expected = (score.softmax(-1) @ heads(v)).transpose(1, 2)
    torch.testing.assert_close(reference(q, k, v, None, None, visible), expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_prepared_blocks_give_what_the_keys_themselves_give(case: OracleCase) -> None:
    op = OPS["general_attention"]
    inputs = tree_map_only(Tensor, Tensor.detach, op.inputs(case))  # on a CPU without its backward pass
    with torch.no_grad():
        plain = flex.flex(*inputs)
        torch.testing.assert_close(flex.flex(*op.implementation("flex").prepare_inputs(inputs)), plain)
        torch.testing.assert_close(plain, op.reference(*inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("keys", "called"),
    [
        ({}, set()),
        ({"windows": [None, 4]}, {"general_attention"}),
        ({"attention_softcap": 50.0, "logit_softcap": 30.0}, {"general_attention", "softcapped_cross_entropy"}),
        ({"attention_sinks": True}, {"general_attention"}),
        ({"position": "alibi"}, {"general_attention"}),
    ],
)
def test_ops_that_a_model_never_calls_are_known_from_its_description(keys: dict[str, Any], called: set[str]) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "d_model": 16,
        "layers": 2,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 8,
        "d_ff": 16,
        "context": 16,
    }
    spec = ModelSpec(**sizes, **keys)
    idle = {"general_attention", "softcapped_cross_entropy"} - called
    assert set(list_idle_ops(spec.model_dump())) == idle
