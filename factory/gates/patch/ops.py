"""Two stages of the patch gate: is every changed op right, and is it faster alone?

Right: approved code makes inputs (three kinds of shape, hostile values) and the fp64 truth in one sandboxed process; the
candidate answers in another, which sees inputs only; the comparison is made here. Rule, as in ``kernels.contract.oracle``: the error
of every output and gradient is at most twice that of the eager reference at the same dtype. The stage after this one
(``patch_exploits``) has its calls made by the same two processes.
Faster alone is asked only where both implementations are approved code, as a process cannot be trusted to time itself.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from agents.core.untrusted import one_line
from factory.core import devices
from factory.gates.patch.policy import IsolatedPolicy, OraclePolicy
from factory.gates.patience import baseline_stopped, patiently, stopped
from factory.gates.untrusted_tensors import UntrustedFileError, read_tensors
from factory.sandbox import sandbox
from factory.sandbox.sandbox import Limits
from kernels.contract.choice import resolve, section_of

NO_OP = {"state": "not needed", "reasons": ["no op is changed"]}
DRIVER = Path(__file__).with_name("driver.py")
HOSTILE = ("normal", "large", "tiny", "zero", "constant", "outlier")
# Errors of this size always pass, as eager's own may be zero by luck: one unit in the last place of the dtype, and
# sixteen of fp32, whose sums differ by their order alone. kernels.contract.oracle's rule; written down again because no patch may reach it.
FP32_ROUNDINGS = 16
UNLIKE = 1.02  # an op that seems to be by more than this ratio quicker or slower than itself
Tensors = dict[str, torch.Tensor]
FACTOR = 2.0  # kernels.contract.oracle.FACTOR; written down again because no patch may reach it


@dataclass(frozen=True)
class ChangedOp:
    """An op whose computation the patch changes: what the baseline runs and what the candidate runs."""

    op: str
    before: str
    after: str


def changed_sections(before: bytes | None, after: bytes | None) -> list[str]:
    """The keys of kernels.yaml, a device each and ``fallback``, that have another value."""
    old, new = (found if isinstance(found := yaml.safe_load(text or b"{}"), dict) else {} for text in (before, after))
    return sorted(str(key) for key in old.keys() | new.keys() if old.get(key) != new.get(key))


def changed_ops(
    before: bytes | None, after: bytes | None, paths: Sequence[str], device: str, tuned: Mapping[str, str]
) -> list[ChangedOp]:
    """From kernels.yaml before and after; ``tuned``: what ``auto`` stands for. A patch to ``kernels/*.py`` may change any op: all
    that are chosen count."""
    old, new = (resolve(section_of(text, device), tuned) for text in (before, after))
    everything = any(path.startswith("kernels/") for path in paths)
    names = sorted(set(old) | set(new))
    pairs = [ChangedOp(name, old.get(name, "reference"), new.get(name, "reference")) for name in names]
    return [pair for pair in pairs if everything or pair.before != pair.after]


def oracle(
    policy: OraclePolicy, ops: Sequence[ChangedOp], precision: str, baseline: Path, candidate: Path, work: Path
) -> dict[str, Any]:
    """The stage's evidence. Raises: IsolationError."""
    if not ops:
        return NO_OP
    jobs = oracle_jobs(policy, ops, precision)
    with answered(jobs, policy, baseline, candidate, work) as answers:
        return answers.stage(range(len(jobs)), "checks against fp64, forward and gradients", last=True)


@dataclass(frozen=True)
class Answers:
    """What approved code holds for true, and what the candidate's process left."""

    jobs: Sequence[dict[str, Any]]
    truth: Path
    folder: int  # descriptor of the folder that the candidate wrote in, taken before it ran
    seconds: float  # both processes
    baseline_seconds: float
    missing: str = ""  # why there is nothing to compare with; else ""
    died: str = ""  # how the candidate's process ended before its time; else ""
    log: str = ""
    out_of_time: bool = False  # a time limit ended it, which says nothing about its code

    def stage(self, numbers: Sequence[int], what: str, *, last: bool) -> dict[str, Any]:
        """Evidence from these jobs. ``last``: the process had nothing to do after them, so that its end counts as well."""
        if self.missing:
            return {"state": "missing", "reasons": [self.missing]}
        reasons, worst, broken = [], 0.0, last and bool(self.died)
        for number in numbers:
            try:
                wrong, share = compare(self.truth, self.folder, number)
            except UntrustedFileError as error:
                if self.died:
                    broken = True
                    break
                wrong, share = [f"no answer: {error}"], math.inf
            worst = max(worst, share)
            reasons += [f"{named(self.jobs[number])}: {problem}" for problem in wrong]
        found: dict[str, Any] = {"checks": len(numbers), "worst_share_of_allowed_error": worst, "seconds": self.seconds}
        if broken:
            found["log"] = self.log
        if broken and self.out_of_time and not reasons:
            return {"state": "missing", "reasons": [self.died], **found}
        if broken:
            ops = dict.fromkeys(job["op"] for job in self.jobs)
            reasons.append(f"the changed ops {', '.join(ops)} could not be run: {self.died}")
        if reasons:
            return {"state": "failed", "reasons": reasons[:5], "failures": len(reasons), **found}
        return {"state": "passed", "reasons": [f"{len(numbers)} {what}"], **found}


@contextlib.contextmanager
def answered(
    jobs: Sequence[dict[str, Any]], policy: OraclePolicy, baseline: Path, candidate: Path, work: Path
) -> Iterator[Answers]:
    """The jobs as the driver made them with the baseline's code and answered them with the candidate's. Raises: IsolationError."""
    work.mkdir(parents=True, exist_ok=True)
    request = work / "request.json"
    request.write_text(json.dumps({"device": devices.kind(), "jobs": jobs}))
    given = work / "given"
    with contextlib.ExitStack() as opened:
        made = driver(["make", request, given], [baseline, request], given, baseline, policy.wall_seconds)
        if not made.ok:
            why = f"the test inputs could not be made: {made.why()}"
            if made.timed_out:
                why = baseline_stopped("making the test inputs", policy.wall_seconds, "oracle.wall_seconds")
            yield Answers(jobs, given / "truth", -1, made.seconds, made.seconds, missing=why)
            return
        limits = policy.patience.limits(made.seconds)

        def attempt(number: int, limit: float) -> tuple[sandbox.Result, int]:
            answers = work / f"answers-{number}"  # nothing of an attempt that was stopped is there for the next
            answers.mkdir()
            folder = os.open(answers, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            opened.callback(os.close, folder)
            visible = [candidate, request, given / "inputs"]  # the truth lies beside it, out of sight
            return driver(["answer", request, given / "inputs", answers], visible, answers, candidate, limit), folder

        run, folder = patiently(limits, attempt, lambda ended: ended[0].timed_out)
        died, log = ("", "") if run.ok else (run.why(), run.stderr[-2000:])
        if run.timed_out:
            died = stopped("the candidate's checks", limits, made.seconds, "oracle.patience")
        yield Answers(
            jobs, given / "truth", folder, made.seconds + run.seconds, made.seconds, "", died, log, run.timed_out
        )


def driver(
    words: Sequence[str | Path], readonly: Sequence[Path], output: Path, code: Path, wall_seconds: float
) -> sandbox.Result:
    return sandbox.run(
        [sys.executable, str(DRIVER), *map(str, words)],
        output=output,
        readonly=[*readonly, DRIVER],
        cwd=code,
        limits=Limits(wall_seconds=wall_seconds),
        environment={"OMP_NUM_THREADS": "1"},  # small shapes: a second thread only waits
    )


def isolated(
    policy: IsolatedPolicy,
    ops: Sequence[ChangedOp],
    recipe: dict[str, Any],
    baseline: Path,
    candidate_code_is_approved: bool,
    work: Path,
) -> dict[str, Any]:
    """The stage's evidence, by ``kernels.contract.bench`` of the baseline's code. Raises: IsolationError."""
    switched = [op for op in ops if op.before != op.after]
    if not switched:
        return {"state": "not needed", "reasons": ["no op's choice is changed"]}
    if not candidate_code_is_approved:
        return {"state": "not needed", "reasons": ["new code is not asked for its own speed: the whole step decides"]}
    work.mkdir(parents=True, exist_ok=True)
    recipe_path = work / "recipe.yaml"
    recipe_path.write_text(yaml.safe_dump(recipe))
    found: dict[str, Any] = {}
    for op in switched:
        command = [sys.executable, "-m", "kernels.contract.bench", "--op", op.op, "--against", op.before]
        command += ["--recipe", str(recipe_path), "--pairs", str(policy.pairs), "--device", devices.kind()]
        command += ["--implementation"]
        limits = Limits(wall_seconds=policy.wall_seconds)
        for _ in range(policy.tries):
            answers = []
            for implementation in (op.after, op.before):  # A/B, then A/A
                run = sandbox.run(
                    [*command, implementation], output=work, readonly=[baseline], cwd=baseline, limits=limits
                )
                try:
                    answers.append(json.loads(run.stdout))
                except ValueError:
                    why = f"{op.op} could not be timed alone: {run.why()}"
                    if run.timed_out:
                        why = baseline_stopped(f"timing {op.op} alone", policy.wall_seconds, "isolated.wall_seconds")
                    return {"state": "missing", "reasons": [why]}
            changed, control = answers
            if untrusted := _unlike_itself(control):
                continue
            break
        found[op.op] = {
            "ratio": changed["ratio"],
            "low": changed["ratio_low"],
            "high": changed["ratio_high"],
            "a_a": control["ratio"],
        }
        if untrusted:
            reason = (
                f"no time can be trusted here: {policy.tries} times in a row, {op.op} was found {untrusted} than itself, "
                f"at last {control['ratio']:.2f}×: close other programs and have it judged again at a quieter hour"
            )
            return {"state": "missing", "reasons": [reason], "ops": found}
        if changed["ratio_high"] < policy.min_ratio:  # what noise alone may make of it goes on: the whole step decides
            reason = (
                f"{op.op}: {op.after} is {changed['ratio']:.2f}× as fast as {op.before} alone (three pairs of four below "
                f"{changed['ratio_high']:.2f}×; at least {policy.min_ratio:.2f}× is needed)"
            )
            return {"state": "failed", "reasons": [reason], "ops": found}
    reasons = [f"{name}: {n['ratio']:.2f}× alone (A/A {n['a_a']:.2f})" for name, n in found.items()]
    return {"state": "passed", "reasons": reasons, "ops": found}


def _unlike_itself(control: Mapping[str, float]) -> str:
    """What an implementation seems to be beside itself, where its clock cannot be trusted; else nothing."""
    if control["ratio_low"] > UNLIKE:
        return "faster"
    return "slower" if control["ratio_high"] < 1 / UNLIKE else ""


def oracle_jobs(policy: OraclePolicy, ops: Sequence[ChangedOp], precision: str) -> list[dict[str, Any]]:
    """Seeds are drawn anew every time, so that no answer can be prepared."""
    jobs = []
    for op in ops:
        for case in policy.cases:
            first = case == policy.cases[0]  # everything is tried on it; the other shapes at the recipe's own precision
            for values in HOSTILE if first else HOSTILE[:1]:
                for dtype in sorted({"fp32", precision}) if first else (precision,):
                    job = {"op": op.op, "implementation": op.after, "case": case, "dtype": dtype, "values": values}
                    jobs.append(job | {"seed": secrets.randbelow(1 << 31)})
    return jobs


def named(job: dict[str, Any]) -> str:
    about = job["about"] if "about" in job else f"{job['case']}, {job['dtype']}, {job['values']} values"
    return f"{job['op']} ({job['implementation']}; {about})"


def compare(truth_folder: Path, answers: int, number: int) -> tuple[list[str], float]:
    """What is wrong with one answer, and its largest error as a share of the error it may have. Raises: UntrustedFileError."""
    paths = [truth_folder / f"{kind}-{number}.safetensors" for kind in ("exact", "eager")]
    exact, eager = map(load_file, paths)
    found = read_tensors(answers, (f"answer-{number}.safetensors",), 2 * paths[0].stat().st_size + (1 << 20))
    if "raised" in found:
        return [f"it raised {_text(found['raised'])}"], math.inf
    problems = []
    changed = found.pop("inputs changed", torch.zeros(1))
    if changed.numel():
        problems.append("it changes its inputs")
    launches = found.pop("launches", torch.ones(1, dtype=torch.int64))
    if launches.dtype != torch.int64 or not bool((launches > 0).all()):
        problems.append("it is said to be a Triton kernel, and launches none")
    for name, later in ((name, found.pop(f"later {name}")) for name in exact if f"later {name}" in found):
        if name in found and found[name].dtype == eager[name].dtype and not identical(found[name], later):
            problems.append(f"{name} was another when it was read again after later calls")
    wrong, worst = errors_of(found, exact, eager)
    return problems + wrong, worst


def errors_of(found: Tensors, exact: Tensors, eager: Tensors) -> tuple[list[str], float]:
    """By how much results are further from the truth than eager's, and the largest error as a share of what it may be."""
    problems: list[str] = []
    worst = 0.0
    for name, truth in exact.items():
        mine, theirs = found.get(name), eager[name]
        if mine is None or mine.shape != truth.shape or mine.dtype != theirs.dtype:
            problems.append(f"{name} has another shape or dtype")
            continue
        where = theirs.isfinite() & truth.isfinite()
        if not bool(mine[where].isfinite().all()):
            problems.append(f"{name} is not finite where the reference is")
            continue
        if not bool(where.any()):
            continue
        floor = max(torch.finfo(theirs.dtype).eps, FP32_ROUNDINGS * torch.finfo(torch.float32).eps)
        wanted = truth[where]
        errors, eager_errors = (x[where].double() - wanted for x in (mine, theirs))
        for measure, size in ((_rms, _rms(wanted) or 1.0), (_largest, _largest(wanted) or 1.0)):
            off, allowed = measure(errors) / size, max(FACTOR * measure(eager_errors) / size, floor)
            worst = max(worst, off / allowed)
            if not off <= allowed:
                problems.append(
                    f"{name} is off by {off:.2g} ({measure.__name__.strip('_')}), at most {allowed:.2g} is allowed"
                )
                break
    return problems, worst


def _text(letters: torch.Tensor) -> str:
    """One line of what a candidate said, which nobody vouches for."""
    numbers = letters.flatten()[:2000].to(torch.uint8).tolist()
    return one_line(bytes(numbers).decode("utf-8", "replace"), 400)


def identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Element by element; NaN is like NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().max())
