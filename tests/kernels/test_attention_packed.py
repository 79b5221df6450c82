"""Attention that leaves other documents out: what is made of the documents once a batch, and what is made of the inputs.

FlashAttention runs on a GPU alone; here stands in for it what its documentation says that it computes, a stretch at a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.attention import flex, varlen
from kernels.contract.op import CASES, OracleCase
from kernels.contract.oracle import compare_with_fp64
from kernels.contract.registry import OPS, bind_ops, return_documents_unchanged

ATTENTION = OPS["attention"]


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=4), st.integers(0, 5))
def test_bounds_of_stretches_are_where_documents_begin(lengths_of_rows: list[list[int]], spare: int) -> None:
    T = max(map(sum, lengths_of_rows)) + 1  # each row is padded
    rows, begins = [], []
    for number, lengths in enumerate(lengths_of_rows):
        at = number * T
        for length in lengths:
            begins.append(at)
            at += length
        begins.append(at)
        pieces = [[document] * length for document, length in enumerate(lengths)]
        rows.append(sum(pieces, []) + [-1] * (T - sum(lengths)))
    found = varlen.find_document_run_bounds(torch.tensor(rows, dtype=torch.int32), len(begins) + spare)
    assert found.dtype == torch.int32
    assert found.tolist() == begins + [len(rows) * T] * (spare + 1)


def by_stretch(
    q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, bounds: Tensor, bounds_k: Tensor, most_q: int, most_k: int, **options: Any
) -> Tensor:  # fmt: skip
    """torch.nn.attention.varlen.varlen_attn, as documented: causal for the window (-1, 0)."""
    assert options["window_size"] == (-1, 0) and torch.equal(bounds, bounds_k) and bounds.dtype == torch.int32
    assert q_NHK.stride(-1) == 1 and q_NHK.shape[-1] % 8 == 0 and bounds[0] == 0 and bounds[-1] == len(q_NHK)
    out = torch.full_like(q_NHK, float("nan"))  # what no stretch covers stays NaN
    for first, last in zip(bounds.tolist(), bounds.tolist()[1:]):
        assert last - first <= min(most_q, most_k)
        if last > first:
            q, k, v = (x[first:last].transpose(0, 1) for x in (q_NHK, k_NGK, v_NGK))
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=options["scale"], enable_gqa=True)
            out = torch.index_copy(out, 0, torch.arange(first, last), o.transpose(0, 1))
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("values", ["normal", "outlier"])
def test_attention_by_stretches_equals_attention_with_the_mask(
    case: OracleCase, values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and every gradient against fp64: heads of any size, strided inputs, no row at all."""
    called = []
    stood_in = lambda *inputs, **options: called.append(1) or by_stretch(*inputs, **options)
    monkeypatch.setattr(varlen, "varlen_attn", stood_in)
    monkeypatch.setattr(
        varlen, "supports_head_dim", lambda head_dim, dtype: True
    )  # in fp32, too: exact enough to see any mistake
    for dtype in (torch.float32, torch.bfloat16):
        found = compare_with_fp64(ATTENTION, "varlen", case, dtype=dtype, values=values)
        assert found.ok, found.describe_failures()
    assert called or case.name == "empty"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_over_prepared_documents_equals_attention_over_documents(
    case: OracleCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", by_stretch)
    monkeypatch.setattr(varlen, "supports_head_dim", lambda head_dim, dtype: True)
    inputs = tuple(x.detach() for x in ATTENTION.inputs(case))  # FlexAttention has no backward on a CPU
    with torch.no_grad():
        expected = ATTENTION.reference(*inputs)
        for name in ("varlen", "flex"):
            implementation = ATTENTION.implementations[name]
            function = implementation.eager or implementation.function
            prepared = implementation.prepare_inputs(inputs)
            assert prepared[-1] is not inputs[-1] or case.name == "empty"
            for given_inputs in (inputs, prepared):
                torch.testing.assert_close(function(*given_inputs), expected)


def test_other_implementations_take_the_documents_unprepared() -> None:
    assert bind_ops({"attention": "native"}).prepare_attention is return_documents_unchanged
    documents = torch.zeros(1, 4, dtype=torch.int32)
    assert return_documents_unchanged(documents, 1) is documents
    assert flex.make_document_blocks(documents).shape == (1, 1, 4, 4)


@pytest.mark.long("a compilation; the fast tier makes the same blocks eager")
def test_flex_attention_makes_its_blocks_with_compiled_code() -> None:
    assert flex.make_blocks(lambda b, h, i, j: j <= i, 1, None, 4, 4, device="cpu").shape == (1, 1, 4, 4)


def test_a_head_too_large_for_flash_attention_is_reported() -> None:
    varlen_here = ATTENTION.implementations["varlen"]
    shape = CASES[0].shape
    assert varlen_here.fallback(shape, torch.bfloat16) == ""
    assert "heads of 320 elements" in varlen_here.fallback(replace(shape, head_dim=320), torch.bfloat16)
    assert "heads of 16 elements" in varlen_here.fallback(shape, torch.float32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_computes_heads_that_flash_attention_does_not_take(case: OracleCase) -> None:
    """The documents are given as they are, or prepared."""
    inputs = tuple(x.detach() for x in ATTENTION.inputs(case))
    expected = ATTENTION.reference(*inputs)
    implementation = ATTENTION.implementations["varlen"]
    assert torch.equal(varlen.varlen(*inputs), expected)
    assert torch.equal(varlen.varlen(*implementation.prepare_inputs(inputs)), expected)
