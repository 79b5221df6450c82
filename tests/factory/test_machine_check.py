"""The machine checks of ``factory check``: kernels and their substitutes, precision, disk space, GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from factory import machine_check
from factory.core.workspace import Workspace, WorkspaceConfig
from factory.training.planning import load_recipe
from kernels import native as native_library
from kernels.attention import cpp as attention_native
from kernels.contract import registry
from tests.support.factory.command import factory
from tests.support.git import git
from tests.support.messages import codes, the
from tests.support.paths import ROOT
from trainer.contract.plan import precision, rates

RECIPE = (ROOT / "policies" / "recipes" / "tiny.yaml").read_text()


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    made = Workspace.create(tmp_path / "factory", WorkspaceConfig(repository=str(tmp_path / "code")))
    for folder in (made.root / "policies" / "recipes", made.repository / "policies"):
        folder.mkdir(parents=True, exist_ok=True)
    return made


def _kernels(workspace: Workspace, kernels: str, precision: str = "bf16") -> tuple[bool | None, list[str]]:
    (workspace.repository / "policies" / "kernels.yaml").write_text(kernels)
    recipe = workspace.root / "policies" / "recipes" / f"{workspace.config.recipe}.yaml"
    recipe.write_text(RECIPE.replace("precision: fp32", f"precision: {precision}"))
    ok, lines = machine_check._kernels(workspace, load_recipe(workspace), {"precision": precision, "warning": ""})
    assert isinstance(lines, list)
    return ok, lines


def test_the_check_prints_a_line_for_every_op_with_substitutes_first(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_native, "is_usable", lambda head_dim, dtype: False)
    ok, (head, *lines) = _kernels(workspace, "cpu: {attention: native}")
    assert ok and "bf16 on cpu" in head and len(lines) == len(registry.OPS)
    assert lines[0].startswith("attention: native is replaced ") and "bf16" in lines[0]
    assert all("is replaced by" not in line for line in lines[1:])


def test_a_machine_without_bf16_products_is_reported(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_native, "is_usable", lambda head_dim, dtype: False)
    ok, lines = _kernels(workspace, "cpu: {attention: native}")
    assert ok and "cannot multiply bf16 matrices" in lines[1]


@pytest.mark.parametrize("fallback", registry.FALLBACKS)
def test_without_a_compiler_the_check_fails_or_reports_the_reference_kernel(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fallback: str
) -> None:
    for source in native_library.SOURCES.glob("*/*.cpp"):  # a library of this text was never compiled
        (tmp_path / source.parent.name).mkdir()
        (tmp_path / source.parent.name / source.name).write_text(f"{source.read_text()}\n// {tmp_path}\n")
    monkeypatch.setattr(native_library, "SOURCES", tmp_path)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native_library, "shutil", SimpleNamespace(which=lambda name: None))
    for cache in (native_library.load_library, registry.find_implementation_failure):
        cache.cache_clear()
    ok, lines = _kernels(workspace, f"fallback: {fallback}\ncpu: {{linear_cross_entropy: native}}")
    for cache in (native_library.load_library, registry.find_implementation_failure):
        cache.cache_clear()
    assert ok is (fallback == "reference")
    says = {"fail": "cannot run on this machine: native", "reference": "native is replaced by reference"}[fallback]
    assert says in lines[1] and "C++ compiler" in lines[1]


def test_the_error_for_an_unknown_kernel_names_the_known_kernels(workspace: Workspace) -> None:
    ok, lines = _kernels(workspace, "cpu: {attention: fast}")
    assert ok is False and "are: compiled" in lines[0]


def test_measured_rates_and_the_cost_of_a_slow_precision_are_reported(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok, lines = machine_check._precision(*machine_check._measured(workspace))
    assert ok and the(lines, "machine_check.precision").data["asked"] == "auto"
    assert "machine_check.step_time" in codes(lines)
    rates = {name: {"products": 1e9, "attention": 1e9, "loss head": 1e9} for name in ("fp32", "bf16")}
    slow = precision.PrecisionTimings("cpu", {"fp32": 0.1, "bf16": 4.0}, rates)
    monkeypatch.setattr(precision, "time_precisions", lambda recipe, device, seconds: slow)
    recipe = workspace.root / "policies" / "recipes" / f"{workspace.config.recipe}.yaml"
    recipe.write_text(RECIPE.replace("precision: fp32", "precision: bf16"))
    ok, lines = machine_check._precision(*machine_check._measured(workspace))
    assert ok is False and "bf16" in lines[-1] and "fp32" in lines[-1] and "40.0" in lines[-1]


def test_the_check_reads_the_kernel_policy_of_the_live_commit(workspace: Workspace) -> None:
    file = workspace.repository / "policies" / "kernels.yaml"
    git(workspace.repository.parent, "init", "-q", "-b", "main", str(workspace.repository))
    file.write_text("cpu: {rms_norm: compiled}")
    git(workspace.repository, "add", "-A")
    git(workspace.repository, "commit", "-q", "-m", "base")
    ok, _ = _kernels(workspace, "cpu: {rms_norm: not committed yet}")
    shown = json.loads(factory("config", "show", "kernels", "--json", "-w", str(workspace.root)).stdout)
    (one,) = shown["kernels"]["keys"]
    assert ok and (one["key"], one["value"]) == ("cpu.rms_norm", "compiled") and one["source"].endswith("as committed")
    git(workspace.repository, "add", "-A")
    git(workspace.repository, "commit", "-q", "-m", "a name that is none")
    ok, lines = _kernels(workspace, "cpu: {rms_norm: compiled}")
    assert ok is False and str(file) in lines[0]


def test_disk_space_below_the_retention_floor_is_reported(workspace: Workspace) -> None:
    ok, said = machine_check._workspace(workspace)
    assert ok and codes([said]) == ["machine_check.disk"]
    (workspace.root / "policies" / "retention.yaml").write_text("floor_share: 1.0\n")
    ok, said = machine_check._workspace(workspace)
    assert ok is False and codes([said]) == ["machine_check.disk_low"]


def test_each_gpu_is_reported_with_its_peak_and_reached_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
    stand_ins = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_name": lambda device: names[device.index],
        "get_device_properties": lambda device: SimpleNamespace(
            name=names[device.index], major=9, minor=0, total_memory=80 << 30
        ),
        "is_bf16_supported": lambda including_emulation: True,
    }
    for name, answer in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(rates, "measure_matmul_rate", lambda device, dtype: 7e14 if dtype == torch.bfloat16 else 0.0)
    monkeypatch.setattr(rates, "measure_memory_rate", lambda device: 2.9e12)
    ok, lines = machine_check._torch()
    gpus: Any = lines[1:]
    assert ok and codes(gpus) == ["machine_check.gpu"] * 2
    same = {"capability": "9.0", "memory": 80.0, "precision": "bf16", "products": 700.0, "copies": 2.9}
    for number, (line, peak) in enumerate(zip(gpus, ("989 TFLOP/s", "unknown (so no MFU)"), strict=True)):
        assert line.data == same | {"number": number, "name": names[number], "peak": peak}
