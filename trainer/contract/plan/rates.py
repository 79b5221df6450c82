"""The rates at which a device multiplies matrices and copies memory: as measured, and according to its data sheet."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable

import torch

from trainer.contract.plan.gpus import find_gpu
from trainer.contract.plan.precision import limit_to_one_thread

GPU_SECONDS = 0.3  # shortest measurement, after a warm-up of the same length; at most twice that
GPU_SIZE, LEAST_GPU_SIZE = (
    8192,
    1024,
)  # rows and columns: smaller products wait for launches and leave multiprocessors idle
GPU_BYTES = 1 << 30  # of a copy: twenty times an H100's cache
MEMORY_SHARE = 0.5  # of the free memory
CPU_SECONDS = 1.0  # total time of the tries: long enough for some undisturbed ones
CPU_SIZES = (128, 256, 512, 1024, 2048)
CPU_PRODUCT = 0.01  # most seconds of a product, except the smallest: short ones are disturbed less
CPU_TRIES = 5  # tries of each size: the first one of a process loads libraries
CPU_BYTES = 1 << 26


@functools.cache
def measure_matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of products of square matrices, measured once in each process. The matrices hold random numbers: zeros were 13 % faster on an H200.

    On a GPU: the mean over many products of ``GPU_SIZE`` between two events. The products are smaller if little memory is free. On a CPU: the
    best rate of one thread in a second of tries at several sizes, by the thread's own CPU time, times the number of threads. (Two threads
    that wait for one another on cores that other programs use are up to a thousand times as slow: 0.1 instead of 190 GFLOP/s.)
    """
    generator = torch.Generator(device).manual_seed(0)  # the run's own random state is part of what resumes to the bit

    def product(size: int) -> Callable[[], object]:
        a, b = (torch.randn(size, size, generator=generator, device=device, dtype=dtype) for _ in range(2))
        return functools.partial(torch.mm, a, b, out=torch.empty_like(a))

    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        size = choose_matrix_size(free, dtype.itemsize)
        return 2 * size**3 / measure_seconds_per_call(functools.partial(_between_events, device, product(size)))
    with limit_to_one_thread(device) as threads:
        return threads * measure_best_matmul_rate((size, product(size)) for size in CPU_SIZES)


@functools.cache
def measure_memory_rate(device: torch.device) -> float:
    """Bytes that a copy reads and writes in a second, measured once in each process. On a GPU: the mean over many copies of 1 GiB (or less, if
    less memory is free). On a CPU: the best copy of 64 MiB in a second of tries, half of them by all threads and half by one thread in its own
    CPU time."""
    size = CPU_BYTES
    if device.type == "cuda":
        size = min(GPU_BYTES, int(MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]) // 2)
    source = torch.ones(size // 4, device=device)
    copy = functools.partial(torch.empty_like(source).copy_, source)
    if device.type == "cuda":
        return 2 * size / measure_seconds_per_call(functools.partial(_between_events, device, copy))
    copy()
    best, ends = math.inf, time.perf_counter() + CPU_SECONDS / 2
    while (began := time.perf_counter()) < ends:
        copy()
        best = min(best, time.perf_counter() - began)
    with limit_to_one_thread(device):
        ends = time.perf_counter() + CPU_SECONDS / 2
        while time.perf_counter() < ends:
            best = min(best, _cpu_seconds(copy))
    return 2 * size / best


def look_up_data_sheet_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of dense products in ``dtype`` according to the GPU's data sheet. None for a CPU, or if no data sheet has the number.

    For fp32 it is the peak outside of tensor cores, because torch multiplies there by default. It is None if TF32 was switched on
    (``torch.set_float32_matmul_precision``, ``TORCH_ALLOW_TF32_CUBLAS_OVERRIDE``).
    """
    gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if gpu is None:
        return None
    fp32 = gpu.fp32_flops if torch.get_float32_matmul_precision() == "highest" else None
    return {torch.bfloat16: gpu.peak_flops, torch.float32: fp32}.get(dtype)


def choose_matrix_size(free_bytes: int, itemsize: int) -> int:
    """Number of rows of the square matrices to multiply on a GPU. Three such matrices must fit into ``MEMORY_SHARE`` of ``free_bytes``.

    >>> choose_matrix_size(80 << 30, 2), choose_matrix_size(1 << 29, 4)
    (8192, 4096)
    """
    size = GPU_SIZE
    while size > LEAST_GPU_SIZE and 3 * size**2 * itemsize > MEMORY_SHARE * free_bytes:
        size //= 2
    return size


def measure_seconds_per_call(time_calls: Callable[[int], float]) -> float:
    """Seconds of one call. ``time_calls(count)`` times ``count`` calls. The count doubles until they take ``GPU_SECONDS``. Earlier rounds warm up."""
    count = 2
    while (seconds := time_calls(count)) < GPU_SECONDS:
        count *= 2
    return seconds / count


def _between_events(device: torch.device, call: Callable[[], object], count: int) -> float:
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def measure_best_matmul_rate(products: Iterable[tuple[int, Callable[[], object]]]) -> float:
    """FLOP/s of the fastest of many products in one thread. ``products``: (size, function), smallest first. A size whose product would take more
    than ``CPU_PRODUCT`` seconds is left out, with all larger ones. The other sizes share the time equally."""
    best, spent = 0.0, list[float]()
    chosen: list[tuple[int, Callable[[], object]]] = []
    for size, product in products:
        if best and 2 * size**3 / best > CPU_PRODUCT:
            break
        best = max(best, 2 * size**3 / min(_cpu_seconds(product) for _ in range(CPU_TRIES)))
        chosen.append((size, product))
        spent.append(0.0)
    while sum(spent) < CPU_SECONDS:
        turn = spent.index(min(spent))
        size, product = chosen[turn]
        seconds = _cpu_seconds(product)
        spent[turn] += seconds
        best = max(best, 2 * size**3 / seconds)
    return best


def _cpu_seconds(call: Callable[[], object]) -> float:
    """CPU seconds of this thread during a call. They exclude the time in which another program had the core."""
    began = time.thread_time()
    call()
    return time.thread_time() - began
