"""Trains the matrix's cases with the code of one side, in the sandbox.

Baseline and candidate get the same data, the same checkpoints and the same folder names, all drawn for this verdict.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from factory.gates.patch.matrix import record
from factory.gates.patch.matrix.cases import CASES, LONG_STEPS, MatrixCase, recipe_with
from factory.gates.patch.matrix.starts import ANNEALED, TRUNK, Data, derived, interrupt, make_data
from factory.gates.untrusted_tensors import UntrustedFileError, read_bytes
from factory.sandbox import sandbox
from factory.sandbox.sandbox import Limits
from trainer.contract.checkpoint import format as checkpoints

RECORD = Path(record.__file__)
NOTES_BYTES = 1 << 26
Instruction = tuple[str, int, int]  # qualified name and first line of a code object, offset in it


@dataclass
class Executed:
    """What runs executed: lines and, of the files that were asked for, instructions; by path in the worktree."""

    lines: dict[str, set[int]] = field(default_factory=dict)
    instructions: dict[str, set[Instruction]] = field(default_factory=dict)

    def add(self, notes: Mapping[str, Any]) -> None:
        """Notes of ``record``. Raises: KeyError, TypeError, ValueError for what are no such notes."""
        for name, lines in notes["lines"].items():
            self.lines.setdefault(name, set()).update(lines)
        for name, parts in notes["instructions"].items():
            self.instructions.setdefault(name, set()).update((str(q), int(line), int(at)) for q, line, at in parts)


@dataclass
class SideRuns:
    """One side's runs. ``folders``: case → folder. ``failed``: what went wrong; ``out_of_time``: only its time limit."""

    folders: dict[str, Path] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    executed: Executed = field(default_factory=Executed)
    failed: str = ""
    out_of_time: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """All that both sides' runs share.

    names: case → the folder's drawn name. starts: begin → checkpoint, or interrupted folder. steps: case → steps.
    """

    cases: Sequence[MatrixCase]
    data: Data
    starts: Mapping[str, Path]
    names: Mapping[str, str]
    steps: Mapping[str, int]
    commit: str
    folder: Path

    def spec(self, case: MatrixCase, kernels: Path) -> dict[str, Any]:
        """``segment.json`` of a case."""
        begin = self.starts.get(case.begin) if case.begin not in ("half", "damaged") else None
        first = checkpoints.read_state(begin)["step"] if begin else 0
        recipe = case.recipe()
        plan = self.data.plans[case.generations] | {
            key: recipe["mixture"][key] for key in ("weights", "anneal_weights", "phases") if recipe["mixture"].get(key)
        }
        if case.kind == "anneal" and plan.pop("anneal_weights", None):
            plan["weights"] = recipe["mixture"]["anneal_weights"]
        return {
            "kind": case.kind,
            "recipe": recipe,
            "data_plan": {key: value for key, value in plan.items() if key != "anneal_weights"},
            "first_step": first,
            "last_step": first + self.steps[case.name],
            "initial_checkpoint": str(begin) if begin else None,
            "code_commit": self.commit,
            "restart_data": case.restart_data,
            "rewarm": case.rewarm,
            "kernels": str(kernels),
        }

    def weights_before(self, case: MatrixCase) -> dict[str, torch.Tensor] | None:
        """What the run starts from; None where it makes its own."""
        if case.begin in ("nothing", "half", "damaged"):
            return None
        return checkpoints.read_tensors(self.starts[case.begin], "model")


