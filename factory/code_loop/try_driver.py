"""Checks and times variants of the code, which are forks of one process with torch imported. Runs inside the sandbox.

``python try_driver.py REQUEST OUT``. REQUEST is the path of a JSON object. Its ``kind`` says what to do, and OUT/result.json gets the result by the
name of the member. A member is a variant, or the base, in its own worktree ``code``.

* ``check``: each member imports its ``modules`` and answers the op checks (``answers``: arguments of ``op_driver.py``).
* ``alone``: each member prepares its implementation of an op, with compilation. Then the members call it in turn.
* ``step``: each member starts its trainer and makes a run that is not timed, with compilation. Then the members train short runs in turn.

The code under test could tell any time, so only its author sees these times, and no verdict reads them. ``limit``: the longest time of a member.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import runpy
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

LINE_BYTES = 4000
POLL_S = 0.003
BATCH_S = 0.03  # calls of an op are timed in batches that take at least so long
MOST_CALLS = 64  # of a batch
KEPT_KEYS = ("loss", "grad_norm")  # of a step's line in metrics.jsonl


class Member:
    """A forked process. ``asked`` and ``told`` are its pipes: the driver writes a line to one, and reads a line from the other."""

    def __init__(self, name: str, code: str, log: Path, work: Callable[[IO[str], IO[str]], None]) -> None:
        self.name, self.log = name, log
        self.began = time.monotonic()
        self.status: int | None = None  # None: it runs
        self.late = False
        self.failure: dict[str, Any] | None = None
        down, up = os.pipe(), os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.process = os.fork()
        if self.process == 0:
            os.close(down[1])
            os.close(up[0])
            _run_member(code, log, work, os.fdopen(down[0]), os.fdopen(up[1], "w", buffering=1))
        os.close(down[0])
        os.close(up[1])
        self.asked, self.told = os.fdopen(down[1], "w", buffering=1), os.fdopen(up[0])

    def is_over(self) -> bool:
        if self.status is None:
            ended, status = os.waitpid(self.process, os.WNOHANG)
            if ended:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def end(self, late: bool = False) -> None:
        """Kill the member and the processes that it started."""
        if not self.is_over():
            self.late = late
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(self.process, signal.SIGKILL)
            _, status = os.waitpid(self.process, 0)
            self.status = os.waitstatus_to_exitcode(status)
        self.asked.close()
        self.told.close()

    def describe_failure(self) -> dict[str, Any]:
        """The member's end, with the last line that it printed."""
        try:
            lines = self.log.read_bytes()[-LINE_BYTES:].decode("utf-8", "replace").strip().splitlines()
        except OSError:
            lines = []
        return {"failed": lines[-1] if lines else "", "status": self.status, "late": self.late}


