"""Trains the matrix's cases in the sandbox, with the code of the baseline or of the candidate.

Both sides get the same data, checkpoints and folder names. They are drawn at random for each verdict.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from factory.core.untrusted_trainer_files import parse_json
from factory.gates.patch.execution_recorder import RECORDER_FILE, WATCH_FILE, ExecutedCode
from factory.gates.patch.matrix.cases import (
    BASE,
    CASES,
    FAR_STEPS,
    LONG_STEPS,
    VOCABULARY,
    MatrixCase,
    MatrixTool,
    make_case_recipe,
    make_tool_name,
)
from factory.gates.patch.matrix.sized_cases import SIZED, SIZED_OUTLIERS, SizedRuns
from factory.gates.patch.matrix.start_checkpoints import (
    ANNEAL_CASE,
    DRAWN,
    OTHER,
    TRUNK,
    copy_interrupted_run,
    make_data_plans,
    make_derived_checkpoints,
    make_outliers_checkpoint,
)
from factory.runs.arm import Arm
from factory.runs.untrusted_files import UntrustedFileError, read_bytes
from factory.sandbox import sandbox
from factory.sandbox.sandbox import SandboxLimits
from kernels.contract.message import Message
from trainer.contract.checkpoint import format as checkpoints

DRIVER = Path(__file__).with_name("train_cases.py")
NOTES_BYTES = 1 << 26
MOST_LIBRARIES, LIBRARY_BYTES = 100, 1 << 26
CONCURRENT_LANES = min(2, os.cpu_count() or 1)  # concurrent processes of one side; each has one thread
INTERRUPTED = ("half", "damaged", "far")  # values of ``begin`` that are folders of the run itself


@dataclass
class MatrixRuns:
    """The runs of one side. ``failed``: the error; '': no error. ``out_of_time``: a time limit ended the runs.

    folders: case → folder. Only folders of approved code may be read by path. opened: case → descriptor of the folder, opened before the run.
    """

    folders: dict[str, Path] = field(default_factory=dict)
    opened: dict[str, int] = field(default_factory=dict)
    executed: ExecutedCode = field(default_factory=ExecutedCode)
    failed: str = ""
    out_of_time: bool = False
    seconds: float = 0.0

    def open_run_folder(self, name: str, folder: Path, exit_stack: ExitStack) -> None:
        """Open the folder of a run, before the run."""
        self.folders[name] = folder
        self.opened[name] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        exit_stack.callback(os.close, self.opened[name])

    def add_runs(self, part: MatrixRuns) -> None:
        self.folders |= part.folders
        self.opened |= part.opened
        self.executed.merge_executed_code(part.executed)
        if part.failed and (
            not self.failed or self.out_of_time
        ):  # an error of the code takes precedence over a time limit
            self.failed, self.out_of_time = part.failed, part.out_of_time


@dataclass(frozen=True)
class MatrixSide:
    """The baseline or the candidate: its worktree, the paths of its kernels.yaml files ('reference' and 'chosen'), and the folder for its runs.

    wall_seconds: the time limit of each sandboxed process. after: closes the descriptors of the runs' folders. compiled: the folder of C++ kernels
    that approved code built; each process gets a copy. watched: path in the worktree → lines whose execution is recorded. disturbed: the seed of the
    perturbation that puts every op's results some roundings off; 0: no perturbation.
    """

    code: Path
    kernels: Mapping[str, Path]
    folder: Path
    wall_seconds: float
    after: ExitStack
    compiled: Path | None = None
    watched: Mapping[str, Sequence[int]] = field(default_factory=dict)
    disturbed: int = 0


@dataclass(frozen=True)
class MatrixPlan:
    """The values that the runs of both sides share.

    data: number of generations → data plan. names: case → the drawn name of its folder. seed: is added to each recipe's seed. starts: value of
    ``begin`` → checkpoint, or interrupted folder. steps: case → last step minus first step. made: the folders of the runs ``TRUNK``, ``OTHER``
    and ``ANNEAL_CASE``, and of the trunk at the recipe's size.
    """

    data: Mapping[int, dict[str, Any]]
    starts: Mapping[str, Path]
    names: Mapping[str, str]
    steps: Mapping[str, int]
    commit: str
    seed: int
    recipe_name: str  # the live recipe's, in all cases
    folder: Path
    made: tuple[Path, ...] = ()
    sized: SizedRuns | None = None  # the runs at the recipe's size

    def make_arm(self, case: MatrixCase) -> Arm:
        """Return the arm of a case: ``BASE`` with the case's changes."""
        begin = self.starts.get(case.begin) if case.begin not in INTERRUPTED else None
        first = checkpoints.read_checkpoint_state(begin)["step"] if begin else 0
        first = first if case.first_step is None else case.first_step
        data = self.data[DRAWN if case.drawn_domains else case.generations]
        base = {
            "kind": case.kind, "recipe": make_case_recipe({"name": self.recipe_name}), "data_plan": data,
            "first_step": first, "last_step": first + self.steps[case.name], "initial_checkpoint": begin and str(begin),
            "code_commit": self.commit, "restart_data": case.restart_data, "rewarm": case.rewarm,
        }  # fmt: skip
        mixture = case.make_recipe()["mixture"]
        weights = (case.kind == "anneal" and mixture.get("anneal_weights")) or mixture["weights"]
        changes = dict(case.changes)
        if case.drawn_domains:
            weights = changes["mixture.weights"] = self.data[DRAWN]["weights"]
        plan = {"weights": weights} | ({"phases": mixture["phases"]} if mixture.get("phases") else {})
        seed = case.make_recipe()["seed"] + self.seed
        return Arm(case.name, base, self.commit, recipe={**changes, "seed": seed}, plan=plan, ranks=case.ranks)

    def make_combined_arm(self, cases: Sequence[MatrixCase], commit: str, side_name: str) -> Arm:
        """Return one arm that stands for all runs of one side, with the sum of their steps. The ledger gets one row for it."""
        one = self.make_arm(cases[0])
        steps = sum(case.steps for case in cases)
        base = {**one.base, "first_step": 0, "last_step": steps, "initial_checkpoint": None}
        return Arm(f"{side_name}, {len(cases)} tiny runs", base, commit)

    def make_tool_arguments(self, tool: MatrixTool, out: Path) -> list[str]:
        """Return the tool's arguments, with paths instead of the words in capitals (``MatrixTool``)."""
        trunk, other, annealed, *sized = self.made
        (_, first), *_, (_, last) = checkpoints.list_checkpoints(trunk / "checkpoints")
        (_, foreign), *_ = checkpoints.list_checkpoints(other / "checkpoints")
        paths = {"OUT": out, "TRUNK": trunk, "OTHER": foreign, "FIRST": first, "LAST": last, "ANNEALED": annealed}
        shard = Path(self.data[1]["token_shards"][0]["path"])
        if sized:
            (_, paths["SIZEDFIRST"]), *_, (_, paths["SIZEDLAST"]) = checkpoints.list_checkpoints(
                sized[0] / "checkpoints"
            )
        paths |= {"RECIPE": self.folder / "recipe.yaml", "SHARDS": self.folder / "data", "SHARD": shard}
        return [
            str(paths[first] / rest) if first in paths else word
            for word in tool.arguments
            for first, _, rest in [word.partition("/")]
        ]

    def read_start_weights(self, case: MatrixCase) -> dict[str, torch.Tensor] | None:
        """Return the weights at the start of the run. None: the run initialises its weights, or resumes in an interrupted folder."""
        if case.begin in ("nothing", *INTERRUPTED):
            return None
        return checkpoints.read_tensors(self.starts[case.begin], "model")


