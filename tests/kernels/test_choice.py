"""How ``kernels.yaml`` is read as data, and which implementation ``auto`` stands for."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kernels.contract.choice import EVERY_OP, list_auto_ops, read_device_section, replace_auto, resolve_auto_in_text
from kernels.contract.registry import OPS, KernelError, load_choice
from tests.support.paths import ROOT

TEXT = "fallback: reference\ncpu:\n  attention: auto\n  adamw: auto\n  swiglu: native\ncuda:\n  attention: flex\n"


def test_auto_is_replaced_by_tuning_and_a_name_is_kept() -> None:
    section = read_device_section(TEXT, "cpu")
    assert list_auto_ops(section) == ["attention", "adamw"]
    assert replace_auto(section, {"attention": "recompute", "swiglu": "reference"}) == {
        "attention": "recompute",
        "adamw": "fused",
        "swiglu": "native",
    }


def test_untuned_auto_is_the_reference_and_the_fused_optimiser() -> None:
    assert replace_auto(read_device_section(TEXT, "cpu")) == {
        "attention": "reference",
        "adamw": "fused",
        "swiglu": "native",
    }


def test_resolved_text_keeps_one_device_and_the_fallback() -> None:
    text = resolve_auto_in_text(TEXT, "cpu", {"attention": "native"})
    assert yaml.safe_load(text) == {
        "cpu": {"attention": "native", "adamw": "fused", "swiglu": "native"},
        "fallback": "reference",
    }


def test_registry_reads_auto_and_refuses_an_unknown_op(tmp_path: Path) -> None:
    path = tmp_path / "kernels.yaml"
    path.write_text(TEXT)
    assert load_choice(path, "cpu", {"attention": "recompute"}) == dict.fromkeys(OPS, "reference") | {
        "attention": "recompute",
        "adamw": "fused",
        "swiglu": "native",
    }
    path.write_text("cpu:\n  atention: auto\n")
    with pytest.raises(KernelError, match=r"no op 'atention'"):
        load_choice(path)


def test_kernels_yaml_lists_every_op_as_auto() -> None:
    text = (ROOT / "policies" / "kernels.yaml").read_text()
    for device in ("cpu", "cuda"):
        assert sorted(list_auto_ops(read_device_section(text, device))) == sorted(OPS) == sorted(EVERY_OP)
