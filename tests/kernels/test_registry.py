"""The choice of implementations: reading kernels.yaml, and the errors for a wrong choice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernels import attention
from kernels import native as native_library
from kernels.attention import cpp as attention_native
from kernels.contract import registry
from kernels.contract.bench import compare_implementations
from kernels.contract.op import CASES, OracleCase, Shape
from kernels.contract.registry import (
    OPS,
    ChosenImplementation,
    KernelReplacedWarning,
    bind_ops,
    find_implementations_in_use,
    load_choice,
    load_fallback,
)
from tests.support.messages import codes, refused
from tests.support.paths import ROOT

SHIPPED = ROOT / "policies" / "kernels.yaml"


def test_the_shipped_kernels_yaml_names_every_op_and_binds() -> None:
    for device in ("cpu", "cuda"):
        choice = load_choice(SHIPPED, device)
        assert choice.keys() == OPS.keys()
    choice = load_choice(SHIPPED, "cpu")
    untuned = {"general_attention": "blocks", "softcapped_cross_entropy": "chunked", "adamw": "fused"}
    assert choice == dict.fromkeys(OPS, "reference") | untuned
    assert bind_ops(choice).attention is OPS["attention"].reference
    compiled = choice | {"attention": "recompute"}
    eager = bind_ops(compiled, compile=False)  # the same maths, and torch.compile is not started
    assert eager.attention is OPS["attention"].implementations["recompute"].eager


def test_an_op_that_is_not_named_runs_its_reference(tmp_path: Path) -> None:
    path = tmp_path / "kernels.yaml"
    path.write_text("cpu:\n  linear_cross_entropy: chunked\n")
    choice = load_choice(path)
    assert choice == dict.fromkeys(OPS, "reference") | {"linear_cross_entropy": "chunked"}
    ops = bind_ops(choice, "cpu", torch.bfloat16)
    assert ops.rms_norm is OPS["rms_norm"].reference
    assert ops.linear_cross_entropy is OPS["linear_cross_entropy"].implementations["chunked"].function


@pytest.mark.parametrize(
    ("text", "code", "data"),
    [
        ("cpu: {atention: recompute}", "kernels.no_op", {"op": "atention", "known": list(OPS)}),
        (
            "cpu: {attention: fast}",
            "kernels.no_implementation",
            {"implementation": "fast", "known": ["compiled", "flex", "native", "recompute", "reference", "varlen"]},
        ),
        (
            "cpu: {attention: 'native, fast'}",
            "kernels.no_implementation",
            {"op": "attention", "implementation": "fast"},
        ),
        ("cpu: {attention: 'native, varlen'}", "kernels.wrong_device", {"implementation": "varlen", "device": "cpu"}),
        ("tpu: {}", "kernels.no_device_class", {"name": "tpu"}),
        (
            "cpu: {swiglu: triton}",
            "kernels.wrong_device",
            {"op": "swiglu", "known": ["compiled", "native", "reference"]},
        ),
        ("fallback: eager", "kernels.wrong_fallback", {"value": "eager", "allowed": ("fail", "reference")}),
        ("fallback: true", "kernels.wrong_fallback", {"value": True}),
        ("cpu: [attention]", "kernels.not_a_section", {}),
    ],
)
def test_a_wrong_key_of_kernels_yaml_is_refused_and_the_file_named(
    tmp_path: Path, text: str, code: str, data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    path = tmp_path / "kernels.yaml"
    path.write_text(text)
    with refused("kernels.wrong_key", file=str(path), key=text.partition(":")[0]) as found:
        load_choice(path)
    problem = found.value.data["problem"]
    assert problem.code == code and {name: problem.data[name] for name in data} == data


@pytest.mark.parametrize(("text", "code"), [("[", "kernels.not_yaml"), ("", "kernels.not_a_map")])
def test_a_kernels_yaml_that_is_not_a_mapping_is_refused(tmp_path: Path, text: str, code: str) -> None:
    (tmp_path / "kernels.yaml").write_text(text)
    with refused(code) as found:
        load_choice(tmp_path / "kernels.yaml")
    assert "kernels.yaml" in str(found.value)


def test_an_integer_dtype_is_refused() -> None:
    with refused("kernels.wrong_dtype", dtype="torch.int64"):
        bind_ops({}, "cpu", torch.int64)


def test_unknown_devices_and_fallbacks_are_refused() -> None:
    with refused("kernels.no_device_class", name="meta", known=("cpu", "cuda")):
        bind_ops({}, "meta")
    with refused("kernels.wrong_fallback", value="eager", allowed=("fail", "reference")):
        bind_ops({}, fallback="eager")


def test_a_missing_device_is_an_error_that_lists_the_present_ones() -> None:
    with refused("kernels.no_device_class", name="tpu", known=("cpu", "cuda")):
        compare_implementations("swiglu", "native", device="tpu")
    if not torch.cuda.is_available():
        with refused("kernels.no_gpu", device="cuda"):
            compare_implementations("swiglu", "compiled", device="cuda")


def test_kernels_yaml_chooses_the_fallback_and_the_default_is_to_fail(tmp_path: Path) -> None:
    path = tmp_path / "kernels.yaml"
    path.write_text("fallback: reference\ncpu: {attention: native}\n")
    assert load_fallback(path) == "reference" and load_fallback(SHIPPED) == "fail"
    assert load_choice(path)["attention"] == "native"


@pytest.fixture
def broken_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the C++ of the native loss head by C++ that does not compile."""
    (tmp_path / "linear_cross_entropy").mkdir()
    (tmp_path / "linear_cross_entropy" / "linear_cross_entropy.cpp").write_text("this is no C++;\n")
    monkeypatch.setattr(native_library, "SOURCES", tmp_path)
    caches = (native_library.load_library, registry.find_implementation_failure)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("broken_source")
