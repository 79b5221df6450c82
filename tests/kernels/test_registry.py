"""The choice of implementations: what is read, what is refused and what the refusal says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernels import attention
from kernels import native as native_library
from kernels.attention import cpp as attention_native
from kernels.contract import registry
from kernels.contract.bench import compare
from kernels.contract.op import CASES, Case, Shape
from kernels.contract.registry import (
    OPS,
    Computing,
    KernelError,
    KernelWarning,
    bind,
    computing,
    load_choice,
    load_fallback,
)
from tests.support.paths import ROOT

SHIPPED = ROOT / "policies" / "kernels.yaml"


def test_the_shipped_choice_names_every_op_and_binds() -> None:
    for device in ("cpu", "cuda"):
        choice = load_choice(SHIPPED, device)
        assert choice.keys() == OPS.keys()
    choice = load_choice(SHIPPED, "cpu")
    assert choice == dict.fromkeys(OPS, "reference") | {"adamw": "fused"}  # untuned
    assert bind(choice).attention is OPS["attention"].reference
    compiled = choice | {"attention": "recompute"}
    eager = bind(compiled, compile=False)  # the same maths, and torch.compile is not started
    assert eager.attention is OPS["attention"].implementations["recompute"].eager


def test_an_op_that_is_not_named_runs_its_reference(tmp_path: Path) -> None:
    path = tmp_path / "kernels.yaml"
    path.write_text("cpu:\n  linear_cross_entropy: chunked\n")
    choice = load_choice(path)
    assert choice == dict.fromkeys(OPS, "reference") | {"linear_cross_entropy": "chunked"}
    ops = bind(choice, "cpu", torch.bfloat16)
    assert ops.rms_norm is OPS["rms_norm"].reference
    assert ops.linear_cross_entropy is OPS["linear_cross_entropy"].implementations["chunked"].function


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cpu: {atention: recompute}", "no op 'atention'; there are: rms_norm"),
        ("cpu: {attention: fast}", "there are: compiled, flex, native, recompute, reference, varlen"),
        ("cpu: {attention: 'native, fast'}", "has no implementation 'fast'"),
        ("cpu: {attention: 'native, varlen'}", "varlen does not run on cpu"),
        ("tpu: {}", "unknown device class 'tpu'"),
        ("cpu: {swiglu: triton}", "does not run on cpu; those that do: compiled, native, reference"),
        ("fallback: eager", "fallback: expected one of fail, reference, got 'eager'"),
        ("fallback: true", "fallback: expected one of fail, reference, got True"),
        ("cpu: [attention]", "expected a map"),
        ("[", "cannot be read"),
        ("", "expected a map"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    path = tmp_path / "kernels.yaml"
    path.write_text(text)
    with pytest.raises(KernelError, match="kernels.yaml") as raised:
        load_choice(path)
    assert says in str(raised.value)


def test_integers_are_no_dtype_to_train_in() -> None:
    with pytest.raises(KernelError, match="no dtype"):
        bind({}, "cpu", torch.int64)


def test_unknown_devices_and_fallbacks_are_refused() -> None:
    with pytest.raises(KernelError, match="unknown device class 'meta'; there are: cpu, cuda"):
        bind({}, "meta")
    with pytest.raises(KernelError, match="unknown fallback 'eager'; there are: fail, reference"):
        bind({}, fallback="eager")


def test_a_device_that_is_not_here_is_an_error_that_lists_what_there_is() -> None:
    with pytest.raises(KernelError, match="unknown device 'tpu'; there are: cpu, cuda"):
        compare("swiglu", "native", device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(KernelError, match="device 'cuda': torch sees no GPU here; there is: cpu"):
            compare("swiglu", "compiled", device="cuda")


def test_the_fallback_is_a_choice_and_to_fail_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "kernels.yaml"
    path.write_text("fallback: reference\ncpu: {attention: native}\n")
    assert load_fallback(path) == "reference" and load_fallback(SHIPPED) == "fail"
    assert load_choice(path)["attention"] == "native"


@pytest.fixture
def broken_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """C++ that does not compile, in the place of the native loss head's."""
    (tmp_path / "linear_cross_entropy").mkdir()
    (tmp_path / "linear_cross_entropy" / "linear_cross_entropy.cpp").write_text("this is no C++;\n")
    monkeypatch.setattr(native_library, "SOURCES", tmp_path)
    caches = (native_library.library, registry.failure)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("broken_source")
def test_a_kernel_that_does_not_compile_fails_the_run_or_is_replaced_as_the_policy_says() -> None:
    choice = {"linear_cross_entropy": "native"}
    with pytest.raises(KernelError, match="linear_cross_entropy: native fails on cpu") as raised:
        bind(choice)
    assert "could not compile" in str(raised.value) and "fallback: reference" in str(raised.value)
    with pytest.warns(
        KernelWarning,
        match="linear_cross_entropy: native fails on cpu in torch.float32(?s:.*); the reference runs instead",
    ):
        ops = bind(choice, fallback="reference")
    assert ops.linear_cross_entropy is OPS["linear_cross_entropy"].reference
    computes = [
        one
        for fallback in ("fail", "reference")
        for one in computing(choice, "cpu", torch.float32, False, fallback, Shape())
        if one.op == "linear_cross_entropy"
    ]
    assert [one.by for one in computes] == ["", "reference"] and all("could not compile" in one.why for one in computes)
    assert "cannot run here" in str(computes[0]) and "native → reference computes instead" in str(computes[1])


