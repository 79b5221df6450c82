"""The class of a machine names the instructions that torch uses, so one processor has several classes under emulation."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kernels.contract import machine

SAY = (
    "import json; from kernels.contract.machine import has_fast_bf16, describe_this_machine; "
    "print(json.dumps(describe_this_machine('cpu').to_json() | {'bf16': has_fast_bf16()}))"
)


def under(**variables: str) -> dict[str, str]:
    done = subprocess.run([sys.executable, "-c", SAY], env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.skipif("avx2" not in machine._cpu_facts()[1], reason="needs an x86 processor with AVX2")
def test_emulated_avx2_is_the_class_cpu_avx2_without_bf16() -> None:
    found = under(ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2")
    assert found["name"] == "cpu-avx2" and not found["bf16"]


@pytest.mark.skipif("avx2" not in machine._cpu_facts()[1], reason="needs an x86 processor with AVX2")
def test_without_vectors_the_class_names_the_architecture() -> None:
    assert under(ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41")["name"].startswith("cpu-x86")


@pytest.mark.parametrize(
    ("flags", "vectors", "bf16", "isa", "name"),
    [
        ("amx_bf16 avx512_bf16 avx2", "AVX512", True, "", "cpu-amx"),
        ("amx_bf16 avx512_bf16 avx2", "AVX512", True, "AVX512_CORE_BF16", "cpu-avx512-bf16"),
        ("amx_bf16 avx512_bf16 avx2", "AVX512", True, "AVX10_1_512_AMX", "cpu-amx"),
        ("amx_bf16 avx512_bf16 avx2", "AVX512", False, "AVX2", "cpu-avx512"),
        ("avx512_bf16 avx2", "AVX512", True, "", "cpu-avx512-bf16"),
        ("avx512f avx2", "AVX512", False, "", "cpu-avx512"),
        ("avx2", "AVX2", False, "", "cpu-avx2"),
        ("amx_bf16 avx512_bf16 avx2", "AVX2", True, "", "cpu-avx2"),
    ],
)
def test_machine_class_follows_from_hardware_and_permissions(
    monkeypatch: pytest.MonkeyPatch, flags: str, vectors: str, bf16: bool, isa: str, name: str
) -> None:
    monkeypatch.setattr(machine, "_cpu_facts", lambda: ("a processor", frozenset(flags.split())))
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: vectors)
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: bf16)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
    found = machine.describe_this_machine("cpu")
    assert found.name == name and found.device == "cpu" and found.threads >= 1
    assert machine.Machine(**found.to_json()) == found