def make_matrix_plan(
    side: MatrixSide, folder: Path, recipe_name: str, sized: SizedRuns | None = None
) -> tuple[MatrixPlan, MatrixRuns]:
    """Make the data, checkpoints and names for one verdict with the approved code of ``side``. ``sized``: the runs at the recipe's size.

    Returns the plan and the last runs. If ``failed`` of these runs is set, the plan is incomplete.
    """
    interrupted = {case.begin: case for case in CASES if case.begin in INTERRUPTED}
    far = interrupted.pop("far")
    of_size = (sized.trunk, *sized.cases) if sized else ()
    steps = {case.name: case.steps for case in (*CASES, TRUNK, OTHER, ANNEAL_CASE, *of_size)}
    long = next(case.name for case in CASES if case.steps == LONG_STEPS[0])
    steps[long] = LONG_STEPS[0] + secrets.randbelow(LONG_STEPS[1] - LONG_STEPS[0])
    drawn = random.SystemRandom().sample(range(1, 90_000), len(steps))  # folder names look like those of live segments
    names = {name: f"{number:05d}" for name, number in zip(steps, drawn)}
    seed = secrets.randbelow(1 << 20)
    vocabulary = sized.trunk.changes["model"]["vocab_size"] if sized else VOCABULARY
    data = make_data_plans(folder / "data", vocabulary)
    plan = MatrixPlan(data, {}, names, steps, secrets.token_hex(20), seed, recipe_name, folder, sized=sized)
    cases = [TRUNK, OTHER, *interrupted.values(), *of_size[:1]]
    first = run_cases(plan, replace(side, folder=folder / "trunk"), cases, fresh=True)
    if first.failed:
        return plan, first
    trunk = first.folders[TRUNK.name] / "checkpoints" / checkpoints.format_checkpoint_name(steps[TRUNK.name])
    starts: dict[str, Path] = {"trunk": trunk, **make_derived_checkpoints(trunk, folder / "derived")}
    second = run_cases(replace(plan, starts=starts), replace(side, folder=folder / "annealed"), [ANNEAL_CASE])
    if second.failed:
        return plan, second
    last = steps[TRUNK.name] + steps[ANNEAL_CASE.name]
    starts["annealed"] = second.folders[ANNEAL_CASE.name] / "checkpoints" / checkpoints.format_checkpoint_name(last)
    made = [first.folders[TRUNK.name], first.folders[OTHER.name], second.folders[ANNEAL_CASE.name]]
    if sized:
        made.append(first.folders[sized.trunk.name])
        (_, starts[SIZED]) = checkpoints.list_checkpoints(made[-1] / "checkpoints")[-1]
        starts[SIZED_OUTLIERS] = make_outliers_checkpoint(starts[SIZED], folder / "derived" / "sized")
    recipe = make_case_recipe({"mixture.weights": {**BASE["mixture"]["weights"], "a domain without shards": 0.1}})
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    starts |= {begin: folder / "interrupted" / begin for begin in INTERRUPTED}
    for begin, case in interrupted.items():
        copy_interrupted_run(first.folders[case.name], starts[begin], damaged=begin == "damaged")
    reached = FAR_STEPS[0] + secrets.randbelow(FAR_STEPS[1] - FAR_STEPS[0])
    copy_interrupted_run(first.folders[interrupted["half"].name], starts["far"], step=reached)
    return replace(plan, starts=starts, steps=steps | {far.name: reached + far.steps}, made=tuple(made)), second