def test_a_kernel_that_does_not_compile_fails_the_run_or_is_replaced_as_the_policy_says() -> None:
    choice = {"linear_cross_entropy": "native"}
    with refused("kernels.none_works", op="linear_cross_entropy") as found:
        bind_ops(choice)
    (problem,) = found.value.data["problems"]
    assert (problem.code, problem.data["implementation"], problem.data["device"]) == ("kernels.fails", "native", "cpu")
    assert "could not compile" in problem and "fallback: reference" in str(found.value)
    with pytest.warns(KernelReplacedWarning) as warned:
        ops = bind_ops(choice, fallback="reference")
    said = warned[0].message.args[0]
    assert (said.code, said.data["op"], said.data["taken"]) == (
        "kernels.falls_back",
        "linear_cross_entropy",
        "the reference",
    )
    assert said.data["problems"][0].data["dtype"] == "torch.float32"
    assert ops.linear_cross_entropy is OPS["linear_cross_entropy"].reference
    computes = [
        one
        for fallback in ("fail", "reference")
        for one in find_implementations_in_use(choice, "cpu", torch.float32, False, fallback, Shape())
        if one.op == "linear_cross_entropy"
    ]
    assert [one.by for one in computes] == ["", "reference"] and all("could not compile" in one.why for one in computes)
    assert codes([one.__str__() for one in computes]) == ["kernels.not_replaced", "kernels.replaced"]


@pytest.mark.usefixtures("broken_source")
def test_of_several_names_the_first_that_works_runs_and_one_line_says_why() -> None:
    choice = {"linear_cross_entropy": "native, chunked, reference"}
    with pytest.warns(KernelReplacedWarning) as warned:
        ops = bind_ops(choice)
    said = warned[0].message.args[0]
    assert said.code == "kernels.falls_back" and said.data["taken"] == "chunked"
    assert codes(said.data["problems"]) == ["kernels.fails"]
    assert ops.linear_cross_entropy is OPS["linear_cross_entropy"].implementations["chunked"].function
    (one,) = (c for c in find_implementations_in_use(choice, "cpu", torch.float32, True, "fail", Shape()) if c.why)
    assert (one.op, one.chosen, one.by) == ("linear_cross_entropy", "native, chunked, reference", "chunked")
    with refused("kernels.none_works") as found:
        bind_ops({"linear_cross_entropy": "native, native"})
    assert codes(found.value.data["problems"]) == ["kernels.fails"] * 2


def test_of_several_names_an_implementation_that_another_would_replace_is_passed_over() -> None:
    with pytest.warns(KernelReplacedWarning) as warned:
        bound = bind_ops({"attention": "native, reference"}, dtype=torch.float16)
    assert bound.attention is OPS["attention"].reference
    said = warned[0].message.args[0]
    assert said.data["taken"] == "the reference" and "not in torch.float16" in said