def _run_member(
    code: str, log: Path, work: Callable[[IO[str], IO[str]], None], asked: IO[str], told: IO[str]
) -> NoReturn:
    """Run ``work`` in the folder ``code`` and end the process. Its output goes to ``log``."""
    status = 1
    try:
        os.setpgid(0, 0)
        opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, 1)
        os.dup2(opened, 2)
        os.chdir(code)
        sys.path[0] = code
        work(asked, told)
        status = 0
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# -- check -------------------------------------------------------------------------------------------------------------
def check(request: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Returns for each member how it ended: ``{}``, or what ``Member.describe_failure`` returns."""
    waiting = list(request["members"])
    running: list[Member] = []
    found: dict[str, Any] = {}
    while waiting or running:
        while waiting and len(running) < request["at_once"]:
            one = waiting.pop(0)
            work = functools.partial(_check_one, request, one)
            running.append(Member(one["name"], one["code"], out / f"{one['name']}.log", work))
        for member in list(running):
            if not member.is_over() and time.monotonic() - member.began > request["limit"]:
                member.end(late=True)
            if member.is_over():
                member.end()
                running.remove(member)
                found[member.name] = member.describe_failure() if member.status else {}
        time.sleep(POLL_S)
    return found


def _check_one(request: Mapping[str, Any], one: Mapping[str, Any], asked: IO[str], told: IO[str]) -> None:
    import importlib

    for module in one["modules"]:
        importlib.import_module(module)
    if one["answers"]:
        sys.argv = [request["op_driver"], *one["answers"]]
        runpy.run_path(request["op_driver"], run_name="__main__")


# -- an op alone -------------------------------------------------------------------------------------------------------
def time_alone(request: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Returns for each op and member the seconds of a call in each round, or how the member failed. The first member is the base.

    ``seconds``: the most that the rounds of all ops may take, beyond a first round of each op.
    """
    found: dict[str, Any] = {"ops": {}, "seconds": 0.0}
    for op, described in request["ops"].items():
        told, spent = _time_op(request, op, described, out, request["seconds"] / len(request["ops"]))
        found["ops"][op] = told
        found["seconds"] += spent
    return found


def _time_op(
    request: Mapping[str, Any], op: str, described: Sequence[Mapping[str, Any]], out: Path, seconds: float
) -> tuple[dict[str, Any], float]:
    members: list[Member] = []
    prepared: dict[str, float] = {}
    for first in range(0, len(described), request["at_once"]):
        begun = [_begin_op(request, op, one, out) for one in described[first : first + request["at_once"]]]
        members += begun
        told = {member.name: _read_number(member, request["limit"]) for member in begun}
        prepared |= {name: took for name, took in told.items() if took is not None}
    calls = min(MOST_CALLS, max((math.ceil(BATCH_S / took) for took in prepared.values()), default=1))
    times: dict[str, list[float]] = {member.name: [] for member in members}
    spent = 0.0
    for number in range(request["rounds"]):
        if number and spent >= seconds:
            break
        for member in members if number % 2 else list(reversed(members)):
            if member.failure is None:
                began = time.monotonic()
                member.asked.write(f"{calls}\n")
                took = _read_number(member, request["limit"])
                spent += time.monotonic() - began
                times[member.name] += [] if took is None else [took / calls]
    for member in members:
        member.end()
    return {member.name: member.failure or {"seconds": times[member.name]} for member in members}, spent


def _begin_op(request: Mapping[str, Any], op: str, one: Mapping[str, Any], out: Path) -> Member:
    return Member(
        one["name"],
        one["code"],
        out / f"{op}-{one['name']}.log",
        functools.partial(_call_op, request, op, one["implementation"]),
    )


def _call_op(request: Mapping[str, Any], op: str, implementation: str, asked: IO[str], told: IO[str]) -> None:
    from kernels.contract.bench import BenchSetting
    from kernels.contract.host_memory import keep_freed_memory
    from kernels.contract.machine import choose_fast_precision
    from kernels.contract.precision import DTYPES, allow_bf16_matmul

    keep_freed_memory()  # as the trainer does
    setting = BenchSetting.from_recipe_file(request["recipe"])
    dtype = DTYPES[choose_fast_precision(request["device"]) if setting.precision == "auto" else setting.precision]
    with allow_bf16_matmul(dtype):
        call = _prepare_op(op, implementation, setting, dtype, request["device"])
        for _ in range(3):
            began = time.perf_counter()
            call()
            took = time.perf_counter() - began
        told.write(f"{took}\n")
        for line in asked:
            call()  # wakes the threads
            began = time.perf_counter()
            for _ in range(int(line)):
                call()
            told.write(f"{time.perf_counter() - began}\n")


def _prepare_op(name: str, implementation: str, setting: Any, dtype: Any, device: str) -> Callable[[], None]:
    """A forward and backward pass of an op on the recipe's shapes, compiled if the recipe compiles blocks, as ``kernels.contract.bench`` times it."""
    import torch

    from kernels.contract.op import OracleCase
    from kernels.contract.registry import find_implementation, find_op

    op = find_op(name)
    one = find_implementation(op, implementation, device)
    function = torch.compile(one.function, dynamic=False) if setting.compile and op.in_block else one.function
    inputs = one.prepare_inputs(op.inputs(OracleCase("recipe", setting.shape), device=device, dtype=dtype))
    leaves = [inputs[position] for position in op.gradients]

    def outputs() -> list[Any]:
        found = function(*inputs)
        found = found if isinstance(found, tuple) else (found,)
        return [one for one in found if one is not None and one.requires_grad]

    upstream = [torch.ones_like(one) if one.ndim == 0 else torch.randn_like(one) for one in outputs()]

    def call() -> None:
        found = outputs()
        if leaves:
            torch.autograd.grad(found, leaves, upstream)
        if device != "cpu":
            torch.cuda.synchronize()

    return call


def _read_number(member: Member, limit: float) -> float | None:
    """The next number that a member tells. None: it ended, told something else, or took longer than ``limit``; then it is killed."""
    import select

    ready, _, _ = select.select([member.told], [], [], limit)
    line = member.told.readline() if ready else ""
    try:
        number = float(line)
        if not math.isfinite(number) or number <= 0:
            raise ValueError
        return number
    except ValueError:
        if not ready:
            member.end(late=True)
        else:
            _wait_for_end(member)
        member.failure = member.describe_failure()
        return None


def _wait_for_end(member: Member) -> None:
    """Give a member that closed its pipe a moment to end by itself, so that its exit code is known; then end it."""
    until = time.monotonic() + 2
    while not member.is_over() and time.monotonic() < until:
        time.sleep(POLL_S)
    member.end()


# -- whole steps -------------------------------------------------------------------------------------------------------
class TrainerMember:
    """A member that trains runs, each when its specification is there. ``folders``: of its runs; the first is not timed."""

    def __init__(self, request: Mapping[str, Any], one: Mapping[str, Any], out: Path) -> None:
        self.spec, self.name = one["spec"], one["name"]
        home = out / "runs" / one["name"]
        self.folders = [home / f"{number:05d}-trunk" for number in range(request["rounds"] + 1)]
        for folder in self.folders:
            folder.mkdir(parents=True)
        self.member = Member(one["name"], one["code"], out / f"{one['name']}.log", self._train)
        self.begun = -1  # number of the run that began last

    def _train(self, asked: IO[str], told: IO[str]) -> None:
        sys.argv = ["trainer", "--wait", *map(str, self.folders)]
        runpy.run_module("trainer", run_name="__main__", alter_sys=True)

    def begin_if_ready(self, number: int, seed: int, steps: int) -> bool:
        """Give the trainer its run as soon as it waits for it. Returns whether the run has begun."""
        folder = self.folders[number]
        if self.begun < number and (folder / "ready").exists():
            spec = self.spec | {"last_step": self.spec["first_step"] + steps}
            spec["data_plan"] = spec["data_plan"] | {"seed": seed}
            (folder / "spec.tmp").write_text(json.dumps(spec))
            (folder / "spec.tmp").rename(folder / "segment.json")
            self.begun = number
        return self.begun >= number

    def is_done(self, number: int) -> bool:
        return (self.folders[number] / "result.json").exists()

    def read_run(self, number: int) -> dict[str, Any]:
        """The median seconds of a step after the first, and the last step's numbers; the run's files are removed."""
        folder = self.folders[number]
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        gaps = sorted(b["time"] - a["time"] for a, b in zip(lines, lines[1:]))
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return {"step_s": gaps[len(gaps) // 2], **{key: lines[-1].get(key) for key in KEPT_KEYS}}


def time_steps(request: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Returns for each member its runs, or how it failed. The first member is the base, which runs beside each group of ``at_once`` others.

    ``seconds``: the most that the timed runs may take, beyond a first round of each group.
    """
    found: dict[str, Any] = {"groups": [], "seconds": 0.0}
    base, *others = request["members"]
    groups = [others[n : n + request["at_once"]] for n in range(0, len(others), request["at_once"])]
    for number, group in enumerate(groups):
        place = out / f"group-{number}"
        place.mkdir()
        members = [TrainerMember(request, one, place) for one in (base, *group)]
        told, spent = _time_group(request, members, request["seconds"] * len(group) / len(others))
        found["groups"].append(told)
        found["seconds"] += spent
        shutil.rmtree(place / "runs", ignore_errors=True)
    return found


def _time_group(
    request: Mapping[str, Any], members: Sequence[TrainerMember], seconds: float
) -> tuple[dict[str, Any], float]:
    runs: dict[str, list[dict[str, Any]]] = {one.name: [] for one in members}
    failed: dict[str, Any] = {}

    def train(some: Sequence[TrainerMember], number: int) -> None:
        began, left = time.monotonic(), list(some)
        while left:
            for one in list(left):
                late = time.monotonic() - began > request["limit"]
                if one.begin_if_ready(number, request["seeds"][number], request["steps"]) and one.is_done(number):
                    left.remove(one)
                elif one.member.is_over() or late:
                    one.member.end(late=late)
                    failed[one.name] = one.member.describe_failure()
                    left.remove(one)
            time.sleep(POLL_S)

    train(members, 0)  # imports and compiles
    spent = 0.0
    for number in range(1, request["rounds"] + 1):
        if members[0].name in failed or (number > 1 and spent >= seconds):
            break
        for one in members if number % 2 else list(reversed(members)):
            if one.name in failed:
                continue
            began = time.monotonic()
            train([one], number)
            spent += time.monotonic() - began
            if one.name not in failed:
                try:
                    runs[one.name].append(one.read_run(number))
                except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                    failed[one.name] = {
                        "failed": f"{type(error).__name__}: {error}"[:500],
                        "status": None,
                        "late": False,
                    }
    for one in members:
        one.member.end()
    return {one.name: failed.get(one.name) or {"runs": runs[one.name]} for one in members}, spent


def import_torch(compiled: bool) -> None:
    """Import what every member needs. Nothing is computed, because a process with threads cannot be forked."""
    os.environ["TORCH_WARM_POOL"] = "0"  # torch.compile would start its helpers at its import
    import numpy  # noqa: F401
    import pydantic  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch  # noqa: F401
    import torch.nn.attention.flex_attention  # noqa: F401
    import torch.utils.flop_counter  # noqa: F401
    import yaml  # noqa: F401

    if compiled:
        import torch._dynamo
        import torch._inductor.compile_fx  # noqa: F401


KINDS = {"check": check, "alone": time_alone, "step": time_steps}

if __name__ == "__main__":
    asked_for, place = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    import_torch(asked_for["compiled"])
    result = KINDS[asked_for["kind"]](asked_for, place)
    (place / "result.tmp").write_text(json.dumps(result))
    (place / "result.tmp").rename(place / "result.json")
