"""A session of the training stage in the sandbox, and the evals stage, which scores the trained weights. Both use a real trunk."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from factory.gates.patch.policy import EvalsPolicy, PatchPolicy
from factory.gates.patch.stages import evals
from factory.gates.patch.timed_session import STILL_SECONDS, SessionEndedError, TimedRun, TimedSession
from factory.gates.stage_interface import NOTHING_HELD_OUT
from factory.gates.training_start import TrainingStart, find_training_start
from factory.ledger.plant import Plant
from factory.runs.arm import Arm
from factory.sandbox import cpu_clock, freezer
from tests.support.factory.code_loop import Made, make
from tests.support.gates.reasons import expect, tells
from trainer.contract.checkpoint import format as checkpoints


def begun() -> tuple[Made, TrainingStart, dict[str, torch.Tensor]]:
    made = make()
    start = find_training_start(made.ledger)
    assert start is not None
    return made, start, checkpoints.read_tensors(start.checkpoint, "model")


def session(folder: Path, wall_seconds: float = 300.0, **broken: Any) -> tuple[TimedSession, TrainingStart]:
    """A warm-up, a run of two steps, and one of four whose weights after three are wanted; ``broken``: of the second's specification."""
    made, start, origin = begun()
    base = {
        "kind": "trunk", "recipe": start.recipe, "data_plan": start.plan, "first_step": start.step, "restart_data": True,
        "initial_checkpoint": str(start.checkpoint), "code_commit": made.base,
    }  # fmt: skip
    kernels, early = start.resolve_kernels(made.target), start.step + 3
    saving = {"checkpoint_every": early, "keep_checkpoints": 2}
    arms = [
        Arm("a run", base | {"last_step": start.step + steps} | more, made.base, recipe, seed=seed, kernels=kernels)
        for seed, (steps, recipe, more) in enumerate([(1, {}, {}), (2, {}, broken), (4, saving, {})], 1)
    ]
    folder.mkdir()
    return TimedSession(folder, made.target, arms, origin, wall_seconds, [1], {2: early}), start


def test_a_session_returns_the_requested_weights_and_checkpoints_of_each_run(tmp_path: Path) -> None:
    found, start = session(tmp_path / "session")
    try:
        warm, first, second = [found.train_next(300.0) for _ in range(3)]
    finally:
        found.close()
    assert not found.failed and warm.weights == {}
    assert first.rest is not None and first.rest.state["step"] == start.step + 2 and first.early == {}
    assert second.rest is None and second.early.keys() == second.weights.keys()
    assert all(not torch.equal(second.early[name], weights) for name, weights in second.weights.items())
    assert first.seconds > 0 and first.cpu is not None
    folders = [run.folder for run in (warm, first, second) if run.folder]
    numbers = [int(folder.name.removesuffix("-trunk")) for folder in folders]
    assert numbers == list(range(numbers[0], numbers[0] + 3)) and all(len(folder.name) == 11 for folder in folders)


def test_two_sessions_take_turns_and_the_paused_one_stands_still(tmp_path: Path) -> None:
    """Same data and code, so the same weights to the bit, however often a session was stopped."""
    (one, _), (other, _) = session(tmp_path / "one"), session(tmp_path / "other")
    runs: dict[int, list[TimedRun]] = {0: [], 1: []}
    try:
        for _ in range(3):
            for number, of in enumerate((one, other)):
                runs[number].append(of.train_next(300.0))
                of.pause()
                clocks = [cpu_clock.read_cpu_seconds(of.init).tree for _ in range(2) if not time.sleep(0.05)]
                assert clocks[0] == clocks[1] > 0
    finally:
        one.close()
        other.close()
    for ours, theirs in zip(*runs.values(), strict=True):
        assert all(torch.equal(theirs.weights[name], weights) for name, weights in ours.weights.items())


