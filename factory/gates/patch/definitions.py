"""Part of the patch gate's oracle: does the patch leave alone what ops are tested with?

An op's file holds more than implementations: the reference, which is the truth once the patch is merged, the inputs that tests are made
with, and which of them get gradients. A patch that spoils those is right by the tests of now, and makes the next one's blind.
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
from factory.gates.patch import ops as patch_ops
from factory.gates.patience import Patience, patiently, stopped
from factory.gates.untrusted_tensors import UntrustedFileError, read_bytes, read_tensors
from factory.sandbox import sandbox

TRUTH_ROUNDING = 1e-9  # of the largest: sums in fp64 in another order, far below what fp32 could tell


def redefined(
    jobs: Sequence[dict[str, Any]], answers: patch_ops.Answers, patience: Patience, candidate: Path, work: Path
) -> dict[str, Any]:
    """Evidence of what the patch changes of the ops' own tests, by which it and every later patch is judged; empty when nothing.

    The candidate's code makes inputs and truth of some of the ``jobs`` too, by the same seeds: inputs must be the same to the bit, the truth
    but for fp64's rounding, and the eager results as right as they were. Which ones is drawn, of every op, kind of values and size (the
    recipe's own among them). Raises: IsolationError.
    """
    numbers = _drawn(jobs)
    request = work / "request-again.json"
    request.write_text(json.dumps({"device": devices.kind(), "jobs": [jobs[number] for number in numbers]}))
    limits = patience.limits(answers.baseline_seconds)  # for all jobs, of which these are a part
    with contextlib.ExitStack() as opened:

        def attempt(number: int, limit: float) -> tuple[sandbox.Result, list[int]]:
            folder = work / f"again-{number}"
            parts = [folder / part for part in ("inputs", "truth")]
            for part in parts:
                part.mkdir(parents=True)
            held = [os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) for part in parts]
            for descriptor in held:
                opened.callback(os.close, descriptor)
            return patch_ops.driver(["make", request, folder], [candidate, request], folder, candidate, limit), held

        run, (inputs, truth) = patiently(limits, attempt, lambda ended: ended[0].timed_out)
        if run.timed_out:
            who = "making the changed ops' tests with the candidate's code"
            reason = stopped(who, limits, answers.baseline_seconds, "oracle.patience")
            return {"state": "missing", "reasons": [reason]}
        try:
            wrong = [] if run.ok else [f"the changed ops' tests could not be made by it: {run.why()}"]
            for again, number in enumerate(numbers if run.ok else ()):
                wrong += [
                    f"{patch_ops.named(jobs[number])}: {problem}, and an op's tests are people's to change"
                    for problem in _otherwise(answers.truth.parent, inputs, truth, number, again)
                ]
        except UntrustedFileError as error:
            wrong = [f"the changed ops' tests could not be made by it: {error}"]
    return {"state": "failed", "reasons": wrong[:5], "failures": len(wrong)} if wrong else {}


def _drawn(jobs: Sequence[dict[str, Any]]) -> list[int]:
    """One test of every op, kind of values and kind of size."""
    kinds: dict[tuple[str, str, object], list[int]] = {}
    for number, job in enumerate(jobs):
        kinds.setdefault((job["op"], job["values"], job.get("storage", job.get("case"))), []).append(number)
    return sorted(secrets.choice(numbers) for numbers in kinds.values())


def _otherwise(given: Path, inputs: int, truth: int, number: int, again: int) -> list[str]:
    """What is another in test ``again`` of the candidate's than in ``number`` of the baseline's. Raises: UntrustedFileError."""
    spare = 1 << 20
    words, tensors, exact = (
        given / "inputs" / f"given-{number}.json",
        given / "inputs" / f"given-{number}.safetensors",
        given / "truth" / f"exact-{number}.safetensors",
    )
    if not words.exists():
        return []  # no op of the baseline's: who answers has to say so
    if read_bytes(inputs, (f"given-{again}.json",), words.stat().st_size + spare) != words.read_bytes():
        return ["it says otherwise which inputs get gradients, are written or spoilt"]
    mine = read_tensors(inputs, (f"given-{again}.safetensors",), tensors.stat().st_size + spare)
    theirs = load_file(tensors)
    if mine.keys() != theirs.keys() or not all(patch_ops.identical(mine[name], x) for name, x in theirs.items()):
        return ["its inputs are others"]
    mine = read_tensors(truth, (f"exact-{again}.safetensors",), exact.stat().st_size + spare)
    theirs = load_file(exact)
    if mine.keys() != theirs.keys() or not all(_same_truth(mine[name], x) for name, x in theirs.items()):
        return ["its reference computes something else"]
    path = given / "truth" / f"eager-{number}.safetensors"
    mine = read_tensors(truth, (f"eager-{again}.safetensors",), path.stat().st_size + spare)
    wrong, _ = patch_ops.errors_of(mine, theirs, load_file(path))
    return [f"its reference is less exact: {problem}" for problem in wrong]


def _same_truth(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    where = theirs.isfinite()
    if not bool(where.any()):
        return True
    off = (mine[where] - theirs[where]).abs().max()
    return bool(off <= TRUTH_ROUNDING * theirs[where].abs().max())
