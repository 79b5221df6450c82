"""Ask two processes about ops, and compare: approved code knows the truth, the candidate's code answers without seeing it.

Approved code makes inputs (several shapes, hostile values) and the fp64 truth in one sandboxed process; the candidate answers in another,
which sees the inputs only; the comparison is made here. The rule is ``kernels.contract.oracle``'s: the error of every output and gradient is
at most ``FACTOR`` times that of the eager reference at the same dtype.

An op's file holds more than implementations: the reference, which is the truth once the patch is merged, the inputs of the tests, and which
inputs get gradients. A patch that damages those passes today's tests and makes those of the next patch worthless (``changed_tests``).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from agents.core.untrusted import one_line
from factory.core import devices
from factory.gates.case import StageEvidence, failed, missing, passed
from factory.gates.patch.executed import EXECUTED, Executed
from factory.gates.patch.policy import OraclePolicy
from factory.gates.patience import Patience, baseline_stopped, out_of_time, patiently, stopped
from factory.runs.untrusted_files import UntrustedFileError, read_bytes, read_tensors
from factory.sandbox import sandbox
from factory.sandbox.sandbox import Limits

DRIVER = Path(__file__).with_name("driver.py")
NOTES_BYTES = 1 << 26
# kernels.contract.oracle's rule, written a second time because what it imports can be patched. Errors of this size always pass, as eager's
# own may be zero by chance: one unit in the last place of the dtype, and sixteen of fp32, whose sums depend on their order.
FP32_ROUNDINGS = 16
FACTOR = 2.0
RAISED = "it raised "
TRUTH_ROUNDING = 1e-9  # of the largest: sums in fp64 in another order, far below fp32's resolution
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Answers:
    """The truth from approved code, and what the candidate's process left. Job n's files have the number n."""

    jobs: Sequence[dict[str, Any]]
    truth: Path
    folder: int  # descriptor of the folder that the candidate wrote in, opened before it ran
    seconds: float  # both processes
    baseline_seconds: float
    missing: str = ""  # why there is no truth to compare with; '': there is
    died: str = ""  # why the candidate's process ended early; '': it did not
    log: str = ""
    out_of_time: bool = False  # a time limit ended it, which says nothing about its code
    instructions: Sequence[str] = ()  # files of the candidate whose execution is recorded
    executed: Executed = field(default_factory=Executed)  # of those

    def evidence(self, numbers: Sequence[int], what: str, *, last: bool) -> StageEvidence:
        """From these jobs. ``last``: they are its last jobs, so a crash of the process counts against them."""
        if self.missing:
            return out_of_time(self.missing) if self.out_of_time else missing(self.missing)
        reasons, worst, broken = [], 0.0, last and bool(self.died)
        for number in numbers:
            try:
                wrong, share = compare(self.truth, self.folder, number)
            except UntrustedFileError as error:
                if self.died:
                    broken = True
                    break
                wrong, share = [f"no answer: {error}"], math.inf
            if wrong and wrong[0].startswith(RAISED) and self.jobs[number].get("optional"):
                continue
            worst = max(worst, share)
            reasons += [f"{named(self.jobs[number])}: {problem}" for problem in wrong]
        found: dict[str, Any] = {"checks": len(numbers), "worst_share_of_allowed_error": worst, "seconds": self.seconds}
        if broken:
            found["log"] = self.log
            if self.out_of_time and not reasons:
                return out_of_time(self.died, **found)
            ops = dict.fromkeys(job["op"] for job in self.jobs)
            reasons.append(f"the changed ops {', '.join(ops)} could not be run: {self.died}")
        if reasons:
            return failed(*reasons[:5], failures=len(reasons), **found)
        return passed(f"{len(numbers)} {what}", **found)


@contextlib.contextmanager
def answered(
    jobs: Sequence[dict[str, Any]],
    policy: OraclePolicy,
    baseline: Path,
    candidate: Path,
    work: Path,
    instructions: Sequence[str] = (),
) -> Iterator[Answers]:
    """Have the driver make the jobs with the baseline's code and answer them with the candidate's. Raises: IsolationError.

    instructions: files of the candidate whose execution is recorded.
    """
    work.mkdir(parents=True, exist_ok=True)
    request, question = work / "request.json", work / "question.json"
    asked = {"device": devices.kind(), "jobs": jobs}
    request.write_text(json.dumps(asked))
    question.write_text(json.dumps(asked | recording(instructions)))
    given = work / "given"
    with contextlib.ExitStack() as opened:
        made = driver(["make", request, given], [baseline, request], given, baseline, policy.wall_seconds)
        if not made.ok:
            why = f"the test inputs could not be made: {made.why()}"
            if made.timed_out:
                why = baseline_stopped("making the test inputs", policy.wall_seconds, "oracle.wall_seconds")
            yield Answers(
                jobs, given / "truth", -1, made.seconds, made.seconds, missing=why, out_of_time=made.timed_out
            )
            return
        limits = policy.patience.limits(made.seconds)

        def attempt(number: int, limit: float) -> tuple[sandbox.Result, int]:
            answers = work / f"answers-{number}"  # a stopped attempt leaves nothing to the next
            answers.mkdir()
            folder = os.open(answers, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            opened.callback(os.close, folder)
            visible = [candidate, question, given / "inputs"]  # but not given / "truth"
            return driver(["answer", question, given / "inputs", answers], visible, answers, candidate, limit), folder

        run, folder = patiently(limits, attempt, lambda ended: ended[0].timed_out)
        died, log = ("", "") if run.ok else (run.why(), run.stderr[-2000:])
        if run.timed_out:
            died = stopped("the candidate's checks", limits, made.seconds, "oracle.patience")
        seconds = made.seconds + run.seconds
        executed = executed_in(folder)
        yield Answers(
            jobs, given / "truth", folder, seconds, made.seconds, "", died, log, run.timed_out, instructions, executed
        )


def recording(instructions: Sequence[str]) -> dict[str, Any]:
    """What a request says of the files whose execution the driver records."""
    return {"recorder": str(EXECUTED), "instructions": list(instructions)}


def executed_in(folder: int) -> Executed:
    """What the driver recorded; nothing where that cannot be read, which holds a patch back."""
    found = Executed()
    with contextlib.suppress(UntrustedFileError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        found.add(json.loads(read_bytes(folder, ("executed.json",), NOTES_BYTES)))
    return found


def driver(
    words: Sequence[str | Path], readonly: Sequence[Path], output: Path, code: Path, wall_seconds: float
) -> sandbox.Result:
    return sandbox.run(
        [sys.executable, str(DRIVER), *map(str, words)],
        output=output,
        readonly=[*readonly, DRIVER, EXECUTED],
        cwd=code,
        limits=Limits(wall_seconds=wall_seconds),
        environment={"OMP_NUM_THREADS": "1"},  # small shapes: a second thread only waits
    )


def named(job: dict[str, Any]) -> str:
    about = job["about"] if "about" in job else f"{job['case']}, {job['dtype']}, {job['values']} values"
    return f"{job['op']} ({job['implementation']}; {about})"


def compare(truth_folder: Path, answers: int, number: int) -> tuple[list[str], float]:
    """What is wrong with one answer, and its largest error as a share of the allowed one. Raises: UntrustedFileError."""
    paths = [truth_folder / f"{kind}-{number}.safetensors" for kind in ("exact", "eager")]
    exact, eager = map(load_file, paths)
    found = read_tensors(answers, (f"answer-{number}.safetensors",), 2 * paths[0].stat().st_size + (1 << 20))
    if "raised" in found:
        return [f"{RAISED}{_text(found['raised'])}"], math.inf
    problems = []
    changed = found.pop("inputs changed", None)
    if changed is None or changed.numel():
        problems.append("it changes its inputs")
    launches = found.pop("launches", None)
    if launches is not None and (launches.dtype != torch.int64 or not bool((launches > 0).all())):
        problems.append("it is declared as a Triton kernel and launches none")
    for name, later in ((name, found.pop(f"later {name}")) for name in exact if f"later {name}" in found):
        if name in found and found[name].dtype == eager[name].dtype and not identical(found[name], later):
            problems.append(f"{name} changed after the call returned")
    wrong, worst = errors_of(found, exact, eager)
    return problems + wrong, worst


def errors_of(found: Tensors, exact: Tensors, eager: Tensors) -> tuple[list[str], float]:
    """Which results are too far from the truth, and the largest error as a share of the allowed one."""
    problems: list[str] = []
    worst = 0.0
    for name, truth in exact.items():
        mine, theirs = found.get(name), eager[name]
        if mine is None or mine.shape != truth.shape or mine.dtype != theirs.dtype:
            problems.append(f"{name} has a different shape or dtype")
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
    """One line of a candidate's own words, not to be trusted."""
    numbers = letters.flatten()[:2000].to(torch.uint8).tolist()
    return one_line(bytes(numbers).decode("utf-8", "replace"), 400)


def identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Element by element; NaN equals NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().max())


# -- does the patch change what ops are tested with? -------------------------------------------------------------------
def changed_tests(answers: Answers, patience: Patience, candidate: Path, work: Path) -> StageEvidence:
    """Evidence that the patch changes the ops' own tests; empty when it does not.

    The candidate's code makes inputs and truth of some of ``answers.jobs`` too, from the same seeds: the inputs must be equal to the bit, the
    truth up to rounding in fp64, and the eager results no less accurate. The jobs are drawn: one of every op, kind of values, size (the
    recipe's among them) and type. Raises: IsolationError.
    """
    jobs = answers.jobs
    numbers = _drawn(jobs)
    request = work / "request-again.json"
    asked = {"device": devices.kind(), "jobs": [jobs[number] for number in numbers]}
    request.write_text(json.dumps(asked | recording(answers.instructions)))
    limits = patience.limits(answers.baseline_seconds)  # what all jobs took; these are some of them
    with contextlib.ExitStack() as opened:

        def attempt(number: int, limit: float) -> tuple[sandbox.Result, list[int]]:
            folder = work / f"again-{number}"
            parts = [folder / part for part in ("inputs", "truth")]
            for part in parts:
                part.mkdir(parents=True)
            held = [os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) for part in parts]
            for descriptor in held:
                opened.callback(os.close, descriptor)
            return driver(["make", request, folder], [candidate, request], folder, candidate, limit), held

        run, (inputs, truth) = patiently(limits, attempt, lambda ended: ended[0].timed_out)
        if run.timed_out:
            who = "making the changed ops' tests with the candidate's code"
            reason = stopped(who, limits, answers.baseline_seconds, "oracle.patience")
            return out_of_time(reason)
        answers.executed.merge(executed_in(truth))
        try:
            wrong = [] if run.ok else [f"the candidate's code could not make the changed ops' tests: {run.why()}"]
            for again, number in enumerate(numbers if run.ok else ()):
                wrong += [
                    f"{named(jobs[number])}: {problem}; only people may change an op's tests"
                    for problem in _test_differs(answers.truth.parent, inputs, truth, number, again)
                ]
        except UntrustedFileError as error:
            wrong = [f"the candidate's code could not make the changed ops' tests: {error}"]
    return failed(*wrong[:5], failures=len(wrong)) if wrong else {}


