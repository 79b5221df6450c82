"""What is drawn and planned before anything runs: a measurement's sessions, each side's recipe, the oracle's jobs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from factory.gates.patch.changed_ops import ChangedOp
from factory.gates.patch.policy import OraclePolicy, PatchPolicy, TrainingPolicy
from factory.gates.patch.stages.oracle import HOSTILE, oracle_jobs
from factory.gates.patch.stages.training import BASELINE, BRIEF_STEPS, CANDIDATE, Plan, recipe_for
from factory.gates.training_start import Start
from tests.support.trainer.segments import recipe_with

POLICY = TrainingPolicy(
    steps=100, pairs=5, long=4, min_gain=1.1
)  # worth a tenth of the steps, rounded: 9 of 100, 36 of 400


@pytest.mark.parametrize("candidate_first", [False, True])
def test_a_measurement_is_two_sessions_a_side_on_the_same_data(candidate_first: bool) -> None:
    drawn = [Plan.draw(POLICY, candidate_first) for _ in range(60)]
    first, second = (CANDIDATE, BASELINE) if candidate_first else (BASELINE, CANDIDATE)
    for plan in drawn:
        assert [name for name, _ in plan.sessions] == [first, second, first, second]
        ours, theirs = ([runs for name, runs in plan.sessions if name == side] for side in (CANDIDATE, BASELINE))
        assert [[*runs[1:]] for runs in ours] == [[*runs[1:]] for runs in theirs] and [len(runs) for runs in ours] == [
            3,
            4,
        ]
        timed = [run for runs in ours for run in runs[1:]]
        assert {run.steps for run in timed} == {100} and not any(run.early for run in timed)
        assert [number for number, run in enumerate(timed) if run.whole] == list(plan.whole)
        assert [runs[0].steps for runs in ours] == [BRIEF_STEPS] * 2
        fewer, twice = (runs[0] for runs in theirs)
        assert (fewer.steps, twice.steps) == (91, 200) and fewer.seed == timed[plan.whole[0]].seed
        assert (plan.long.steps, plan.long.early) == (400, 364)
        assert (
            plan.long.saving(1000) == {"checkpoint_every": 1364, "keep_checkpoints": 2} and timed[0].saving(1000) == {}
        )
        seeds = [*(run.seed for run in timed), twice.seed, plan.long.seed, *(runs[0].seed for runs in ours)]
        assert len(set(seeds)) == len(seeds)
    assert {plan.whole[0] for plan in drawn} == {0, 1} and {plan.whole[1] for plan in drawn} == {2, 3, 4}


@pytest.mark.parametrize(
    ("steps", "min_gain", "worth"), [(100, 1.1, 9), (10, 1.02, 1), (3, 1.02, 1), (10, 1.25, 2), (80, 1.02, 2)]
)
def test_a_gain_is_worth_some_steps_and_one_at_least(steps: int, min_gain: float, worth: int) -> None:
    policy = TrainingPolicy(steps=steps, min_gain=min_gain)
    assert policy.worth(steps) == policy.left_out == worth


TRUNK, CHANGED = {"compile": False, "micro": 2}, {"compile": True, "micro": 4}


@pytest.mark.parametrize(
    ("paths", "code", "sequences", "compiled", "batch"),
    [
        (["trainer/run.py"], CHANGED, 0, False, (8, 2)),  # as the trunk has it, whatever was merged since
        (["policies/recipes/demo.yaml"], CHANGED, 0, False, (8, 2)),
        (["policies/recipes/tiny.yaml"], CHANGED, 0, True, (8, 4)),
        (["policies/recipes/tiny.yaml"], CHANGED | {"micro": None}, 0, True, (8, None)),
        (["trainer/run.py"], CHANGED, 6, False, (6, None)),
        (["policies/recipes/tiny.yaml"], CHANGED | {"micro": 3}, 6, True, (6, 3)),
        (["policies/recipes/tiny.yaml"], CHANGED, 6, True, (6, None)),  # rows that do not divide by it
    ],
)
def test_each_side_trains_with_what_its_code_says_of_how_a_step_is_computed(
    tmp_path: Path,
    paths: list[str],
    code: dict[str, Any],
    sequences: int,
    compiled: bool,
    batch: tuple[int, int | None],
) -> None:
    made = lambda how, rows=8: recipe_with(
        compile=how["compile"], batch__micro_sequences=how["micro"], batch__sequences=rows
    ).model_dump()
    (tmp_path / "policies" / "recipes").mkdir(parents=True)
    (tmp_path / "policies" / "recipes" / "tiny.yaml").write_text(yaml.safe_dump(made(code, 12)))
    trunk = made(TRUNK)
    assert trunk["stability"]["noise_scale_every"]
    case: Any = SimpleNamespace(
        policy=PatchPolicy(training=TrainingPolicy(sequences=sequences)),
        workspace=SimpleNamespace(config=SimpleNamespace(recipe="tiny")), paths=paths,
    )  # fmt: skip
    found = recipe_for(case, Start(tmp_path, 6, trunk, {}), tmp_path)
    assert found["compile"] == compiled and (found["batch"]["sequences"], found["batch"]["micro_sequences"]) == batch
    assert found["stability"] == trunk["stability"] | {"noise_scale_every": 0}
    assert all(found[key] == trunk[key] for key in trunk if key not in ("compile", "batch", "stability"))


@pytest.mark.parametrize(("precision", "dtypes"), [("fp32", ["fp32"]), ("bf16", ["bf16", "fp32"])])
def test_all_values_and_fp32_are_tried_on_the_first_case(precision: str, dtypes: list[str]) -> None:
    ops = [ChangedOp("swiglu", "reference", "fast"), ChangedOp("adamw", "reference", "reference")]
    jobs = oracle_jobs(OraclePolicy(cases=["small", "prime", "empty"]), ops, precision)
    assert len({job["seed"] for job in jobs}) == len(jobs)
    for op in ops:
        asked = [
            (job["case"], job["values"], job["dtype"])
            for job in jobs
            if (job["op"], job["implementation"]) == (op.op, op.after)
        ]
        assert asked == [
            *(("small", values, dtype) for values in HOSTILE for dtype in dtypes),
            ("prime", "normal", precision), ("empty", "normal", precision), ("small", "normal", "fp64"),
        ]  # fmt: skip
    assert all((job["dtype"] == "fp64") == job.get("optional", False) for job in jobs)
