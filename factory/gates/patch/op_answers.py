"""Compares the candidate's results of ops with the truth. Approved code computes the truth, and the candidate does not see it.

Approved code makes inputs (several shapes, hostile values) and the fp64 truth in one sandboxed process. The candidate answers in another process,
which sees only the inputs. This module compares them by the rule of ``kernels.contract.oracle``: the error of every output and gradient is at most
``FACTOR`` times the error of the eager reference at the same dtype.

An op's file also has the inputs of the tests, the choice of inputs that get gradients, and the reference, which computes the truth once the patch is
merged. A patch that damages these would pass the tests of today and make the tests of later patches worthless, so ``check_tests_unchanged`` refuses
it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from agents.core.untrusted import fold_to_one_line
from factory.core import devices
from factory.core.untrusted_trainer_files import parse_json
from factory.gates.patch.execution_recorder import RECORDER_FILE, WATCH_FILE, ExecutedCode
from factory.gates.patch.policy import OraclePolicy
from factory.gates.stage_interface import (
    StageEvidence,
    make_failed_evidence,
    make_missing_evidence,
    make_passed_evidence,
)
from factory.gates.time_limits import (
    TimeLimits,
    make_baseline_stopped_message,
    make_out_of_time_evidence,
    make_stopped_message,
    run_attempts_with_limits,
)
from factory.runs.untrusted_files import UntrustedFileError, read_bytes, read_tensors
from factory.sandbox import sandbox
from factory.sandbox.sandbox import SandboxLimits
from kernels.contract.message import Message

DRIVER = Path(__file__).with_name("op_driver.py")
NOTES_BYTES = 1 << 26
# The rule of kernels.contract.oracle, written a second time because patches can change the oracle's imports. The reference's own error may be zero by
# chance, so an error of one unit in the last place of the dtype always passes, and of sixteen units of fp32, whose sums depend on their order.
FP32_ROUNDINGS = 16
FACTOR = 2.0
RAISED_CODE = "patch.op_raised"  # the code of the message that an op raised an exception
TRUTH_ROUNDING = (
    1e-9  # as a share of the largest value: the effect of another order of fp64 sums, far below the resolution of fp32
)
Tensors = dict[str, torch.Tensor]
NOTHING_WATCHED: Mapping[str, Sequence[int]] = {}


@dataclass(frozen=True)
class OpAnswers:
    """The files with the truth, from approved code, and the files with the candidate's answers. The files of job n have n in their names."""

    jobs: Sequence[dict[str, Any]]
    truth: Path
    folder: int  # descriptor of the candidate's output folder, opened before the candidate ran
    seconds: float  # of both processes
    baseline_seconds: float
    missing: Message | None = None  # why there is no truth to compare with
    died: Message | None = None  # why the candidate's process ended early
    log: str = ""
    out_of_time: bool = False  # a time limit ended the process, which says nothing about its code
    watched: Mapping[str, Sequence[int]] = field(
        default_factory=dict
    )  # path → lines of the candidate whose execution is recorded
    executed: ExecutedCode = field(default_factory=ExecutedCode)  # of these lines

    def make_evidence(self, job_numbers: Sequence[int], passed_reason: Message, *, last: bool) -> StageEvidence:
        """Return the evidence of the jobs with these numbers. ``passed_reason``: the reason if all answers are right.

        ``last``: these are the last jobs of the process, so an early end of the process counts as their failure.
        """
        if self.missing:
            return make_out_of_time_evidence(self.missing) if self.out_of_time else make_missing_evidence(self.missing)
        reasons: list[Message] = []
        worst, broken = 0.0, last and bool(self.died)
        for number in job_numbers:
            try:
                wrong, share = compare_answer(self.truth, self.folder, number)
            except UntrustedFileError as error:
                if self.died:
                    broken = True
                    break
                wrong, share = (
                    [Message("patch.no_answer", "the results of the op cannot be read: {error}", error=error.message)],
                    math.inf,
                )
            if wrong and wrong[0].code == RAISED_CODE and self.jobs[number].get("optional"):
                continue
            worst = max(worst, share)
            reasons += [_of_job(self.jobs[number], problem) for problem in wrong]
        found: dict[str, Any] = {
            "checks": len(job_numbers),
            "worst_share_of_allowed_error": worst,
            "seconds": self.seconds,
        }
        if broken:
            found["log"] = self.log
            if self.out_of_time and not reasons and self.died:
                return make_out_of_time_evidence(self.died, **found)
            ops = dict.fromkeys(job["op"] for job in self.jobs)
            reasons.append(
                Message(
                    "patch.ops_not_run",
                    "The changed ops ({ops}) could not be run: {problem}",
                    ops=list(ops), problem=self.died,
                )
            )  # fmt: skip
        if reasons:
            return make_failed_evidence(*reasons[:5], failures=len(reasons), **found)
        return make_passed_evidence(passed_reason, **found)


