"""Is every implementation right on the device? The oracle of ``kernels.contract.oracle``, as on a CPU, over more cases.

An item is one implementation of one op; its checks come in the order of what they tell, those of one shape and dtype together, as they
share what is compiled. What the time does not reach is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from benchmarks.gpu.parts import Item, Settings
from benchmarks.gpu.worker import Context, poisoned, short
from kernels.contract.op import CASES, Implementation, Op, OracleCase, Shape
from kernels.contract.oracle import HOSTILE, compare_with_fp64
from kernels.contract.registry import OPS

# Most telling first: what only a GPU shows lies in the ops that a step spends its time in.
ORDER = (
    "attention", "linear_cross_entropy", "add_rms_norm", "rms_norm", "qk_norm_rope", "swiglu", "adamw", "embedding", "newton_schulz",
)  # fmt: skip
DTYPES = (torch.bfloat16, torch.float32)
MORE = (
    # Several documents in each row, cut by the edges of blocks; heads as they are trained.
    OracleCase(
        "packed",
        Shape(batch=2, context=777, d_model=512, heads=8, kv_heads=2, head_dim=128, d_ff=1536, vocab_size=4099),
    ),
    # Rows that no power of two holds, wider than one block of most kernels.
    OracleCase(
        "wide", Shape(batch=2, context=67, d_model=2560, heads=20, kv_heads=4, head_dim=128, d_ff=6912, vocab_size=8209)
    ),
)
DRY = OracleCase("small", replace(CASES[0].shape, context=8))  # the interpreter runs some hundred programs a second
TOO_OLD = "only 0-dimensional arrays can be converted"  # of the interpreter of triton 3.6, with numpy ≥ 2.4
DRY_VALUES = ("normal", "outlier")


COMPILED = ("compiled", "flex")  # each case and dtype is compiled anew, for 5 to 15 s on an H200's host
OF_COMPILED = ("packed", "small", DRY.name)  # cases of theirs, with normal values alone
WEIGHTS = {"compiled": 0.5, "flex": 3.0}  # of an item's time
EXTREME = ("large", "outlier", "constant")
ILL_CONDITIONED = "at scores of a million softmax from an fp32 logsumexp, as flash attention's backward pass has it, is off by any factor"


@dataclass(frozen=True)
class Check:
    case: OracleCase
    dtype: torch.dtype
    values: str

    def __str__(self) -> str:
        return f"{self.case.name} {str(self.dtype).removeprefix('torch.')} {self.values}"


@dataclass
class Verdict:
    """Of one implementation: how many checks were right, and each other by name."""

    right: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)  # (check, why)
    not_reached: list[str] = field(default_factory=list)
    checks: int = 0  # that there are, those among them that were left out as one of their sizes does not run at all
    skipped: list[tuple[str, str]] = field(
        default_factory=list
    )  # (check, why it does not count): memory, another computes instead
    seconds: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.right} checks right"]
        parts += [f"{len(self.wrong)} WRONG"] * bool(self.wrong)
        parts += [f"{len(self.not_reached)} not reached"] * bool(self.not_reached)
        return ", ".join(parts)


def checks(dry: bool = False) -> Iterator[Check]:
    """Every case × dtype × hostile value that is worth its time, in order."""
    if dry:
        yield from (Check(DRY, dtype, values) for dtype in DTYPES for values in DRY_VALUES)
        yield from (Check(case, torch.bfloat16, "normal") for case in CASES if case.name in ("one", "empty"))
        return
    cases = {case.name: case for case in (*CASES, *MORE)}
    for dtype in DTYPES:
        yield Check(cases["packed"], dtype, "normal")
        yield from (Check(cases["small"], dtype, values) for values in HOSTILE)
    for name in ("prime", "wide", "recipe", "strided", "one", "empty", *sorted(cases)):
        if name in cases and name not in ("packed", "small"):
            yield from (Check(cases[name], dtype, "normal") for dtype in DTYPES)
            del cases[name]
    for values in ("outlier", "large"):
        yield from (Check(MORE[0], dtype, values) for dtype in DTYPES)


def on_cuda() -> list[tuple[Op, Implementation]]:
    """Every registered implementation for CUDA but the references, which are what eager torch computes: ours first, torch.compile last."""
    named = [*ORDER, *(name for name in OPS if name not in ORDER)]
    pairs = [
        (OPS[name], implementation)
        for name in named
        if name in OPS
        for implementation in OPS[name].implementations.values()
        if "cuda" in implementation.devices and implementation.name != "reference"
    ]
    return sorted(pairs, key=lambda pair: pair[1].name == "compiled")


def verdict(
    op: Op,
    implementation: str,
    device: str,
    left: Callable[[], float] = lambda: 1.0,
    at: Callable[[str], None] = lambda what: None,
    dry: bool = False,
    found: Verdict | None = None,
) -> Verdict:
    """Judge one implementation until ``left()`` seconds are below zero; ``at`` is told what begins. Raises: what leaves the device of
    no use; what was judged until then is in ``found``."""
    compile_every_shape()
    found, began = found or Verdict(), time.monotonic()
    failed: set[tuple[str, torch.dtype]] = set()
    at_all = False
    for check in checks(dry):
        if implementation in COMPILED and not (check.case.name in OF_COMPILED and check.values == "normal"):
            continue
        found.checks += 1
        if left() <= 0 and at_all:  # however little time there is, one is judged
            found.not_reached.append(str(check))
            continue
        if (check.case.name, check.dtype) in failed:
            continue  # it does not run at all on these sizes, and was reported once
        at(str(check))
        at_all = True
        try:
            if instead := op.implementation(implementation).fallback(check.case.shape, check.dtype):
                found.skipped.append((str(check), f"another computes instead: {instead}"))
                continue
            result = compare_with_fp64(
                op, implementation, check.case, dtype=check.dtype, device=device, values=check.values
            )
            if result.ok:
                found.right += 1
            elif op.name == "attention" and check.values in EXTREME and all(t.finite for t in result.tensors):
                found.skipped.append((str(check), f"finite, and not compared: {ILL_CONDITIONED}"))
            else:
                found.wrong.append((str(check), result.describe_failures()))
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            found.skipped.append((str(check), f"too little memory: {short(error)}"))
        except Exception as error:  # a compiler's, or of the kernel: it does not compute what the op promises
            if poisoned(error):
                raise
            failed.add((check.case.name, check.dtype))
            if dry and interpreter_is_too_old(error):
                found.skipped.append((str(check), "this triton's interpreter does not know this numpy"))
            else:
                found.wrong.append((str(check), short(error)))
    found.seconds = time.monotonic() - began
    return found


def interpreter_is_too_old(error: Exception) -> bool:
    """Does this triton's interpreter not know this numpy? That tells nothing of a kernel."""
    return TOO_OLD in str(error)