def test_a_session_that_ran_while_it_was_paused_is_told(tmp_path: Path) -> None:
    found, _ = session(tmp_path / "session")
    try:
        found.train_next(300.0)
        found.pause()
        thawed = freezer.thaw(found._frozen)  # as if code inside had continued itself
        assert thawed <= STILL_SECONDS
        used = cpu_clock.read_cpu_seconds(found.init).tree
        while cpu_clock.read_cpu_seconds(found.init).tree < used + 2 * STILL_SECONDS:
            time.sleep(0.05)  # it looks for its next run again and again
        with pytest.raises(SessionEndedError) as error:
            found.train_next(300.0)
    finally:
        found.close()
    assert error.value.not_still and error.value.why.code == found.failed.code == "patch.not_still"


def test_a_session_ends_with_the_first_run_that_fails(tmp_path: Path) -> None:
    found, _ = session(tmp_path / "session", first_step=1)  # its checkpoint is of another step
    try:
        found.train_next(300.0)
        with pytest.raises(SessionEndedError) as error:
            found.train_next(300.0)
    finally:
        found.close()
    assert error.value.why.data["run"] == 1 and not error.value.out_of_time and found.failed == error.value.why


@pytest.mark.parametrize(("wall", "allowed"), [(0.05, 300.0), (300.0, 0.05)])
def test_a_session_that_runs_out_of_time_says_so(tmp_path: Path, wall: float, allowed: float) -> None:
    found, _ = session(tmp_path / "session", wall_seconds=wall)
    try:
        with pytest.raises(SessionEndedError) as error:
            found.train_next(allowed)
    finally:
        found.close()
    assert error.value.why.data["run"] == 0 and error.value.out_of_time


def scored(candidate: dict[str, torch.Tensor], baseline: dict[str, torch.Tensor], **policy: int) -> Any:
    made, start, _ = begun()
    case: Any = SimpleNamespace(
        policy=PatchPolicy(evals=EvalsPolicy(**policy)), start=start, plant=Plant(made.workspace, made.ledger),
        handed_on={"training": tuple(TimedRun(1.0, weights) for weights in (candidate, baseline))},
    )  # fmt: skip
    return evals.run(case)


def test_weights_are_scored_by_domain_and_the_worst_is_named() -> None:
    _, _, origin = begun()
    generator = torch.Generator().manual_seed(1)
    worse = {name: x + 0.3 * torch.randn(x.shape, generator=generator) for name, x in origin.items()}
    same, hurt, better = (scored(*sides).evidence for sides in ((origin, origin), (worse, origin), (origin, worse)))
    assert same["state"] == hurt["state"] == better["state"] == "passed"  # whether it is too much is the judge's to say
    assert all(set(values) == {0.0} for values in same["gains"].values())
    for domain, values in hurt["gains"].items():
        assert sum(values) < 0 and better["gains"][domain] == pytest.approx([-value for value in values])
    means = {domain: sum(values) / len(values) for domain, values in hurt["gains"].items()}
    few = scored(worse, origin, documents=1).evidence
    assert tells(few["reasons"], expect("patch.scored", documents=len(means)))
    assert all(len(v) == 1 for v in few["gains"].values())
    short = scored(worse, origin, document_bytes=40).evidence
    assert short["gains"].keys() == hurt["gains"].keys() and short["gains"] != hurt["gains"]
    worst = min(means, key=means.__getitem__)
    assert len(means) > 1 and tells(hurt["reasons"], expect("patch.scored", domain=worst, change=-means[worst]))


def test_without_a_held_out_document_nothing_is_scored(tmp_path: Path) -> None:
    made, start, origin = begun()
    nowhere = replace(made.workspace, root=tmp_path)
    (tmp_path / "policies").mkdir()
    case: Any = SimpleNamespace(policy=PatchPolicy(), start=start, plant=Plant(nowhere, made.ledger), handed_on={})
    assert evals.run(case).evidence == NOTHING_HELD_OUT