@contextlib.contextmanager
def run_op_jobs(
    jobs: Sequence[dict[str, Any]],
    policy: OraclePolicy,
    baseline: Path,
    candidate: Path,
    work: Path,
    watched: Mapping[str, Sequence[int]] = NOTHING_WATCHED,
) -> Iterator[OpAnswers]:
    """Make the inputs and the truth of jobs with the baseline's code, and answer the jobs with the candidate's code, each in a sandbox.

    watched: path → lines of the candidate whose execution is recorded. Yields the answers. Raises: IsolationError.
    """
    work.mkdir(parents=True, exist_ok=True)
    request, question = work / "request.json", work / "question.json"
    asked = {"device": devices.get_device_kind(), "jobs": jobs}
    request.write_text(json.dumps(asked))
    question.write_text(json.dumps(asked | make_recorder_request(watched)))
    given = work / "given"
    with contextlib.ExitStack() as opened:
        made = run_driver(["make", request, given], [baseline, request], given, baseline, policy.wall_seconds)
        if not made.ok:
            why = Message(
                "patch.no_inputs", "The test inputs could not be made: {problem}", problem=made.describe_ending()
            )
            if made.timed_out:
                why = make_baseline_stopped_message("test inputs", policy.wall_seconds, "oracle.wall_seconds")
            yield OpAnswers(
                jobs, given / "truth", -1, made.seconds, made.seconds, missing=why, out_of_time=made.timed_out
            )
            return
        limits = policy.patience.compute_attempt_limits(made.seconds)

        def attempt(number: int, limit: float) -> tuple[sandbox.SandboxResult, int]:
            answers = work / f"answers-{number}"  # a stopped attempt leaves nothing for the next one
            answers.mkdir()
            folder = os.open(answers, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            opened.callback(os.close, folder)
            visible = [candidate, question, given / "inputs"]  # but not given / "truth"
            return run_driver(
                ["answer", question, given / "inputs", answers], visible, answers, candidate, limit
            ), folder

        run, folder = run_attempts_with_limits(limits, attempt, lambda ended: ended[0].timed_out)
        died, log = None, ""
        if not run.ok:
            died, log = Message.from_json(run.describe_ending()), run.stderr[-2000:]
        if run.timed_out:
            died = make_stopped_message("checks", limits, made.seconds, "oracle.patience")
        seconds = made.seconds + run.seconds
        executed = read_executed_code(folder)
        yield OpAnswers(
            jobs, given / "truth", folder, seconds, made.seconds, None, died, log, run.timed_out, watched, executed
        )


def make_recorder_request(watched: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return the keys of a request that tell the driver which lines' execution to record."""
    return {"recorder": str(RECORDER_FILE), "watched": dict(watched)}


def record_old_code(
    answers: OpAnswers, old: Mapping[str, Sequence[int]], baseline: Path, work: Path, seconds: float
) -> ExecutedCode:
    """Answer the jobs once more with the baseline's code, where it has the implementation, and return the record of the lines ``old``.

    ``seconds``: the time limit. The record of a process that failed is empty, which holds the patch. Raises: IsolationError.
    """
    given, out = answers.truth.parent, work / "answers-of-old-code"
    question = work / "question-to-old-code.json"
    asked = {"device": devices.get_device_kind(), "jobs": list(answers.jobs), "skips_unknown": True}
    question.write_text(json.dumps(asked | make_recorder_request(old)))
    out.mkdir()
    arguments: list[str | Path] = ["answer", question, given / "inputs", out]
    with contextlib.ExitStack() as opened:
        folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        opened.callback(os.close, folder)
        run_driver(arguments, [baseline, question, given / "inputs"], out, baseline, seconds)
        return read_executed_code(folder)


def read_executed_code(folder: int) -> ExecutedCode:
    """Return the driver's record of executed code. An unreadable record counts as empty, which holds the patch."""
    found = ExecutedCode()
    with contextlib.suppress(UntrustedFileError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        found.add_record(parse_json(read_bytes(folder, ("executed.json",), NOTES_BYTES)))
    return found


def run_driver(
    arguments: Sequence[str | Path], readonly: Sequence[Path], output: Path, code: Path, wall_seconds: float
) -> sandbox.SandboxResult:
    return sandbox.run_in_sandbox(
        [sys.executable, str(DRIVER), *map(str, arguments)],
        output=output,
        readonly=[*readonly, DRIVER, RECORDER_FILE, WATCH_FILE],
        cwd=code,
        limits=SandboxLimits(wall_seconds=wall_seconds),
        environment={"OMP_NUM_THREADS": "1"},  # with small shapes a second thread would only wait
    )


def _of_job(job: dict[str, Any], problem: Message) -> Message:
    about = job["about"] if "about" in job else f"{job['case']}, {job['dtype']}, {job['values']} values"
    return Message(
        "patch.op_wrong",
        "{op} ({implementation}; {about}): {problem}",
        op=job["op"], implementation=job["implementation"], about=about, problem=problem,
    )  # fmt: skip


def compare_answer(truth_folder: Path, answers: int, number: int) -> tuple[list[Message], float]:
    """Return the problems of one answer, and its largest error as a share of the allowed error. Raises: UntrustedFileError."""
    paths = [truth_folder / f"{kind}-{number}.safetensors" for kind in ("exact", "eager")]
    exact, eager = map(load_file, paths)
    found = read_tensors(answers, (f"answer-{number}.safetensors",), 2 * paths[0].stat().st_size + (1 << 20))
    if "raised" in found:
        return [Message("patch.op_raised", "the op raised {error}", error=_text(found["raised"]))], math.inf
    problems = []
    changed = found.pop("inputs changed", None)
    if changed is None or changed.numel():
        problems.append(Message("patch.op_changes_inputs", "the op changes its inputs"))
    launches = found.pop("launches", None)
    if launches is not None and (launches.dtype != torch.int64 or not bool((launches > 0).all())):
        problems.append(
            Message("patch.op_no_launch", "the op is declared as a Triton kernel, but launches no Triton kernel")
        )
    for name, later in ((name, found.pop(f"later {name}")) for name in exact if f"later {name}" in found):
        if name in found and found[name].dtype == eager[name].dtype and not are_tensors_identical(found[name], later):
            problems.append(
                Message("patch.op_late", "the result {result} changed after the op had returned it", result=name)
            )
    wrong, worst = find_wrong_results(found, exact, eager)
    return problems + wrong, worst


def find_wrong_results(found: Tensors, exact: Tensors, eager: Tensors) -> tuple[list[Message], float]:
    """Return a message for each wrong result, and the largest error as a share of the allowed error.

    ``found``: the results. ``exact``: the truth in fp64. ``eager``: the reference's results at the dtype of ``found``.
    """
    problems: list[Message] = []
    worst = 0.0
    for name, truth in exact.items():
        mine, theirs = found.get(name), eager[name]
        if mine is None or mine.shape != truth.shape or mine.dtype != theirs.dtype:
            problems.append(
                Message(
                    "patch.op_shape",
                    "{result} is missing, or has another shape or dtype than the reference's",
                    result=name,
                )
            )
            continue
        where = theirs.isfinite() & truth.isfinite()
        if not bool(mine[where].isfinite().all()):
            problems.append(
                Message("patch.op_not_finite", "{result} is not finite where the reference is finite", result=name)
            )
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
                    Message(
                        "patch.op_off",
                        "{result} has a relative error of {off:.2g} ({measure} error), and at most {allowed:.2g} is allowed",
                        result=name, off=off, measure=measure.__name__.strip("_"), allowed=allowed,
                    )
                )  # fmt: skip
                break
    return problems, worst


def _text(letters: torch.Tensor) -> str:
    """Decode untrusted text from the candidate into one line. ``letters``: its UTF-8 bytes."""
    numbers = letters.flatten()[:2000].to(torch.uint8).tolist()
    return fold_to_one_line(bytes(numbers).decode("utf-8", "replace"), 400)


def are_tensors_identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors are equal element by element, where NaN equals NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().max())


# -- changed tests of ops --------------------------------------------------------------------------------------------
def check_tests_unchanged(answers: OpAnswers, patience: TimeLimits, candidate: Path, work: Path) -> StageEvidence:
    """Return failed evidence if the patch changes the ops' own tests, missing evidence if time ran out, else {}.

    The candidate's code makes the inputs and the truth of some of ``answers.jobs`` again, from the same seeds. The inputs must be equal to the bit,
    and the truth up to rounding in fp64. The eager results must not be less accurate. The jobs are drawn at random: one for each combination of op,
    kind of values, size (also the recipe's) and dtype. Raises: IsolationError.
    """
    jobs = answers.jobs
    numbers = _drawn(jobs)
    request = work / "request-again.json"
    asked = {"device": devices.get_device_kind(), "jobs": [jobs[number] for number in numbers]}
    request.write_text(json.dumps(asked | make_recorder_request(answers.watched)))
    limits = patience.compute_attempt_limits(
        answers.baseline_seconds
    )  # the time of all jobs is enough for some of them
    with contextlib.ExitStack() as opened:

        def attempt(number: int, limit: float) -> tuple[sandbox.SandboxResult, list[int]]:
            folder = work / f"again-{number}"
            parts = [folder / part for part in ("inputs", "truth")]
            for part in parts:
                part.mkdir(parents=True)
            held = [os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) for part in parts]
            for descriptor in held:
                opened.callback(os.close, descriptor)
            return run_driver(["make", request, folder], [candidate, request], folder, candidate, limit), held

        run, (inputs, truth) = run_attempts_with_limits(limits, attempt, lambda ended: ended[0].timed_out)
        if run.timed_out:
            return make_out_of_time_evidence(
                make_stopped_message("tests of ops", limits, answers.baseline_seconds, "oracle.patience")
            )
        answers.executed.merge_executed_code(read_executed_code(truth))
        try:
            wrong = [] if run.ok else [_no_tests(run.describe_ending())]
            for again, number in enumerate(numbers if run.ok else ()):
                wrong += [
                    Message(
                        "patch.test_changed",
                        "{problem}. Only people may change the tests of an op",
                        problem=_of_job(jobs[number], problem),
                    )
                    for problem in _test_differs(answers.truth.parent, inputs, truth, number, again)
                ]
        except UntrustedFileError as error:
            wrong = [_no_tests(error.message)]
    return make_failed_evidence(*wrong[:5], failures=len(wrong)) if wrong else {}


