"""The card, what runs on it, and the two ceilings that everything else is measured by."""

from __future__ import annotations

import shutil
import subprocess
import sys

import torch

from benchmarks.gpu import needs, timing
from benchmarks.gpu.parts import Item, Settings
from benchmarks.gpu.worker import Context
from kernels.contract.machine import here

PRODUCT, PRODUCTS = 8192, 20  # side of the matrices, and products between two events
COPY = 1 << 30  # bytes
DRY_PRODUCT, DRY_COPY = 128, 1 << 22
OWN = 1 << 30  # bytes that a context of our own may take of the card
NO_DEVICE = (
    "no CUDA device: torch {torch} sees none here ({why}). On a machine with an NVIDIA GPU: python -m benchmarks.gpu. "
    "Without one, --dry runs the same code in miniature on this CPU: python -m benchmarks.gpu --dry"
)


def items(settings: Settings) -> list[Item]:
    return [Item("card"), Item("rates", 2)]


def run(item: str, context: Context) -> None:
    if item == "rates":
        rates(context)
    else:
        card(context)


def card(context: Context) -> None:
    settings = context.settings
    if settings.device != "cpu" and not torch.cuda.is_available():
        why = (
            "a build for CPUs"
            if torch.version.cuda is None
            else f"a build for CUDA {torch.version.cuda}; is there a driver?"
        )
        context.not_run("everything", NO_DEVICE.format(torch=torch.__version__, why=why))
        return
    machine = here(settings.device)
    context.number(
        "slug", machine.name.partition("-")[2].partition("-")[2] if machine.device == "cuda" else machine.name
    )
    context.number("card", machine.processor)
    context.number("class", machine.name)
    context.number("driver", machine.driver or "none")
    context.number("torch", torch.__version__)
    context.number("triton", version_of("triton"))
    context.number("python", sys.version.partition(" ")[0])
    context.number("commit", settings.commit or commit())
    for name in ("liger-kernel", "quack-kernels"):
        context.number(name, version_of(name))
    try:
        import pydantic  # noqa: F401
    except ImportError:
        context.not_run("the parts 'step' and 'chain'", needs.carry())
    if machine.device == "cuda":
        of_the_card(context)
    context.says = f"{machine.processor}, torch {torch.__version__}"


def of_the_card(context: Context) -> None:
    about = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    context.number("multiprocessors", about.multi_processor_count)
    context.number("L2 cache", timing.l2_bytes("cuda"), "bytes")
    context.number("memory", total, "bytes")
    context.number("memory free", free, "bytes")
    busy = busy_with(free, total)
    context.number(
        "busy",
        busy or "no",
        note="other work on the card slows it: the numbers below are not the card's own" if busy else "",
    )
    try:
        from trainer.contract.plan.gpus import gpu_named

        gpu = gpu_named(about.name)
    except ImportError as error:
        context.not_run("the data sheet's peak", needs.why(error))
        return
    if gpu is None:
        context.not_run(
            "the data sheet's peak",
            f"no data sheet of {about.name!r} is known: MFU is of the measured product rate alone",
        )
    else:
        context.number("data sheet, bf16 products", gpu.peak_flops, "FLOP/s", note=gpu.source)


def rates(context: Context) -> None:
    device, dry = context.settings.device, context.settings.dry
    if device != "cpu" and not torch.cuda.is_available():
        return
    copy = timing.copy_rate(device, DRY_COPY if dry else COPY)
    context.number("copy bandwidth", copy, "bytes/s", note="read and written")
    size = DRY_PRODUCT if dry else PRODUCT
    product = timing.product_rate(device, size, 2 if dry else PRODUCTS)
    context.number(
        "bf16 product rate",
        product,
        "FLOP/s",
        note=f"{size}³, random data, {2 if dry else PRODUCTS} between two events",
    )
    context.says = f"{copy / 1e12:.2f} TB/s copied, {product / 1e12:.1f} TFLOP/s"


def busy_with(free: int, total: int) -> str:
    """What else is on the card, by nvidia-smi where it is, else by its memory; '': nothing seen.

    A process is not counted that nvidia-smi does not see from a container: the memory tells then.
    """
    found = []
    if total - free > OWN:
        found.append(f"{(total - free) / 1e9:.1f} GB of its memory are taken")
    asked = "utilization.gpu"
    said = nvidia_smi(f"--query-gpu={asked}", "--format=csv,noheader,nounits")
    if said.isdigit() and int(said) > 5:
        found.append(f"{said} % utilisation before anything ran")
    return ", ".join(found)


def nvidia_smi(*words: str) -> str:
    """Its answer about this process's card; '' where there is none. Reads only."""
    if shutil.which("nvidia-smi") is None:
        return ""
    uuid = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
    which = ["-i", uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"] if uuid else []
    done = subprocess.run(["nvidia-smi", *which, *words], capture_output=True, text=True, timeout=20)
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> str:
    git = shutil.which("git")
    if git is None or not (needs.ROOT / ".git").exists():
        return "unknown: no git here (--commit says it)"
    ask = lambda *words: subprocess.run([git, *words], cwd=needs.ROOT, capture_output=True, text=True)
    head = ask("rev-parse", "HEAD")
    if head.returncode:
        return "unknown: git does not say (--commit does)"
    return head.stdout.strip() + (" and changes" if ask("status", "--porcelain").stdout.strip() else "")


def version_of(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
