"""Part of the oracle stage: does the patch change what ops are tested with?

An op's file holds more than implementations: the reference, which is the truth once the patch is merged, the inputs of the tests, and which
inputs get gradients. A patch that damages those passes today's tests and makes those of the next patch worthless.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from factory.core import devices
from factory.gates.case import StageEvidence, failed
from factory.gates.patch.op_answers import Answers, driver, errors_of, executed_in, identical, named, recording
from factory.gates.patience import Patience, out_of_time, patiently, stopped
from factory.runs.untrusted_files import UntrustedFileError, read_bytes, read_tensors
from factory.sandbox import sandbox

TRUTH_ROUNDING = 1e-9  # of the largest: sums in fp64 in another order, far below fp32's resolution


def changed(answers: Answers, patience: Patience, candidate: Path, work: Path) -> StageEvidence:
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
                    for problem in _differences(answers.truth.parent, inputs, truth, number, again)
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


def _differences(given: Path, inputs: int, truth: int, number: int, again: int) -> list[str]:
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
