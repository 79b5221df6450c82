"""What stands around the step, on the device: the line profiler, the patch gate's timed pairs, live training's sandbox, kill -9 and resume.

Each item needs more of the factory than the parts before it; what this machine lacks is named, and costs its item alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu import needs
from benchmarks.gpu.needs import ROOT
from benchmarks.gpu.parts import Item, Settings
from benchmarks.gpu.worker import Context

if TYPE_CHECKING:
    from trainer.contract.recipe import Recipe

STEPS, EVERY = 24, 6  # of a segment, and between its checkpoints
DRY_STEPS, DRY_EVERY = 6, 2
KERNELS = ROOT / "policies" / "kernels.yaml"
LINES = 8  # of the profile that are named
# (op, before, after): approved implementations on every device, so that the gate may time one against the other.
SWITCHED = ("adamw", "reference", "fused")


def items(settings: Settings) -> list[Item]:
    return [Item("sandbox", 2.0), Item("resume", 3.0), Item("gate", 2.0), Item("profiler", 2.0)]


def run(item: str, context: Context) -> None:
    {"resume": resume, "profiler": profiler, "sandbox": sandbox, "gate": gate}[item](context)


def small_recipe(settings: Settings) -> Recipe:
    """A small model: what is shown here does not depend on its size."""
    from benchmarks.gpu.models import model_of

    dry = settings.dry
    recipe = model_of("100m", dry).recipe("chain", "fp32" if dry else "bf16", 2 if dry else 8)
    return recipe.model_copy(
        update={"compile": False, "checkpoint_every": DRY_EVERY if dry else EVERY, "keep_checkpoints": 2}
    )


# -- a segment -------------------------------------------------------------------------------------------------------------
def segment(folder: Path, recipe: Recipe, shards: Path, steps: int) -> Path:
    """A segment's folder with its spec, as ``python -m trainer`` takes it; the token shard is made once."""
    from agents.line_profiler.workload import make_random_documents
    from trainer.contract.data.data_plan import DataPlan
    from trainer.contract.data.token_shard import write_token_shard

    folder.mkdir(parents=True)
    wanted = steps * recipe.tokens_per_step * 2
    shard = write_token_shard(
        shards, make_random_documents(recipe, wanted), vocab_size=recipe.model.vocab_size, tokenizer_sha256="0" * 64
    )
    mixture = recipe.mixture.model_copy(update={"weights": {"*": 1.0}, "phases": [], "max_epochs": 4})
    plan = DataPlan.make_for_segment(mixture, "trunk", [(shard.id, str(shard.path), 0)], recipe.seed)
    spec = {
        "kind": "trunk",
        "recipe": recipe.model_dump(mode="json"),
        "data_plan": json.loads(plan.to_json()),
        "first_step": 0,
        "last_step": steps,
        "kernels": str(KERNELS),
    }
    (folder / "segment.json").write_text(json.dumps(spec))
    return folder