def make_plan(code: Path, kernels: Mapping[str, Path], folder: Path, wall_seconds: float) -> tuple[Plan, str]:
    """Data, checkpoints and names for one verdict, made by the approved ``code``; or why that failed."""
    data = make_data(folder / "data")
    interrupted = [case for case in CASES if case.begin in ("half", "damaged")]
    steps = {case.name: case.steps for case in (*CASES, TRUNK, ANNEALED)}
    long = next(case.name for case in CASES if case.steps == LONG_STEPS[0])
    steps[long] = LONG_STEPS[0] + secrets.randbelow(LONG_STEPS[1] - LONG_STEPS[0])
    names = {case.name: f"{number:05d}" for case, number in zip((*CASES, TRUNK, ANNEALED), _numbers(len(steps)))}
    plan = Plan(CASES, data, {}, names, steps, secrets.token_hex(20), folder)
    starts: dict[str, Path] = {}
    first = run_cases(
        replace(plan, starts=starts), code, kernels, folder / "begin", wall_seconds, [TRUNK, *interrupted], fresh=True
    )
    if first.failed:
        return plan, first.failed
    trunk = first.folders[TRUNK.name] / "checkpoints" / checkpoints.name_of(steps[TRUNK.name])
    starts = {"trunk": trunk, **derived(trunk, folder / "derived")}
    second = run_cases(replace(plan, starts=starts), code, kernels, folder / "begin-2", wall_seconds, [ANNEALED])
    if second.failed:
        return plan, second.failed
    last = steps[TRUNK.name] + steps[ANNEALED.name]
    starts["annealed"] = second.folders[ANNEALED.name] / "checkpoints" / checkpoints.name_of(last)
    for case in interrupted:
        target = folder / "interrupted" / case.begin
        interrupt(first.folders[case.name], target, damage=case.begin == "damaged")
        starts[case.begin] = target
    return replace(plan, starts=starts), ""


def _numbers(count: int) -> list[int]:
    """Drawn segment numbers, all different."""
    found: set[int] = set()
    while len(found) < count:
        found.add(1 + secrets.randbelow(90_000))
    return list(found)


def run_cases(
    plan: Plan,
    code: Path,
    kernels: Mapping[str, Path],
    folder: Path,
    wall_seconds: float,
    cases: Sequence[MatrixCase] | None = None,
    instructions: Sequence[str] = (),
    fresh: bool = False,
) -> SideRuns:
    """Train the cases with ``code``; ``kernels``: 'reference' and 'chosen' → kernels.yaml. ``fresh``: interrupted cases from nothing.

    Raises: IsolationError.
    """
    side = SideRuns()
    for ranks in (1, 2):
        chosen = [case for case in (plan.cases if cases is None else cases) if case.ranks == ranks]
        if chosen and not side.failed:
            _run_ranks(
                plan, code, kernels, folder / f"ranks-{ranks}", wall_seconds, chosen, instructions, fresh, ranks, side
            )
    return side


def _run_ranks(
    plan: Plan,
    code: Path,
    kernels: Mapping[str, Path],
    folder: Path,
    wall_seconds: float,
    cases: Sequence[MatrixCase],
    instructions: Sequence[str],
    fresh: bool,
    ranks: int,
    side: SideRuns,
) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    entries = []
    for case in cases:
        own = folder / "segments" / plan.names[case.name]
        own.mkdir(parents=True)
        if case.begin in ("half", "damaged") and not fresh:
            shutil.copytree(plan.starts[case.begin], own, dirs_exist_ok=True)
        (own / "segment.json").write_text(json.dumps(plan.spec(case, kernels[case.kernels])))
        side.folders[case.name] = own
        entries.append({"folder": str(own), "stop_after": case.stop_after})
    notes = folder / "notes"
    notes.mkdir()
    request = folder / "request.json"
    request.write_text(json.dumps({"folders": entries, "instructions": list(instructions), "ranks": ranks}))
    descriptor = os.open(notes, os.O_RDONLY | os.O_DIRECTORY)
    try:
        result = sandbox.run(
            [sys.executable, str(RECORD), str(request), str(notes)],
            output=folder,
            readonly=[code, RECORD, plan.folder, *{path for path in kernels.values()}],
            cwd=code,
            environment={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            limits=Limits(wall_seconds=wall_seconds),
        )
        side.seconds += result.seconds
        if not result.ok:
            side.failed, side.out_of_time = result.why(), result.timed_out
            return
        for rank in range(ranks):
            found = json.loads(read_bytes(descriptor, [f"lines-{rank}.json"], NOTES_BYTES))
            side.executed.add(found)
            if rank == 0:
                side.codes |= dict(zip((case.name for case in cases), found["codes"], strict=True))
    except (UntrustedFileError, ValueError, KeyError, TypeError, RecursionError) as error:
        side.failed = f"what it executed cannot be read: {str(error)[:300]}"
    finally:
        os.close(descriptor)
    if wrong := {name: code for name, code in side.codes.items() if code != 0}:
        name, code = next(iter(wrong.items()))
        side.failed = f"the run '{name}' ended with code {code}: {result.stderr.strip().splitlines()[-1][:300] if result.stderr.strip() else ''}"