def run_cases(
    plan: MatrixPlan,
    side: MatrixSide,
    cases: Sequence[MatrixCase] = CASES,
    tools: Sequence[MatrixTool] = (),
    fresh: bool = False,
) -> MatrixRuns:
    """Train the cases, then run the tools. ``fresh``: cases that resume begin with an empty folder instead. Raises: IsolationError.

    Cases of one rank run in ``CONCURRENT_LANES`` concurrent processes. Cases of several ranks run afterwards.
    """
    single = [case for case in cases if case.ranks == 1]
    single.sort(key=lambda case: -case.steps)  # so one lane has the longest run while the other has many short runs
    lanes = [single[number::CONCURRENT_LANES] for number in range(CONCURRENT_LANES)]
    found, began = MatrixRuns(), time.monotonic()
    with ThreadPoolExecutor(CONCURRENT_LANES) as pool:
        jobs = [
            pool.submit(_run_lane, plan, side, fresh, lane, tools if n == CONCURRENT_LANES - 1 else (), f"{n}")
            for n, lane in enumerate(lanes)
            if lane or (tools and n == CONCURRENT_LANES - 1)
        ]
        for job in jobs:
            found.add_runs(job.result())
    for ranks in sorted({case.ranks for case in cases} - {1}):
        if not found.failed:
            several = [case for case in cases if case.ranks == ranks]
            found.add_runs(_run_lane(plan, side, fresh, several, (), "ranks" if ranks == 2 else f"{ranks} ranks"))
    found.seconds = time.monotonic() - began
    return found


