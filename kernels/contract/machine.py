"""Describes the machine: the class of its processor or GPU, and the versions on which a measurement depends.

Kernel tuning, benchmark baselines and the revalidation of merged patches name machines by their class, ``Machine.name``. The class says which
instructions torch *uses*, not which ones the processor has: ``ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2`` makes any x86 machine
``cpu-avx2``.

    cpu-amx            bf16 products in matrix units (Sapphire Rapids and later)
    cpu-avx512-bf16    bf16 products in vectors (Zen 4, Cooper Lake)
    cpu-avx512         wide vectors, no bf16 products
    cpu-avx2           most laptops and many servers; bf16 is emulated, and slower than fp32 by an order of magnitude or two
    cpu-<machine>      any other processor, as ``uname -m`` names it, or x86 without AVX2 in use
    cuda-sm<NN>-<name> an NVIDIA GPU of that compute capability
"""

from __future__ import annotations

import functools
import os
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

CPU_CLASSES = ("cpu-amx", "cpu-avx512-bf16", "cpu-avx512", "cpu-avx2")  # of x86, best first
NOT_AMX = ("ALL", "DEFAULT", "")  # values of ONEDNN_MAX_CPU_ISA that leave AMX in use


@dataclass(frozen=True)
class Machine:
    """One device that training can run on. Equal machines give comparable times."""

    name: str  # the class, as above
    device: str  # 'cpu' or 'cuda'
    processor: str  # its maker's name for it
    threads: int  # number of threads in which torch computes; 0 on a GPU
    torch: str
    driver: str  # of a GPU: the kernel's driver and CUDA; empty on a CPU

    def to_json(self) -> dict[str, str | int]:
        return asdict(self)

    def __str__(self) -> str:
        threads = f", {self.threads} threads" if self.threads else ""
        return f"{self.name} ({self.processor}{threads}), torch {self.torch}"


def describe_this_machine(device: str | None = None) -> Machine:
    """The machine on which this process computes. ``device``: 'cpu' or 'cuda'; by default the GPU if there is one."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        gpu = torch.cuda.get_device_name()
        slug = re.sub(r"\W+", "-", gpu).strip("-").lower()
        return Machine(
            f"cuda-sm{major}{minor}-{slug}",
            device,
            gpu,
            0,
            torch.__version__,
            f"{_driver()}, CUDA {torch.version.cuda}",
        )
    return Machine(_cpu_class(), device, _cpu_facts()[0], torch.get_num_threads(), torch.__version__, "")


def has_fast_bf16() -> bool:
    """True if this CPU can multiply bf16 in hardware and torch's settings allow it."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and _cpu_class() in CPU_CLASSES[:2]


def choose_fast_precision(device: str) -> str:
    """The precision in which a device multiplies fastest, ``bf16`` or ``fp32``, by its class. Nothing is measured."""
    return "bf16" if device != "cpu" or has_fast_bf16() else "fp32"


def _cpu_class() -> str:
    vectors = torch.backends.cpu.get_cpu_capability()  # what ATEN_CPU_CAPABILITY leaves
    flags = _cpu_facts()[1]
    bf16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # what ONEDNN_MAX_CPU_ISA leaves
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if bf16 and "amx_bf16" in flags and vectors == "AVX512" and (isa in NOT_AMX or "AMX" in isa):
        return "cpu-amx"
    if bf16 and "avx512_bf16" in flags and vectors == "AVX512":
        return "cpu-avx512-bf16"
    known = {"AVX512": "cpu-avx512", "AVX2": "cpu-avx2"}
    return known.get(vectors, f"cpu-{platform.machine().lower().replace('_', '-')}")


@functools.cache
def _cpu_facts() -> tuple[str, frozenset[str]]:
    """(model name, feature flags) from /proc/cpuinfo; (the architecture, none) without that file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    processor = name.group(1).strip() if name else platform.processor() or platform.machine()
    return processor, frozenset(flags.group(1).split() if flags else ())


def _driver() -> str:
    """The version of NVIDIA's kernel driver; empty where there is none."""
    facts = Path("/proc/driver/nvidia/version")
    return facts.read_text().partition("\n")[0] if facts.is_file() else ""
