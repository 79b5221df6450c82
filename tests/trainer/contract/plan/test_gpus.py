"""A data sheet is found only by the exact name that the driver gives."""

from __future__ import annotations

from collections import Counter

import pytest

from trainer.contract.plan.gpus import GPUS, find_gpu

# As torch.cuda.get_device_name gives them, and the dense bf16 peak of the sheet in TFLOP/s; with sparsity it is twice that.
SHEETS = {
    "NVIDIA H100 80GB HBM3": 1979 / 2,
    "NVIDIA H100 PCIe": 1513 / 2,
    "NVIDIA H100 NVL": 1671 / 2,
    "NVIDIA H200": 1979 / 2,
    "NVIDIA H200 NVL": 1671 / 2,
    "NVIDIA B200": 36_000 / 8 / 2,
    "NVIDIA GB200": 360_000 / 72 / 2,
    "NVIDIA A100-SXM4-80GB": 624 / 2,
    "NVIDIA A100 80GB PCIe": 624 / 2,
    "NVIDIA A100-SXM4-40GB": 624 / 2,
    "NVIDIA A100-PCIE-40GB": 624 / 2,
    "NVIDIA A10G": 140 / 2,
    "NVIDIA L4": 242 / 2,
    "NVIDIA L40S": 733 / 2,
    "NVIDIA GeForce RTX 3090": 142 / 2,
    "NVIDIA GeForce RTX 4090": 330.3 / 2,
    "NVIDIA GeForce RTX 5090": 419 / 2,
    "AMD Instinct MI300X": 2614.9 / 2,
}
OTHERS = (
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA H100 64GB HBM2",
    "NVIDIA H100",
    "NVIDIA H20",
    "NVIDIA GH200 480GB",
    "NVIDIA B300 SXM6 AC",
    "NVIDIA A10",
    "NVIDIA L40",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 3090 Ti",
    "AMD Instinct MI300X VF",
    "AMD Instinct MI300A",
    "GeForce RTX 4090",
    "",
)


@pytest.mark.parametrize("name", SHEETS)
def test_a_known_gpu_has_the_dense_peak_of_its_data_sheet(name: str) -> None:
    gpu = find_gpu(name)
    assert gpu is not None and gpu.peak_flops == pytest.approx(SHEETS[name] * 1e12, rel=0.013)
    assert gpu.fp32_flops is None or gpu.fp32_flops < gpu.peak_flops


@pytest.mark.parametrize("name", OTHERS)
def test_a_gpu_with_only_a_similar_name_is_unknown(name: str) -> None:
    assert find_gpu(name) is None


def test_each_name_and_each_source_is_in_the_table_once() -> None:
    names = Counter(name for gpu in GPUS.values() for name in gpu.names)
    sources = Counter(gpu.source for gpu in GPUS.values())
    assert set(names) == set(SHEETS) and {*names.values(), *sources.values()} == {1}