def test_the_first_of_several_names_is_shown_if_it_works() -> None:
    found = find_implementations_in_use({"swiglu": "native, reference"}, "cpu", torch.float32, True, "fail", Shape())
    (one,) = (c for c in found if c.op == "swiglu")
    assert (one.chosen, one.by, one.why) == ("native", "native", "")


def _attention(dtype: torch.dtype) -> ChosenImplementation:
    found = find_implementations_in_use({"attention": "native"}, "cpu", dtype, True, "fail", Shape())
    assert [one.op for one in found] == list(OPS)
    return next(one for one in found if one.op == "attention")


def test_a_replacement_implementation_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """``native`` attention reports a replacement exactly if its C++ does not compute."""
    ran: list[str] = []
    monkeypatch.setattr(attention, "recompute", lambda q, *rest: ran.append("recompute") or q)
    monkeypatch.setattr(attention_native, "forward_op", lambda q, *rest: ran.append("native") or q)
    for dtype in (torch.float32, torch.bfloat16):
        for units in (True, False):
            monkeypatch.setattr(
                attention_native, "is_usable", lambda head_dim, dtype, units=units: units or dtype == torch.float32
            )
            attention.native(*OPS["attention"].inputs(CASES[0], dtype=dtype))
            fallback = attention.find_native_fallback(Shape(), dtype)
            assert ran.pop() == (fallback.split(",")[0] or "native"), (dtype, units)


def test_the_table_shows_the_implementation_that_computes() -> None:
    said = _attention(torch.float16)
    assert (said.chosen, said.by) == ("native", "recompute, uncompiled") and "not in torch.float16" in said.why
    assert _attention(torch.float32) == ChosenImplementation("attention", "native", "native")
    if attention_native.is_usable(Shape().head_dim, torch.bfloat16):
        assert _attention(torch.bfloat16) == ChosenImplementation("attention", "native", "native")
    found = find_implementations_in_use({"adamw": "compiled"}, "cpu", torch.float32, False, "fail", Shape())
    eager = next(one for one in found if one.op == "adamw")
    assert (eager.by, codes([eager.why])) == ("compiled, uncompiled", ["kernels.uncompiled"])


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
    "general_attention": (2 * Q + 2 * K, 4 * Q * 2, 4 * Q + 4 * K, 10 * Q * 2),  # each query sees two keys
    "linear_cross_entropy": (X + TABLE, 2 * X * 11, 2 * (X + TABLE), 4 * X * 11),
    "softcapped_cross_entropy": (X + TABLE, 2 * X * 11, 2 * (X + TABLE), 4 * X * 11),
}


@pytest.mark.parametrize("name", OPS)
def test_the_cost_of_an_op_is_its_least_bytes_and_flops(name: str) -> None:
    """The table was counted by hand. Torch's own counter counts the products of the reference while it runs."""
    op, shape = OPS[name], Shape(batch=3, context=8, d_model=5, heads=4, kv_heads=2, head_dim=6, d_ff=7, vocab_size=11)
    cost, twice = op.cost(shape, 2), op.cost(shape, 4)
    found = cost.forward_bytes / 2, cost.forward_flops, cost.backward_bytes / 2, cost.backward_flops
    if name in COSTS:
        assert found == COSTS[name] and twice.forward_bytes == 2 * cost.forward_bytes
    else:
        assert found[2:] == (0, 0)
    inputs = op.inputs(OracleCase("here", shape))
    with FlopCounterMode(display=False) as counter:
        op.reference(*inputs)
    products = counter.get_total_flops()
    if (
        name == "newton_schulz"
    ):  # in bf16 inside, [5, 7]: three passes over it and four over [5, 5] a step; read and written once
        assert cost.forward_flops == products and cost.forward_bytes == 3 * (5 * (3 * 35 + 4 * 25) * 2 + 35 * (2 + 2))
    elif name.endswith("cross_entropy"):
        assert cost.forward_flops == products
    elif name == "general_attention":  # the reference multiplies the whole square
        assert cost.forward_flops == products * 2 / 8
    elif name == "adamw":
        weights = sum(weight.numel() for weight in inputs[0])
        assert found[:2] == (7 * weights, 15 * weights)
    elif name != "attention":  # the kernel that computes it on a CPU is not counted
        assert products == 0