@contextmanager
def training(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``python -m trainer``, which ends with the block at the latest."""
    with open(folder / "log", "ab") as log:
        process = subprocess.Popen([sys.executable, "-m", "trainer", str(folder)], cwd=ROOT, stdout=log, stderr=log)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def trained(folder: Path, seconds: float) -> float:
    """Seconds of the whole process. Raises: RuntimeError with its last words, where it does not end well or in time."""
    began = time.monotonic()
    with training(folder) as process:
        try:
            code = process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the trainer took longer than {seconds:.0f} s") from None
    if code:
        words = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"the trainer ended with exit code {code}: {''.join(words)[:300]}")
    return time.monotonic() - began


def killed_and_resumed(folder: Path, seconds: float) -> int:
    """Train until the first checkpoint is there, kill -9, train to the end; the step of the checkpoint."""
    from trainer.contract.checkpoint import format as checkpoints

    ends = time.monotonic() + seconds
    with training(folder) as process:
        while not (found := checkpoints.list_checkpoints(folder / "checkpoints")):
            if process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError("the trainer ended, or its time did, before its first checkpoint")
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
    if (folder / "result.json").exists():
        raise RuntimeError("the segment was done before it could be killed")
    trained(folder, ends - time.monotonic())
    return found[0][0]


def distance(ours: Path, theirs: Path) -> tuple[int, int, float]:
    """(tensors equal to the bit, tensors, the largest relative distance) of two segments' last checkpoints."""
    from trainer.contract.checkpoint import format as checkpoints

    a, b = (
        checkpoints.load_checkpoint(checkpoints.list_checkpoints(folder / "checkpoints")[-1][1])
        for folder in (ours, theirs)
    )
    pairs = [(a.model[name], b.model[name]) for name in b.model]
    pairs += [(a.optimizer[name], b.optimizer[name]) for name in b.optimizer]
    equal = sum(torch.equal(x, y) for x, y in pairs)
    far = [float((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-30)) for x, y in pairs]
    return equal, len(pairs), max(far)


def resume(context: Context) -> None:
    recipe, folder = small_recipe(context.settings), Path(context.settings.scratch) / "resume"
    steps = DRY_STEPS if context.settings.dry else STEPS
    whole, killed = (segment(folder / name, recipe, folder / "shards", steps) for name in ("whole", "killed"))
    context.number(
        "a segment, end to end",
        trained(whole, context.left),
        "s",
        note=f"{steps} steps, uncompiled, start of Python included",
    )
    at = killed_and_resumed(killed, context.left)
    equal, of, far = distance(killed, whole)
    context.number("killed at its first checkpoint and resumed", at, "step", note="kill -9")
    context.number(
        "tensors equal to the bit", equal, f"of {of}", note="killed and resumed beside the run that went through"
    )
    context.number("largest relative distance", far)
    context.says = f"{equal} of {of} tensors are the same to the bit after kill -9"
    if equal == of:
        return
    if context.left <= 0:
        context.not_run("is it the resume, or the device? (two runs that went through)", "its time was up")
        return
    again = segment(folder / "again", recipe, folder / "shards", steps)
    trained(again, context.left)
    compared((equal, of, far), distance(again, whole), context)


def compared(resumed: tuple[int, int, float], again: tuple[int, int, float], context: Context) -> None:
    """Of a resumed run that is not the whole one to the bit: is it the resume, or the device? Both as ``distance`` gives them."""
    (_, _, far), (equal, of, apart) = resumed, again
    context.number("of two runs that went through: tensors equal to the bit", equal, f"of {of}")
    context.number("of two runs that went through: largest relative distance", apart)
    if equal == of:
        why = f"{of - resumed[0]} of {of} tensors differ, by {far:.2g} at most, and two runs that went through agree to the bit"
        context.wrong("kill -9 and resume", why)
    else:
        context.says += f", {far:.2g} apart at most; two runs that went through are {apart:.2g} apart: the device does not repeat itself"


# -- the line profiler -----------------------------------------------------------------------------------------------------
def profiler(context: Context) -> None:
    from agents.line_profiler import session

    dry = context.settings.dry
    if dry:  # its times tell nothing: none is worth waiting for
        session.LEAST_S = session.SETTLING_S = 0.0
    found = session.measure_profile(
        small_recipe(context.settings),
        KERNELS,
        steps=1 if dry else 4,
        measure_recipe_step=False,
        isolate=not dry,
        isolation_budget_s=max(1.0, min(8.0, context.left / 3)),
        implementations_s=0,  # another part of this suite times the ops
    ).profile
    context.number("eager step", found.eager_step_s, "s", note=found.device)
    context.number("covered by lines", found.coverage, "share of the step")
    check = found.cross_check
    context.number("operations by torch.profiler", check.torch_s, "s", note="on a GPU: of its kernels")
    context.number("operations by the line profiler", check.lines_s, "s")
    for line in found.lines[:LINES]:
        context.number("line", line.share, "share of the step", note=f"{line.file}:{line.line} {line.op}".strip())
    context.says = f"{found.coverage:.0%} of the step are at a line"


# -- the sandbox -----------------------------------------------------------------------------------------------------------
# What CUDA's driver answers to cuInit; 0: well. Where torch is not asked the answer takes a fraction of a second.
SEEN = """
import ctypes
try:
    print(ctypes.CDLL("libcuda.so.1").cuInit(0))
except OSError as error:
    print(error)
"""


def sandbox(context: Context) -> None:
    """Live training's: is the device in it, and does a segment train there?"""
    from factory.core import devices
    from factory.sandbox import live_sandbox, seccomp_filter

    if refusal := live_sandbox.find_sandbox_problem():
        context.not_run("a segment in the live sandbox", refusal)
        return
    folder = Path(context.settings.scratch) / "sandbox"
    recipe = small_recipe(context.settings)
    steps = DRY_STEPS if context.settings.dry else STEPS
    made = segment(folder / "segment", recipe, folder / "shards", steps)
    nodes = devices.list_gpu_device_files(all_gpus=True)
    context.number("device files in the sandbox", len(nodes), "", note=" ".join(nodes))
    libraries = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path).is_dir()]

    def inside(words: list[str], log: Path) -> int:
        with open(log, "wb") as out:
            process = live_sandbox.start_in_sandbox(
                [sys.executable, *words],
                writable=[made],
                readonly=[folder / "shards", *map(Path, libraries)],
                cwd=ROOT,
                cache=folder / "cache",
                environment={"PYTHONPATH": os.pathsep.join([str(ROOT), *libraries])},
                nodes=nodes,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
            try:
                return process.wait(max(1.0, context.left))
            finally:
                process.kill(10)

    def answer() -> str:
        inside(["-I", "-S", "-c", SEEN], folder / "seen")
        return "".join((folder / "seen").read_text(errors="replace").strip().splitlines()[-1:])

    if context.settings.device != "cpu":
        found = answer()
        context.number("CUDA in the sandbox", found, note="of cuInit; 0 is well")
        if found != "0":
            hinders = what_hinders(answer)
            says = f"it is without {', '.join(hinders)}" if hinders else "nor without one of its walls"
            context.wrong("the live sandbox", f"the device is not seen in it: cuInit answers {found}; {says}")
            if not (calls := [name for name in hinders if name in seccomp_filter.CALLS]):
                return
            seccomp_filter.CALLS.pop(calls[0])  # in this process: is that all that hinders?
            seccomp_filter.assemble_filter.cache_clear()
    began = time.monotonic()
    code = inside(["-m", "trainer", str(made)], folder / "log")
    if code:
        words = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
        context.wrong("a segment in the live sandbox", f"exit code {code}: {''.join(words)[:300]}")
        return
    seconds = time.monotonic() - began
    context.number("a segment in the live sandbox", seconds, "s", note=f"{steps} steps")
    context.says = f"trained in the sandbox in {seconds:.1f} s"


def what_hinders(answer: Callable[[], str]) -> list[str]:
    """Which of the sandbox's walls the driver does not pass, by taking them away one by one: two that hide each other are not found. ``answer``
    makes a sandbox and asks in it."""
    from factory.sandbox import bubblewrap, filesystem_view, seccomp_filter

    every = dict(seccomp_filter.CALLS)
    found = []

    def without(what: str, module: Any, name: str, value: Any) -> None:
        usual = getattr(module, name)
        setattr(module, name, value)
        seccomp_filter.assemble_filter.cache_clear()
        try:
            if answer() == "0":
                found.append(what)
        finally:
            setattr(module, name, usual)
            seccomp_filter.assemble_filter.cache_clear()

    without("any filter of system calls", seccomp_filter, "ARCHITECTURES", {})
    if found and found[0] == "any filter of system calls":
        for call in every:
            without(call, seccomp_filter, "CALLS", {name: numbers for name, numbers in every.items() if name != call})
    launcher = filesystem_view.LAUNCHER.read_text(encoding="utf-8")
    assert launcher.count(call := '    forbid_writing_outside(rules["writable"])\n') == 1
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / filesystem_view.LAUNCHER.name
        other.write_text(launcher.replace(call, ""))
        without("Landlock", bubblewrap, "LAUNCHER", other)
    without("a user of its own", bubblewrap, "USER", os.getuid())
    return found


# -- the gate --------------------------------------------------------------------------------------------------------------
def gate(context: Context) -> None:
    """The patch gate's stage 'isolated': two approved implementations timed in pairs in the sandbox, then one against itself."""
    recipe = small_recipe(context.settings).model_dump(mode="json")
    try:
        staged(recipe, context)
    except ImportError as error:
        context.not_run("the gate's stage, in the sandbox", needs.why(error))
        timed_pairs(recipe, context)


def timed_pairs(recipe: dict[str, Any], context: Context) -> None:
    """The command that the gate runs, outside of its sandbox."""
    op, before, after = SWITCHED
    path = Path(context.settings.scratch) / "pairs.yaml"
    path.write_text(json.dumps(recipe))  # JSON is YAML
    words = [
        "-m",
        "kernels.contract.bench",
        "--op",
        op,
        "--against",
        before,
        "--implementation",
        after,
        "--recipe",
        str(path),
    ]
    words += ["--device", context.settings.device, "--pairs", str(pairs_of(context))]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=max(5.0, context.left)
    )
    found = json.loads(done.stdout)
    context.number(
        f"{op}: {after} beside {before}, outside of the sandbox",
        found["ratio"],
        "times as fast",
        note=f"{found['pairs']} pairs",
    )


