"""The card, what runs on it, and the two ceilings that everything else is measured by."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys

import torch

from benchmarks.gpu import card_state, needs, timing
from benchmarks.gpu.parts import Item, Settings
from benchmarks.gpu.worker import Context
from kernels.contract.machine import describe_this_machine

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
        context.not_run("everything", others() or NO_DEVICE.format(torch=torch.__version__, why=why))
        return
    machine = describe_this_machine(settings.device)
    named = "dry" if settings.dry else machine.name.partition("-")[2].partition("-")[2]
    about, short_name = commit(settings.commit)
    context.number("slug", f"{named}-{short_name}")
    context.number("card", machine.processor)
    context.number("class", machine.name)
    context.number("driver", machine.driver or "none")
    context.number("torch", torch.__version__)
    context.number("triton", version_of("triton"))
    context.number("python", sys.version.partition(" ")[0])
    context.number("commit", about)
    for name in ("liger-kernel", "quack-kernels"):
        context.number(name, version_of(name))
    try:
        import pydantic  # noqa: F401
    except ImportError:
        context.not_run(needs.NEED_PYDANTIC, needs.carry())
    if machine.device == "cuda":
        of_the_card(context)
    context.says = f"{machine.processor}, torch {torch.__version__}"


def of_the_card(context: Context) -> None:
    about = torch.cuda.get_device_properties(0)
    uuid = str(getattr(about, "uuid", ""))
    context.number("uuid", uuid if uuid.startswith("GPU-") or not uuid else f"GPU-{uuid}")
    free, total = torch.cuda.mem_get_info()
    context.number("multiprocessors", about.multi_processor_count)
    context.number("L2 cache", timing.l2_bytes("cuda"), "bytes")
    context.number("memory", total, "bytes")
    context.number("memory free", free, "bytes")
    busy = busy_with(free, total, uuid)
    context.number(
        "busy",
        busy or "no",
        note="other work on the card slows it: the numbers below are not the card's own" if busy else "",
    )
    try:
        from trainer.contract.plan.gpus import find_gpu

        gpu = find_gpu(about.name)
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


def busy_with(free: int, total: int, uuid: str) -> str:
    """What else is on the card before anything of ours runs, by its memory, and by nvidia-smi where it is; '': nothing seen.

    A process is not counted that nvidia-smi does not see from a container: the memory tells then.
    """
    found = []
    if total - free > OWN:
        found.append(f"{(total - free) / 1e9:.1f} GB of its memory are taken")
    look = card_state.look(uuid)
    if (used := look.get("utilisation")) and used > card_state.IDLE:
        found.append(f"{used:.0f} % utilisation before anything ran")
    return ", ".join(found)


def others() -> str:
    """Where CUDA_VISIBLE_DEVICES, which --device sets, names no device: which there are; '': there is none without it either."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    if not named or torch.version.cuda is None:
        return ""
    words = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    said = subprocess.run(words, env=environment, capture_output=True, text=True).stdout.strip()
    there = ", ".join(f"cuda:{number}" for number in range(int(said))) if said.isdigit() else ""
    return f"--device, or CUDA_VISIBLE_DEVICES: there is no device {named}; there are: {there}" if there else ""


RESULTS = "benchmarks/results"  # what runs write there is no change of the code


def commit(given: str = "") -> tuple[str, str]:
    """(for people, for a file's name) of the code that runs: a changed tree by a hash of what is changed."""
    if given:
        return given, given[:7]
    git = shutil.which("git")
    if git is None or not (needs.ROOT / ".git").exists():
        return "unknown: no git here (--commit says it)", "unknown"

    def ask(*words: str) -> str | None:
        done = subprocess.run([git, *words], cwd=needs.ROOT, capture_output=True)
        return None if done.returncode else done.stdout.decode(errors="replace")

    head = (ask("rev-parse", "HEAD") or "").strip()
    if not head:
        return "unknown: git does not say (--commit does)", "unknown"
    where = ("--", ".", f":(exclude){RESULTS}")
    if not (ask("status", "--porcelain", *where) or "").strip():
        return head, head[:7]
    changes = hashlib.sha256((ask("diff", "HEAD", *where) or "").encode())
    for name in sorted((ask("ls-files", "-z", "--others", "--exclude-standard", *where) or "").split("\0")):
        if name and (file := needs.ROOT / name).is_file():
            changes.update(name.encode() + b"\0" + file.read_bytes())
    return f"{head} and changes {changes.hexdigest()[:7]}", f"{head[:7]}-changed"


def version_of(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
