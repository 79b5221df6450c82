"""The table of GPU models, by their makers' data sheets. A plan names a GPU by its short name. For MFU it is found by the driver's name.

All peaks are of dense products, without the sparsity that the larger number of a data sheet needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.contract.plan.sizing import GB

# Of one node, and of A100s: torchtitan 41 % (Llama 3 8B, 8 H100, bf16, compiled), autoresearch 39.8 % (one H100); Llama 2's hours (2307.09288).
MFU = 0.40


@dataclass(frozen=True)
class Gpu:
    """A GPU model: peaks of its products, and memory, from its data sheet."""

    peak_flops: float  # of bf16, summed in fp32
    memory: float  # bytes
    source: str
    names: tuple[
        str, ...
    ] = ()  # as ``torch.cuda.get_device_name`` returns them; none: the model is used for plans only
    fp32_flops: float | None = None  # of fp32 outside of tensor cores; None: the maker's own numbers differ
    link: float = 450 * GB  # bytes a second to a GPU of the same node, one way
    network: float = 50 * GB  # bytes a second to a GPU of another node: a 400 Gb/s card for each GPU
    mfu_nodes: float | None = None  # of many nodes; None: by the rule of published runs


def _nvidia(teraflops: float, fp32: float | None, gigabytes: float, sheet: str, *names: str, **more: float) -> Gpu:
    named = tuple(f"NVIDIA {name}" for name in names)
    slow = fp32 * 1e12 if fp32 else None
    return Gpu(teraflops * 1e12, gigabytes * GB, f"NVIDIA {sheet}, bf16 dense", named, slow, **more)


PCIE_4, PCIE_5 = 25 * GB, 50 * GB  # reached with 16 lanes, of the nominal 32 and 64
A100 = {"link": 300 * GB, "network": 25 * GB, "mfu_nodes": MFU}
ON_PCIE_4 = {"link": PCIE_4, "network": PCIE_4}
CONSUMER_GPU_LINK = {
    "link": PCIE_4 / 2,
    "network": PCIE_4 / 2,
}  # through the host, because these GPUs have no peer-to-peer copies
# If a sheet gives only the peak with sparsity, half of it. NVIDIA's papers disagree on fp32 of Blackwell and the A10G: None here.
GPUS = {
    "h100": _nvidia(989.4, 66.9, 80, "H100 SXM data sheet", "H100 80GB HBM3"),
    "h100-pcie": _nvidia(756, 51, 80, "H100 PCIe data sheet", "H100 PCIe", link=PCIE_5),
    "h100-nvl": _nvidia(835.5, 60, 94, "H100 NVL data sheet", "H100 NVL", link=PCIE_5),
    "h200": _nvidia(989.4, 67, 141, "H200 SXM data sheet", "H200"),
    "h200-nvl": _nvidia(835.5, 60, 141, "H200 NVL data sheet", "H200 NVL", link=PCIE_5),
    "b200": _nvidia(2250, None, 180, "DGX B200 data sheet", "B200", link=900 * GB),
    "gb200": _nvidia(2500, None, 186, "GB200 NVL72 data sheet (of 72)", "GB200", link=900 * GB),
    "a100": _nvidia(312, 19.5, 80, "A100 80GB data sheet", "A100-SXM4-80GB", **A100),
    "a100-pcie": _nvidia(312, 19.5, 80, "A100 80GB PCIe data sheet", "A100 80GB PCIe", **A100 | {"link": PCIE_4}),
    "a100-40": _nvidia(312, 19.5, 40, "A100 40GB data sheet", "A100-SXM4-40GB", **A100),
    "a100-40-pcie": _nvidia(312, 19.5, 40, "A100 40GB PCIe data sheet", "A100-PCIE-40GB", **A100 | {"link": PCIE_4}),
    "a10g": _nvidia(70, None, 24, "A10G data sheet (of AWS)", "A10G", **ON_PCIE_4),
    "l4": _nvidia(121, 30.3, 24, "L4 data sheet", "L4", **ON_PCIE_4),
    "l40s": _nvidia(362, 91.6, 48, "L40S data sheet", "L40S", **ON_PCIE_4),
    "rtx-3090": _nvidia(71, 35.6, 24, "GA102 architecture paper (RTX 3090)", "GeForce RTX 3090", **CONSUMER_GPU_LINK),
    "rtx-4090": _nvidia(165.2, 82.6, 24, "Ada architecture paper (RTX 4090)", "GeForce RTX 4090", **CONSUMER_GPU_LINK),
    "rtx-5090": _nvidia(
        209.5, 104.8, 32, "RTX Blackwell architecture paper (RTX 5090)", "GeForce RTX 5090", **CONSUMER_GPU_LINK
    ),
    "mi300x": Gpu(
        1307.4e12,
        192 * GB,
        "AMD Instinct MI300X data sheet, bf16 dense",
        ("AMD Instinct MI300X",),
        163.4e12,
        link=448 * GB,
    ),
}


def find_gpu(name: str) -> Gpu | None:
    """The GPU model with a driver's name, which must equal the table's to the letter; None: unknown.

    A name that only begins or ends the same is another chip: 'NVIDIA GeForce RTX 4090 D' has fewer units, 'NVIDIA A100-SXM-64GB' more
    of them, and 'NVIDIA H100 80GB HBM3 MIG 1g.10gb' is a seventh of one.

    >>> found = find_gpu("NVIDIA H100 80GB HBM3")
    >>> found and found.peak_flops
    989400000000000.0
    >>> find_gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    True
    """
    return next((gpu for gpu in GPUS.values() if name in gpu.names), None)
