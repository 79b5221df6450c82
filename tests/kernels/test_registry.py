"""The choice of implementations: what is read, what is refused and what the refusal says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.registry import OPS, KernelError, bind, load_choice

SHIPPED = Path(__file__).parents[2] / "policies" / "kernels.yaml"


def test_the_shipped_choice_names_every_op_and_binds() -> None:
    for device in ("cpu", "cuda"):
        choice = load_choice(SHIPPED, device)
        assert choice.keys() == OPS.keys()
    choice = load_choice(SHIPPED, "cpu")
    fast = {"attention": "native", "linear_cross_entropy": "native", "adamw": "fused"}
    assert choice == dict.fromkeys(OPS, "reference") | fast
    assert bind(choice).attention is OPS["attention"].implementations["native"].function
    compiled = choice | {"attention": "recompute"}
    eager = bind(compiled, compile=False)  # the same maths, and torch.compile is not started
    assert eager.attention is OPS["attention"].implementations["recompute"].eager


def test_an_op_that_is_not_named_runs_its_reference(tmp_path: Path) -> None:
    path = tmp_path / "kernels.yaml"
    path.write_text("cpu:\n  attention: recompute\n")
    choice = load_choice(path)
    assert choice == dict.fromkeys(OPS, "reference") | {"attention": "recompute"}
    ops = bind(choice, "cpu", torch.bfloat16)
    assert ops.rms_norm is OPS["rms_norm"].reference
    assert ops.attention is OPS["attention"].implementations["recompute"].function


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cpu: {atention: recompute}", "no op 'atention'; there are: rms_norm"),
        ("cpu: {attention: fast}", "there are: compiled, flex, native, recompute, reference"),
        ("tpu: {}", "unknown device class 'tpu'"),
        ("cpu: {swiglu: triton}", "does not run on cpu; those that do: compiled, reference"),
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