def _run_lane(
    plan: MatrixPlan, side: MatrixSide, fresh: bool, cases: Sequence[MatrixCase], tools: Sequence[MatrixTool], name: str
) -> MatrixRuns:
    """Run cases with the same number of ranks, then tools, one after the other in one sandbox."""
    folder = side.folder / name
    found = MatrixRuns()
    segments, uses = [], []
    for case in cases:
        own = folder / "segments" / plan.names[case.name]
        own.mkdir(parents=True)
        if case.begin in INTERRUPTED and not fresh:
            shutil.copytree(plan.starts[case.begin], own, dirs_exist_ok=True)
        (own / "segment.json").write_text(json.dumps(plan.make_arm(case).make_spec(side.kernels[case.kernels])))
        found.open_run_folder(case.name, own, side.after)
        segments.append(
            {"folder": str(own)} | {key: getattr(case, key) for key in ("stop_after", "waits", "slow_threads")}
        )
    for number, tool in enumerate(tools):
        own = folder / "tools" / str(number)
        (own / "checkpoints").mkdir(parents=True)
        found.open_run_folder(make_tool_name(tool), own, side.after)
        uses.append({"folder": str(own), "module": tool.module, "arguments": plan.make_tool_arguments(tool, own)})
    if side.compiled is not None and side.compiled.is_dir():
        copy_compiled_libraries(side.compiled, folder / "cache" / "inductor" / side.compiled.name)
    ranks = cases[0].ranks if cases else 1
    wanted = {case.name: case.exit_code for case in cases} | {make_tool_name(tool): tool.exit_code for tool in tools}
    notes, request = folder / "notes", folder / "request.json"
    notes.mkdir()
    asked = {"folders": segments, "tools": uses, "watched": dict(side.watched), "ranks": ranks}
    asked["disturbed"] = side.disturbed
    request.write_text(json.dumps(asked))
    descriptor = os.open(notes, os.O_RDONLY | os.O_DIRECTORY)
    try:
        result = sandbox.run_in_sandbox(
            [sys.executable, str(DRIVER), str(RECORDER_FILE), str(request), str(notes)],
            output=folder,
            readonly=[side.code, DRIVER, RECORDER_FILE, WATCH_FILE, plan.folder, *side.kernels.values()],
            cwd=side.code,
            environment={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            limits=SandboxLimits(wall_seconds=side.wall_seconds),
        )
        if not result.ok:
            found.failed, found.out_of_time = result.describe_ending(), result.timed_out
            return found
        for rank in range(ranks):
            left = parse_json(read_bytes(descriptor, [f"rank-{rank}.json"], NOTES_BYTES))
            found.executed.add_record(left["executed"])
            if rank == 0:
                codes = dict(zip(wanted, left["codes"], strict=True))
    except (UntrustedFileError, ValueError, KeyError, TypeError, RecursionError) as error:
        found.failed = Message(
            "patch.no_record", "the record of executed code cannot be read: {error}", error=str(error)[:300]
        )
        return found
    finally:
        os.close(descriptor)
    if wrong := [name for name, code in codes.items() if code != wanted[name]]:
        said = (result.stderr.strip().splitlines() or [""])[-1]
        found.failed = Message(
            "patch.run_ended",
            "run '{run}' ended with exit code {code} instead of {expected}: {said}",
            run=wrong[0], code=codes[wrong[0]], expected=wanted[wrong[0]], said=said[:400],
        )  # fmt: skip
    return found


def copy_compiled_libraries(source: Path, target: Path) -> None:
    """Copy the regular files of a folder that live code can write. Links are not followed, and pipes do not block. Raises: OSError."""
    target.mkdir(parents=True)
    with ExitStack() as opened:
        folder = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        opened.callback(os.close, folder)
        for name in sorted(os.listdir(folder))[:MOST_LIBRARIES]:
            with suppress(UntrustedFileError):
                (target / name).write_bytes(read_bytes(folder, (name,), LIBRARY_BYTES))