def _drawn(jobs: Sequence[dict[str, Any]]) -> list[int]:
    """One test of every op, kind of values, kind of size and type."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for number, job in enumerate(jobs):
        kind = (job["op"], job["values"], job.get("storage", job.get("case")), job.get("dtype"))
        kinds.setdefault(kind, []).append(number)
    return sorted(secrets.choice(numbers) for numbers in kinds.values())


def _test_differs(given: Path, inputs: int, truth: int, number: int, again: int) -> list[str]:
    """How test ``again`` of the candidate's differs from test ``number`` of the baseline's. Raises: UntrustedFileError."""
    spare = 1 << 20
    words, tensors, exact = (
        given / "inputs" / f"given-{number}.json",
        given / "inputs" / f"given-{number}.safetensors",
        given / "truth" / f"exact-{number}.safetensors",
    )
    if not words.exists():
        return []  # not an op of the baseline's: the answer says so
    if read_bytes(inputs, (f"given-{again}.json",), words.stat().st_size + spare) != words.read_bytes():
        return [
            "the patch changes its cost model, or which inputs get gradients, are written in place or are overwritten"
        ]
    mine = read_tensors(inputs, (f"given-{again}.safetensors",), tensors.stat().st_size + spare)
    theirs = load_file(tensors)
    if mine.keys() != theirs.keys() or not all(identical(mine[name], x) for name, x in theirs.items()):
        return ["the patch changes its inputs"]
    mine = read_tensors(truth, (f"exact-{again}.safetensors",), exact.stat().st_size + spare)
    theirs = load_file(exact)
    if mine.keys() != theirs.keys() or not all(_same_truth(mine[name], x) for name, x in theirs.items()):
        return ["its reference computes something else"]
    path = given / "truth" / f"eager-{number}.safetensors"
    mine = read_tensors(truth, (f"eager-{again}.safetensors",), path.stat().st_size + spare)
    wrong, _ = errors_of(mine, theirs, load_file(path))
    return [f"its reference is less accurate: {problem}" for problem in wrong]


def _same_truth(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    where = theirs.isfinite()
    if not bool(where.any()):
        return True
    off = (mine[where] - theirs[where]).abs().max()
    return bool(off <= TRUTH_ROUNDING * theirs[where].abs().max())