def _no_tests(problem: str) -> Message:
    return Message(
        "patch.no_tests", "The candidate's code could not make the tests of the changed ops: {problem}", problem=problem
    )


def _drawn(jobs: Sequence[dict[str, Any]]) -> list[int]:
    """Draw the numbers of jobs at random: one for each combination of op, kind of values, size and dtype."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for number, job in enumerate(jobs):
        kind = (job["op"], job["values"], job.get("storage", job.get("case")), job.get("dtype"))
        kinds.setdefault(kind, []).append(number)
    return sorted(secrets.choice(numbers) for numbers in kinds.values())


def _test_differs(given: Path, inputs: int, truth: int, number: int, again: int) -> list[Message]:
    """Return how the candidate's test ``again`` differs from the baseline's test ``number``. Raises: UntrustedFileError."""
    spare = 1 << 20
    words, tensors, exact = (
        given / "inputs" / f"given-{number}.json",
        given / "inputs" / f"given-{number}.safetensors",
        given / "truth" / f"exact-{number}.safetensors",
    )
    if not words.exists():
        return []  # the baseline does not have this op; the answer reports that
    if read_bytes(inputs, (f"given-{again}.json",), words.stat().st_size + spare) != words.read_bytes():
        return [
            Message(
                "patch.test_model",
                "the patch changes the op's cost model, the list of inputs that get gradients, or the list of inputs that the op may overwrite",
            )
        ]
    mine = read_tensors(inputs, (f"given-{again}.safetensors",), tensors.stat().st_size + spare)
    theirs = load_file(tensors)
    if mine.keys() != theirs.keys() or not all(are_tensors_identical(mine[name], x) for name, x in theirs.items()):
        return [Message("patch.test_inputs", "the patch changes the inputs of the op's tests")]
    mine = read_tensors(truth, (f"exact-{again}.safetensors",), exact.stat().st_size + spare)
    theirs = load_file(exact)
    if mine.keys() != theirs.keys() or not all(_same_truth(mine[name], x) for name, x in theirs.items()):
        return [Message("patch.test_reference", "the patch changes the results of the op's reference")]
    path = given / "truth" / f"eager-{number}.safetensors"
    mine = read_tensors(truth, (f"eager-{again}.safetensors",), path.stat().st_size + spare)
    wrong, _ = find_wrong_results(mine, theirs, load_file(path))
    return [
        Message("patch.test_accuracy", "the patch makes the op's reference less accurate: {problem}", problem=problem)
        for problem in wrong
    ]


def _same_truth(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    where = theirs.isfinite()
    if not bool(where.any()):
        return True
    off = (mine[where] - theirs[where]).abs().max()
    return bool(off <= TRUTH_ROUNDING * theirs[where].abs().max())