def pairs_of(context: Context) -> int:
    return 3 if context.settings.dry else 9


def staged(recipe: dict[str, Any], context: Context) -> None:
    """Raises: ImportError, where the factory's libraries are not here."""
    from factory.core import devices
    from factory.core.errors import IsolationError
    from factory.gates.patch.changed_ops import ChangedOp
    from factory.gates.patch.policy import IsolatedTimingPolicy
    from factory.gates.patch.stages import isolated

    policy = IsolatedTimingPolicy(pairs=pairs_of(context), wall_seconds=max(5.0, context.left / 3), tries=1)
    try:
        with devices.hold_device():
            found = isolated.time_switched_ops(
                policy, [ChangedOp(*SWITCHED)], recipe, ROOT, Path(context.settings.scratch) / "gate"
            )
    except IsolationError as error:
        context.not_run("the gate's timed pairs", str(error))
        return
    op, before, after = SWITCHED
    if not (numbers := found.get("ops", {}).get(op)):
        context.not_run("the gate's timed pairs", "; ".join(found["reasons"]))
        return
    context.number(
        f"{op}: {after} beside {before}", numbers["ratio"], "times as fast", note=f"A/A {numbers['a_a']:.3f}"
    )
    context.says = "; ".join(found["reasons"])[:200]
