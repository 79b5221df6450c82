"""Tries variants of a patch before anything is proposed, and gives one table.

Each stage runs all variants that reached it in one sandbox, as forks of one process with torch imported (``try_driver``):

1. ``check``: scope and static rules, then the op oracle's first case, and an import of other changed modules. No budget withholds it.
2. ``alone``: each changed op outside the training step, in turn with the present code.
3. ``step``: a few short runs of the training step, in turn with the present code. A patch of ``trainer/`` is timed here.

The result of each stage is an event of the agent's run in the ledger (``try_record``) as soon as the stage is over. So a killed run continues with
its budget, and the same edits are never measured twice. The budget counts the variants that were timed and the seconds of timing. Start-up,
compilation and checks cost nothing. Later runs on the same target read what was tried.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
import statistics
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agents.core.proposal import Edit, hash_edits
from agents.core.untrusted import fold_to_one_line
from agents.core.workbench import QuickCheck, TriedVariant, TryTable, Variant
from factory.code_loop.try_record import ALONE, CHECK, STEP, TryRecord
from factory.computing.tuned_kernels import KERNELS
from factory.core import devices
from factory.core.path_removal import remove_path
from factory.gates.patch.changed_ops import (
    ChangedOp,
    find_changed_ops,
    find_sections_of_other_devices,
    find_unknown_ops,
)
from factory.gates.patch.op_answers import DRIVER as OP_DRIVER
from factory.gates.patch.op_answers import OpAnswers, make_recorder_request, run_driver
from factory.gates.patch.policy import PatchPolicy
from factory.gates.patch.source_rules import find_source_problems
from factory.gates.patch.stages.oracle import make_oracle_evidence, make_oracle_jobs
from factory.gates.recipe_changes import get_used_recipe_path
from factory.gates.time_limits import make_baseline_stopped_message
from factory.gates.training_start import TrainingStart
from factory.git import repository
from factory.git.scope import AgentsPolicy, FileChange, find_scope_problems
from factory.ledger.plant import Plant
from factory.runs.arm import Arm, make_recipe_for_one_rank
from factory.runs.compile_cache import copy_cache
from factory.runs.untrusted_files import UntrustedFileError, read_untrusted_json_object
from factory.sandbox import sandbox
from factory.sandbox.sandbox import SandboxLimits
from kernels.contract.message import Message, messages_to_json
from trainer.contract.recipe import Recipe

TRY_DRIVER = Path(__file__).with_name("try_driver.py")
AT_ONCE = 4  # the most variants that are checked or prepared at the same time
ALONE_ROUNDS = 12
STEP_ROUNDS = 3
STEPS = 5  # of a short run; the first step is not counted
LIMIT_S = 600.0  # of one variant's preparation, with compilation
RESULT_BYTES = 1 << 20


@dataclass
class _Trial:
    """A variant on its way through the stages."""

    name: str
    key: str
    changes: list[FileChange]
    number: int = 0
    ops: list[ChangedOp] = field(default_factory=list)  # to compare with fp64
    changed: list[ChangedOp] = field(default_factory=list)  # to time: those whose choice or code the variant changes
    code: Path = Path()
    check: QuickCheck | None = None
    known: bool = True  # every result is from an earlier call
    times: list[Message] = field(default_factory=list)

    @property
    def member(self) -> str:
        return f"variant-{self.number}"

    @property
    def paths(self) -> list[str]:
        return [change.path for change in self.changes]

    @property
    def modules(self) -> list[str]:
        """The changed modules, without those of ops, which the checks of ops import."""
        return [
            path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            for path in self.paths
            if path.endswith(".py") and not (self.ops and path.startswith("kernels/"))
        ]


@dataclass(frozen=True)
class Tries:
    """The tries of one run on one base commit."""

    plant: Plant
    base: str
    start: TrainingStart
    policy: AgentsPolicy
    file_modes: Mapping[str, str]
    record: TryRecord

    def check(self, edits: Sequence[Edit], op: str) -> QuickCheck:
        """Check one patch. Raises: IsolationError."""
        (trial,) = self._begin([Variant("", tuple(edits))], op)
        with ExitStack() as held:
            self._check([trial], op, held)
        assert trial.check is not None
        return trial.check

    def make_table(self, variants: Sequence[Variant], op: str, target: str) -> TryTable:
        """Check variants and time the correct ones. Raises: IsolationError."""
        trials = self._begin(variants, op)
        different = list({trial.key: trial for trial in reversed(trials)}.values())[::-1]
        with ExitStack() as held:
            held.enter_context(devices.hold_device())
            title = Message("code_loop.trying", "trying {variants:,|variant|variants}", variants=len(different))
            with self.plant.progress.task(title, 3) as task:
                work = self._check(different, op, held, target)
                task.advance(1, "checked")
                correct = [trial for trial in different if trial.check is not None and trial.check.ok]
                timed = self._may_time(correct)
                self._stage(ALONE, [trial for trial in timed if trial.changed], work, held, target)
                task.advance(1, "ops alone")
                self._stage(STEP, timed, work, held, target)
                task.advance(1, "whole steps")
        found = {trial.key: trial for trial in different}
        rows = [(trial.name, found[trial.key]) for trial in trials]
        return TryTable(
            tuple(
                TriedVariant(name, one.check or QuickCheck(CHECK, ()), tuple(one.times), one.known)
                for name, one in rows
            ),
            self.describe_budget(),
        )

    def describe_budget(self) -> Message:
        """Return a line about the tries and seconds of timing that are used."""
        return Message(
            "code_loop.tries_used",
            "{used} of {most:,|try is|tries are} used, and {seconds:.0f} of {limit:.0f} s of timing (max_tries and try_seconds in "
            "policies/agents.yaml). Checks of results are free",
            used=len(self.record.timed_variants), most=self.policy.max_tries, seconds=self.record.timing_seconds, limit=self.policy.try_seconds,
        )  # fmt: skip

    # -- which variants ------------------------------------------------------------------------------------------------
    def _begin(self, variants: Sequence[Variant], op: str) -> list[_Trial]:
        trials = []
        for number, variant in enumerate(variants, 1):
            edits = [(edit.path, edit.new_text) for edit in variant.edits]
            changes = repository.convert_edits_to_changes(self.file_modes, edits)
            parts = [self.base, devices.get_device_kind(), op, hash_edits(variant.edits)]
            key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
            trials.append(_Trial(variant.name, key, changes, number))
        return trials

    def _may_time(self, correct: Sequence[_Trial]) -> list[_Trial]:
        """Return the variants that the budget covers, and those that were timed already. The others are told why they are not timed."""
        timed, allowed = self.record.timed_variants, []
        left = self.policy.max_tries - len(timed)
        for trial in correct:
            if trial.key in timed:
                allowed.append(trial)
            elif left <= 0 or self.record.timing_seconds >= self.policy.try_seconds:
                trial.times.append(self._no_budget())
            else:
                left -= 1
                allowed.append(trial)
        return allowed

    def _no_budget(self) -> Message:
        if self.policy.max_tries == 0 or self.policy.try_seconds == 0:
            key = "try_seconds" if self.policy.max_tries else "max_tries"
            return Message(
                "code_loop.no_tries",
                "not timed, because {key} is 0 in policies/agents.yaml. Make the proposal",
                key=key,
            )
        return Message("code_loop.no_tries_left", "not timed, because the budget of tries is used. Make the proposal")

    # -- stage 1 -------------------------------------------------------------------------------------------------------
    def _check(self, trials: Sequence[_Trial], op: str, held: ExitStack, target: str = "") -> Path:
        """Check the trials that were not checked before, and return the folder with the code of all. It is removed when ``held`` is closed."""
        work = self.plant.workspace.root / "cache" / f"check-{threading.get_native_id()}"
        remove_path(work)  # the folder of a process that was killed here
        held.callback(remove_path, work)
        baseline = repository.checkout_live_code(self.plant.workspace, self.base)
        waiting = []
        for trial in trials:
            trial.check = self._find_refusal(trial, baseline)
            if trial.check is not None:
                trial.known = self.record.find(trial.key, CHECK) is not None
                if not trial.known:
                    self.record.add([_detail(trial, CHECK, target)])
                continue
            trial.code = work / trial.member / "code"
            shutil.copytree(baseline, trial.code, ignore=shutil.ignore_patterns(".git", "__pycache__"))
            for change in trial.changes:
                (trial.code / change.path).parent.mkdir(parents=True, exist_ok=True)
                (trial.code / change.path).write_bytes(change.content or b"")
            before, after = ((folder / KERNELS).read_bytes() for folder in (baseline, trial.code))
            found = find_changed_ops(before, after, trial.paths, devices.get_device_kind(), self.start.kernels)
            trial.changed = [one for one in found if one.before != one.after or _changes_code(one.op, op, trial.paths)]
            trial.ops = [one for one in found if one.op == op or one in trial.changed]
            if known := self.record.find(trial.key, CHECK):
                trial.check = QuickCheck(known["of"], tuple(map(Message.from_json, known["problems"])))
            else:
                waiting.append(trial)
        if waiting:
            with devices.hold_device():
                self._check_in_sandbox(waiting, baseline, work)
            for trial in waiting:
                trial.known = False
            self.record.add([_detail(trial, CHECK, target) for trial in waiting])
        return work

    def _find_refusal(self, trial: _Trial, baseline: Path) -> QuickCheck | None:
        """Return the problems that the stages scope and static find; None if there are none."""
        if found := find_scope_problems(self.policy, trial.changes, self.file_modes):
            return QuickCheck("scope", tuple(found))
        for change in trial.changes:
            base = (baseline / change.path).read_bytes() if change.path in self.file_modes else None
            refused = find_source_problems(change, base)
            if change.path == KERNELS:
                refused += find_unknown_ops(change.content) + find_sections_of_other_devices(base, change.content)
            if refused:
                return QuickCheck("static", tuple(refused))
        return None

    def _check_in_sandbox(self, trials: Sequence[_Trial], baseline: Path, work: Path) -> None:
        oracle = PatchPolicy.load(self.plant.workspace.policy_path("gates/patch.yaml")).oracle
        oracle = oracle.model_copy(update={"cases": oracle.cases[:1]})
        given, out, questions = work / "given", work / "out", work / "questions"
        for folder in (given, out, questions):
            folder.mkdir(parents=True, exist_ok=True)
        names = sorted({one.op for trial in trials for one in trial.ops})
        jobs = make_oracle_jobs(oracle, [ChangedOp(name, "", "") for name in names], self.start.recipe["precision"])
        missing, truth_s = None, 0.0
        asked = {"device": devices.get_device_kind(), **make_recorder_request({})}
        if jobs:
            request = questions / "request.json"
            request.write_text(json.dumps(asked | {"jobs": jobs}))
            made = run_driver(["make", request, given], [baseline, request], given, baseline, oracle.wall_seconds)
            truth_s = made.seconds
            if made.timed_out:
                missing = make_baseline_stopped_message("test inputs", oracle.wall_seconds, "oracle.wall_seconds")
            elif not made.ok:
                missing = Message(
                    "code_loop.no_inputs",
                    "the test inputs could not be made: {problem}",
                    problem=made.describe_ending(),
                )
        limit = oracle.patience.compute_attempt_limits(truth_s)[0]
        answers: dict[str, tuple[list[dict[str, Any]], int]] = {}
        members = []
        with ExitStack() as opened:
            for trial in trials:
                after = {one.op: one.after for one in trial.ops}
                own = [job | {"implementation": after.get(job["op"], "")} for job in jobs]
                numbered = [job | {"number": number} for number, job in enumerate(own) if job["op"] in after]
                question, answer = questions / f"{trial.member}.json", out / f"answers-{trial.number}"
                question.write_text(json.dumps(asked | {"jobs": numbered}))
                answer.mkdir()
                answers[trial.member] = own, _open_folder(answer, opened)
                arguments = ["answer", str(question), str(given / "inputs"), str(answer)] if numbered else []
                members.append(
                    {"name": trial.member, "code": str(trial.code), "modules": trial.modules, "answers": arguments}
                )
            ends, why = ({}, missing) if missing else self._run(
                {"kind": CHECK, "members": members, "limit": limit, "op_driver": str(OP_DRIVER)},
                [*(trial.code for trial in trials), questions, OP_DRIVER, *([given / "inputs"] if jobs else [])],
                out,
                questions / "check.json",
                limit * math.ceil(len(trials) / _at_once()) + 60,
                environment={"OMP_NUM_THREADS": "1"},  # with small shapes a second thread would only wait
            )  # fmt: skip
            for trial in trials:
                own, answered = answers[trial.member]
                died = why or _describe_end(ends.get(trial.member), limit)
                if not trial.ops:
                    broken = Message(
                        "code_loop.no_import", "the changed files cannot be imported: {why}", why=died or ""
                    )
                    trial.check = QuickCheck("import", (broken,) if died else ())
                    continue
                numbers = [n for n, job in enumerate(own) if job["implementation"]]
                mine = [job if job["implementation"] else own[numbers[0]] for job in own]
                told = OpAnswers(mine, given / "truth", answered, truth_s, truth_s, missing, died)
                found = make_oracle_evidence(told, numbers)
                trial.check = QuickCheck("oracle", () if found["state"] == "passed" else tuple(found["reasons"]))

    # -- stages 2 and 3 ------------------------------------------------------------------------------------------------
    def _stage(self, stage: str, trials: Sequence[_Trial], work: Path, held: ExitStack, target: str) -> None:
        """Time the trials that this stage did not time before, and add its lines to all trials."""
        waiting = [trial for trial in trials if self.record.find(trial.key, stage) is None]
        if waiting:
            seconds = max(0.0, self.policy.try_seconds - self.record.timing_seconds)
            time_them = self._time_alone if stage == ALONE else self._time_steps
            lines, spent = time_them(waiting, work, seconds / 3 if stage == ALONE else seconds)
            details = []
            for trial in waiting:
                trial.known = False
                said = messages_to_json(lines[trial.member])
                details.append(_detail(trial, stage, target) | {"lines": said, "seconds": spent / len(waiting)})
            self.record.add(details)
        for trial in trials:
            found = self.record.find(trial.key, stage)
            trial.times += map(Message.from_json, found["lines"]) if found else ()

    def _time_alone(
        self, trials: Sequence[_Trial], work: Path, seconds: float
    ) -> tuple[dict[str, list[Message]], float]:
        baseline = repository.checkout_live_code(self.plant.workspace, self.base)
        place = self._make_place(work, ALONE)
        recipe = place / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(self.start.recipe))
        ops: dict[str, list[dict[str, str]]] = {}
        for trial in trials:
            for one in trial.changed:
                base = {"name": "base", "code": str(baseline), "implementation": one.before}
                own = {"name": trial.member, "code": str(trial.code), "implementation": one.after}
                ops.setdefault(one.op, [base]).append(own)
        request = {
            "kind": ALONE, "ops": ops, "recipe": str(recipe), "device": devices.get_device_kind(), "rounds": ALONE_ROUNDS,
            "seconds": seconds, "limit": LIMIT_S,
        }  # fmt: skip
        groups = sum(math.ceil(len(members) / _at_once()) for members in ops.values())
        readonly = [baseline, *(trial.code for trial in trials), place]
        found, why = self._run(
            request, readonly, work / "out-alone", place / "request.json", LIMIT_S * groups + 2 * seconds + 60
        )
        return read_times_alone(trials, found, why), _number(found.get("seconds"))

    def _time_steps(
        self, trials: Sequence[_Trial], work: Path, seconds: float
    ) -> tuple[dict[str, list[Message]], float]:
        baseline = repository.checkout_live_code(self.plant.workspace, self.base)
        place, out = self._make_place(work, STEP), work / "out-step"
        members = [self._make_member("base", baseline, [], place)]
        members += [self._make_member(trial.member, trial.code, trial.paths, place) for trial in trials]
        at_once = 1 if devices.get_device_kind() == "cuda" else _at_once()
        request = {
            "kind": STEP, "members": members, "rounds": STEP_ROUNDS, "steps": STEPS, "seconds": seconds, "limit": LIMIT_S,
            "seeds": [secrets.randbelow(1 << 31) for _ in range(STEP_ROUNDS + 1)], "at_once": at_once,
        }  # fmt: skip
        shards = [Path(shard["path"]) for shard in self.start.plan["token_shards"]]
        readonly = [baseline, *(trial.code for trial in trials), place, *shards, self.start.checkpoint]
        groups = math.ceil(len(trials) / at_once)
        size = sum(file.stat().st_size for file in self.start.checkpoint.iterdir())
        limits = SandboxLimits(
            wall_seconds=LIMIT_S * groups + 2 * seconds + 60,
            memory=(1 + at_once) * max(SandboxLimits.memory, 8 * size),
            file=max(SandboxLimits.file, 2 * size),
            output=max(SandboxLimits.output, 4 * (1 + at_once) * size),
        )
        found, why = self._run(request, readonly, out, place / "request.json", limits=limits)
        return read_step_times(trials, found, why), _number(found.get("seconds"))

    def _make_place(self, work: Path, stage: str) -> Path:
        """Make the folder of a timing stage's files, and its compile cache: a private copy of approved code's."""
        compiled = devices.get_compiled_code_folder(self.plant.workspace.root, self.start.commit)
        out = work / f"out-{stage}"
        out.mkdir(parents=True)
        copy_cache(compiled, out / "cache")
        place = work / f"place-{stage}"
        place.mkdir()
        return place

    def _make_member(self, name: str, code: Path, paths: Sequence[str], place: Path) -> dict[str, Any]:
        """Return a trainer's part of the request: the specification of a run from the trunk's last checkpoint. Each run gets its own seed."""
        start, recipe = self.start, dict(self.start.recipe)
        used = get_used_recipe_path(self.plant.workspace)
        if used in paths:  # only what decides how a step is computed
            own = Recipe.load(code / used).model_dump()
            micro = own["batch"]["micro_sequences"]
            fits = micro and recipe["batch"]["sequences"] % micro == 0
            recipe |= {
                "compile": own["compile"],
                "batch": recipe["batch"] | {"micro_sequences": micro if fits else None},
            }
        recipe |= {"stability": recipe["stability"] | {"noise_scale_every": 0}}
        kernels = place / f"{name}.yaml"
        kernels.write_text(start.resolve_kernels(code))
        base = {
            "kind": "trunk", "recipe": make_recipe_for_one_rank(recipe), "data_plan": start.plan, "first_step": start.step,
            "last_step": start.step + STEPS, "initial_checkpoint": str(start.checkpoint), "restart_data": True, "code_commit": self.base,
        }  # fmt: skip
        return {"name": name, "code": str(code), "spec": Arm(name, base, self.base, seed=0).make_spec(kernels)}

    def _run(
        self,
        request: dict[str, Any],
        readonly: Sequence[Path],
        out: Path,
        file: Path,
        wall_seconds: float = 0.0,
        environment: Mapping[str, str] | None = None,
        limits: SandboxLimits | None = None,
    ) -> tuple[dict[str, Any], Message | None]:
        """Run the driver, and return what it told, and why it told nothing."""
        compiled = request["kind"] != CHECK and bool(self.start.recipe.get("compile"))
        file.write_text(json.dumps({"at_once": _at_once(), "compiled": compiled} | request))
        with ExitStack() as opened:
            folder = _open_folder(out, opened)
            done = sandbox.run_in_sandbox(
                [sys.executable, str(TRY_DRIVER), str(file), str(out)],
                output=out,
                readonly=[*readonly, file, TRY_DRIVER],
                limits=limits or SandboxLimits(wall_seconds=wall_seconds),
                environment=environment,
            )
            try:
                return read_untrusted_json_object(folder, ("result.json",), RESULT_BYTES), None
            except UntrustedFileError:
                why = Message("code_loop.tries_ended", "the tries ended early: {why}", why=done.describe_ending())
                return {}, why


def _changes_code(op: str, wanted: str, paths: Sequence[str]) -> bool:
    """True if a patch changes files of an op, or files that all ops share and the op is the ``wanted`` one."""
    shared = any(
        path.startswith("kernels/native/") or path.count("/") == 1 for path in paths if path.startswith("kernels/")
    )
    return any(path.startswith(f"kernels/{op}/") for path in paths) or shared and op == wanted


def _at_once() -> int:
    return min(AT_ONCE, len(os.sched_getaffinity(0)))


def _open_folder(folder: Path, opened: ExitStack) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    opened.callback(os.close, descriptor)
    return descriptor


def _detail(trial: _Trial, stage: str, target: str) -> dict[str, Any]:
    found = {"key": trial.key, "stage": stage, "name": trial.name, "target": target, "paths": trial.paths}
    if stage == CHECK and trial.check is not None:
        found |= {"of": trial.check.stage, "problems": messages_to_json(list(trial.check.problems))}
    return found


def _describe_end(end: Any, limit: float = LIMIT_S) -> Message | None:
    """Return how a member ended; None if it did its work. ``end``: what the driver told, which untrusted code may have written."""
    if isinstance(end, dict) and "failed" not in end:
        return None
    end = end if isinstance(end, dict) else {}
    if end.get("late") is True:
        return Message(
            "code_loop.try_late", "its process was stopped, because it took more than {limit:.0f} s", limit=limit
        )
    line = fold_to_one_line(str(end.get("failed") or ""), 300)
    return Message("code_loop.try_ended", "its process ended early{line}", line=f": {line}" if line else "")


def _number(value: Any) -> float:
    """Return a number that untrusted code told, at least 0."""
    right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return max(0.0, float(value)) if right else 0.0


def _positive_numbers(values: Any) -> list[float]:
    return [n for n in map(_number, values) if n > 0] if isinstance(values, list) else []


def read_times_alone(
    trials: Sequence[_Trial], found: Mapping[str, Any], why: Message | None
) -> dict[str, list[Message]]:
    """Return the lines about each op of each trial. ``found``: what the driver told."""
    told: dict[str, list[Message]] = {trial.member: [] for trial in trials}
    for trial in trials:
        for one in trial.changed:
            members = found.get("ops", {}).get(one.op, {}) if isinstance(found.get("ops"), dict) else {}
            members = members if isinstance(members, dict) else {}
            ours, base = members.get(trial.member), members.get("base")
            failed = why or _describe_end(ours) or _describe_end(base)
            pairs = (
                [] if failed else list(zip(*(_positive_numbers((side or {}).get("seconds")) for side in (base, ours))))
            )
            if failed or not pairs:
                message = Message(
                    "code_loop.not_measured_alone", "{op} alone: {after} could not be timed: {why}",
                    op=one.op, after=one.after, why=failed or _describe_end(None),
                )  # fmt: skip
            else:
                ratios = sorted(b / a for b, a in pairs)
                before_s, seconds = (statistics.median(side) for side in zip(*pairs))
                message = Message(
                    "code_loop.timed",
                    "{op} alone: {after} is {ratio:.3f}x as fast as {before} today ({low:.3f}x to {high:.3f}x in half of {rounds} rounds; "
                    "{ms:.3f} ms against {before_ms:.3f} ms)",
                    op=one.op, after=one.after, before=one.before, ratio=statistics.median(ratios), low=ratios[len(ratios) // 4],
                    high=ratios[-1 - len(ratios) // 4], rounds=len(ratios), ms=seconds * 1e3, before_ms=before_s * 1e3,
                )  # fmt: skip
            told[trial.member].append(message)
    return told


def read_step_times(
    trials: Sequence[_Trial], found: Mapping[str, Any], why: Message | None
) -> dict[str, list[Message]]:
    """Return the line about the whole steps of each trial. ``found``: what the driver told."""
    told = {}
    groups = (
        [group for group in found.get("groups", ()) if isinstance(group, dict)]
        if isinstance(found.get("groups"), list)
        else []
    )
    for trial in trials:
        group = next((group for group in groups if trial.member in group), {})
        ours, base = group.get(trial.member), group.get("base")
        failed = why or _describe_end(ours) or _describe_end(base)
        pairs = [] if failed else _pair_runs(base, ours)
        if failed or not pairs:
            told[trial.member] = [
                Message("code_loop.step_not_timed", "whole step: not timed: {why}", why=failed or _describe_end(None))
            ]
            continue
        ratios = sorted(b["step_s"] / a["step_s"] for b, a in pairs)
        (before_s, seconds) = (statistics.median(run["step_s"] for run in side) for side in zip(*pairs))
        told[trial.member] = [
            Message(
                "code_loop.step_timed",
                "whole step: {ratio:.3f}x as fast as today ({low:.3f}x to {high:.3f}x in {rounds} rounds of {steps} steps; {ms:.1f} ms against "
                "{before_ms:.1f} ms). {result}",
                ratio=statistics.median(ratios), low=ratios[0], high=ratios[-1], rounds=len(ratios), steps=STEPS, ms=seconds * 1e3,
                before_ms=before_s * 1e3, result=_compare_results(pairs),
            )
        ]  # fmt: skip
    return told


def _pair_runs(base: Any, ours: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the pairs of runs on the same data that have a time."""
    sides = [side.get("runs") if isinstance(side, dict) else None for side in (base, ours)]
    if not all(isinstance(side, list) for side in sides):
        return []
    timed = lambda run: isinstance(run, dict) and _number(run.get("step_s")) > 0
    return [(b, a) for b, a in zip(*sides) if timed(b) and timed(a)]  # type: ignore[arg-type]


def _compare_results(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> Message:
    """Return a sentence about the loss and the gradient norm of the last step, on the same data."""
    worst = 0.0
    for b, a in pairs:
        for key in ("loss", "grad_norm"):
            if a.get(key) == b.get(key):
                continue
            before, after = _number(b.get(key)), _number(a.get(key))
            worst = max(worst, abs(after - before) / before if before and after else math.inf)
    if worst == 0:
        return Message("code_loop.step_same", "Loss and gradient norm of the last step are the same to the bit")
    return Message(
        "code_loop.step_differs",
        "Loss and gradient norm of the last step differ by at most {share:.1e} of today's",
        share=worst,
    )