@pytest.mark.usefixtures("broken_source")
def test_of_several_names_the_first_that_works_runs_and_one_line_says_why() -> None:
    choice = {"linear_cross_entropy": "native, chunked, reference"}
    with pytest.warns(KernelWarning, match="native fails on cpu in torch.float32(?s:.*); chunked runs instead"):
        ops = bind(choice)
    assert ops.linear_cross_entropy is OPS["linear_cross_entropy"].implementations["chunked"].function
    (one,) = (c for c in computing(choice, "cpu", torch.float32, True, "fail", Shape()) if c.why)
    assert (one.op, one.chosen, one.by) == ("linear_cross_entropy", "native, chunked, reference", "chunked")
    with pytest.raises(KernelError, match="native fails on cpu"):
        bind({"linear_cross_entropy": "native, native"})


def test_of_several_names_one_that_would_take_another_in_its_place_is_passed_over() -> None:
    with pytest.warns(KernelWarning, match="the C\\+\\+ is for bf16, not float32; the reference runs instead"):
        assert bind({"attention": "native, reference"}).attention is OPS["attention"].reference


def test_the_first_of_several_names_is_what_is_shown_where_it_works() -> None:
    found = computing({"swiglu": "native, reference"}, "cpu", torch.float32, True, "fail", Shape())
    (one,) = (c for c in found if c.op == "swiglu")
    assert (one.chosen, one.by, one.why) == ("native", "native", "")


def _attention(dtype: torch.dtype) -> Computing:
    found = computing({"attention": "native"}, "cpu", dtype, True, "fail", Shape())
    assert [one.op for one in found] == list(OPS)
    return next(one for one in found if one.op == "attention")


def test_a_replacement_implementation_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said of ``native`` attention wherever it is not the C++ that computes, and nowhere else."""
    ran: list[str] = []
    monkeypatch.setattr(attention, "recompute", lambda q, *rest: ran.append("recompute") or q)
    monkeypatch.setattr(attention_native, "forward_op", lambda q, *rest: ran.append("native") or q)
    for dtype in (torch.float32, torch.bfloat16):
        for units in (True, False):
            monkeypatch.setattr(attention_native, "usable", lambda head_dim, units=units: units)
            attention.native(*OPS["attention"].inputs(CASES[0], dtype=dtype))
            fallback = attention.native_fallback(Shape(), dtype)
            assert ran.pop() == (fallback.split(",")[0] or "native"), (dtype, units)


def test_the_table_shows_what_computes() -> None:
    said = _attention(torch.float32)
    assert (said.chosen, said.by) == ("native", "recompute, uncompiled") and "not float32" in said.why
    if attention_native.usable(Shape().head_dim):
        assert _attention(torch.bfloat16) == Computing("attention", "native", "native")
    found = computing({"adamw": "compiled"}, "cpu", torch.float32, False, "fail", Shape())
    eager = next(one for one in found if one.op == "adamw")
    assert (eager.by, eager.why) == ("compiled, uncompiled", "the recipe says compile: false")


# Of the shape below: elements moved (each input and output once) and FLOPs, forward; the same backward.
X, Q, K, F, TABLE = (
    24 * 5,
    24 * 4 * 6,
    24 * 2 * 6,
    24 * 7,
    11 * 5,
)  # tokens · d_model, queries, keys, hidden, the vocabulary's rows
COSTS = {
    "rms_norm": (2 * X, 4 * X, 3 * X, 9 * X),
    "add_rms_norm": (4 * X, 5 * X, 4 * X, 10 * X),
    "qk_norm_rope": (2 * Q, 7 * Q, 3 * Q, 13 * Q),
    "swiglu": (3 * F, 5 * F, 5 * F, 12 * F),
    "embedding": (2 * X, 0, X + TABLE, X),
    "attention": (2 * Q + 2 * K, 2 * Q * 8, 4 * Q + 4 * K, 5 * Q * 8),
    "linear_cross_entropy": (X + TABLE, 2 * X * 11, 2 * (X + TABLE), 4 * X * 11),
}


@pytest.mark.parametrize("name", OPS)
def test_the_cost_of_an_op_is_what_it_must_move_and_multiply(name: str) -> None:
    """The table is counted by hand; products by torch's own counter, of the reference as it runs."""
    op, shape = OPS[name], Shape(batch=3, context=8, d_model=5, heads=4, kv_heads=2, head_dim=6, d_ff=7, vocab_size=11)
    cost, twice = op.cost(shape, 2), op.cost(shape, 4)
    found = cost.forward_bytes / 2, cost.forward_flops, cost.backward_bytes / 2, cost.backward_flops
    if name in COSTS:
        assert found == COSTS[name] and twice.forward_bytes == 2 * cost.forward_bytes
    else:
        assert found[2:] == (0, 0)
    inputs = op.inputs(Case("here", shape))
    with FlopCounterMode(display=False) as counter:
        op.reference(*inputs)
    products = counter.get_total_flops()
    if (
        name == "newton_schulz"
    ):  # in bf16 inside, [5, 7]: three passes over it and four over [5, 5] a step; read and written once
        assert cost.forward_flops == products and cost.forward_bytes == 3 * (5 * (3 * 35 + 4 * 25) * 2 + 35 * (2 + 2))
    elif name == "linear_cross_entropy":
        assert cost.forward_flops == products
    elif name == "adamw":
        weights = sum(weight.numel() for weight in inputs[0])
        assert found[:2] == (7 * weights, 15 * weights)
    elif name != "attention":  # the kernel that computes it on a CPU is not counted
        assert products == 0
