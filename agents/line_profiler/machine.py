"""The facts of a machine by which kernels are written: caches, vector units and cores of a processor, or the sizes of a GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch

VECTORS = (
    "avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8",
    "asimd", "asimddp", "bf16", "sve", "sve2",
)  # fmt: skip
CPU = Path("/sys/devices/system/cpu")


def read_machine_facts(device: torch.device, cpu: Path = CPU, flags: frozenset[str] | None = None) -> dict[str, str]:
    """The facts, by name. A fact that the machine does not tell is left out. ``cpu``: the folder in which Linux describes its processors.
    ``flags``: the processor's features; None: those in /proc/cpuinfo."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        return {
            "multiprocessors": str(gpu.multi_processor_count),
            "L2 cache": format_bytes(gpu.L2_cache_size),
            "shared memory of a multiprocessor": format_bytes(gpu.shared_memory_per_multiprocessor),
            "memory": format_bytes(gpu.total_memory),
        }
    flags = read_processor_flags() if flags is None else flags
    vectors = [name for name in VECTORS if name in flags]
    facts = {
        "threads": str(torch.get_num_threads()),
        "cache line": _read(cpu / "cpu0/cache/index0/coherency_line_size"),
    }
    facts["cache line"] = f"{facts['cache line']} bytes" if facts["cache line"] else ""
    facts |= _read_caches(cpu / "cpu0/cache")
    facts |= {
        "vector units": ", ".join(vectors),
        "vector code that torch uses": torch.backends.cpu.get_cpu_capability(),
    }
    return {name: fact for name, fact in facts.items() if fact}


def _read_caches(folder: Path) -> Mapping[str, str]:
    found = {}
    for index in sorted(folder.glob("index*")):
        kind, level, size = (_read(index / name) for name in ("type", "level", "size"))
        if kind in ("Data", "Unified") and level and size:
            cores = _count_cores(_read(index / "shared_cpu_list"))
            found[f"L{level} cache"] = f"{size.removesuffix('K')} KiB" + (
                f", shared by {cores} threads" if cores > 1 else ""
            )
    return found


def _count_cores(listed: str) -> int:
    """
    >>> _count_cores("0-3,8"), _count_cores("")
    (5, 0)
    """
    ranges = [part.partition("-") for part in listed.split(",") if part]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def read_processor_flags() -> frozenset[str]:
    """The features that /proc/cpuinfo names; none without that file."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return frozenset(found[1].split() if found else ())


def format_bytes(size: int) -> str:
    """
    >>> format_bytes(50 << 20), format_bytes(48 << 10), format_bytes(80 << 30)
    ('50 MiB', '48 KiB', '80 GiB')
    """
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << shift:
            return f"{size / (1 << shift):.3g} {unit}"
    return f"{size} bytes"