# -- the part ------------------------------------------------------------------------------------------------------------
def items(settings: Settings) -> list[Item]:
    compile_every_shape()  # imports the compiler: seconds, which are no item's
    if settings.dry:
        round_as_a_gpu()
    return [Item(f"{op.name}/{i.name}", WEIGHTS.get(i.name, 1.0)) for op, i in on_cuda()]


def run(item: str, context: Context) -> None:
    settings = context.settings
    name, implementation = item.split("/")
    op = OPS[name]
    if not op.implementation(implementation).can_run_on(settings.device):
        context.not_run(item, "it is for a GPU alone, and not Triton's, whose interpreter could run it here")
        return
    found = Verdict()
    try:
        verdict(op, implementation, settings.device, lambda: context.left, context.at, settings.dry, found)
    finally:  # a device that failed takes nothing back
        tell(item, op, implementation, found, context)


def tell(item: str, op: Op, implementation: str, found: Verdict, context: Context) -> None:
    for what, why in found.wrong:
        context.wrong(f"{item} {what}", why)
    for what, why in found.skipped:
        context.not_run(f"{item} {what}", why)
    context.send(
        "judged",
        op=op.name,
        implementation=implementation,
        checks=found.checks,
        right=found.right,
        wrong=[f"{what}: {why}" for what, why in found.wrong],
        not_reached=found.not_reached,
        skipped=[f"{what}: {why}" for what, why in found.skipped],
        seconds=found.seconds,
    )
    context.says = str(found)


def compile_every_shape() -> None:
    """Past its limit of shapes torch would run uncompiled, and that would be judged and timed."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024


def round_as_a_gpu() -> None:
    """The interpreter rounds to bf16 otherwise than a GPU; without triton there is none."""
    try:
        from tests.support import interpreter_rounding
    except ImportError:
        return
    interpreter_rounding.use()
