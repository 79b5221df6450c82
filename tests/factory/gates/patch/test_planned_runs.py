"""The plan of a measurement before anything runs: its sessions, the recipe of each side, and the jobs of the oracle."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from factory.gates.patch.changed_ops import ChangedOp
from factory.gates.patch.paired_rounds import Suspicions
from factory.gates.patch.policy import ExploitsPolicy, OraclePolicy, PatchPolicy, TrainingPolicy
from factory.gates.patch.round_plan import BASELINE, CANDIDATE, PlannedRun, RoundPlan
from factory.gates.patch.stages import exploits, training
from factory.gates.patch.stages.oracle import HOSTILE, make_oracle_jobs
from factory.gates.patch.stages.training import make_gate_recipe
from factory.gates.patch.step_timing import BRIEF_RUN_STEPS
from factory.gates.stage_interface import NO_START
from factory.gates.training_start import TrainingStart
from tests.support.trainer.segments import recipe_with

POLICY = TrainingPolicy(
    steps=100, pairs=5, long=4, min_gain=1.1
)  # worth a tenth of the steps, rounded: 9 of 100, 36 of 400


@pytest.mark.parametrize("new_code", [False, True])
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_round_has_pairs_on_the_same_data_and_controls(number: int, new_code: bool) -> None:
    drawn = [RoundPlan.draw(POLICY, number, new_code, faster=True) for _ in range(60)]
    for plan in drawn:
        assert plan.order == ((BASELINE, CANDIDATE) if number % 2 == 0 else (CANDIDATE, BASELINE))
        assert [run.steps for run in plan.timed] == [100] * 5 and not any(run.early for run in plan.timed)
        whole = [run for run in plan.timed if run.whole]
        assert len(whole) == (number < 2)
        controls = {side: [run.steps for run in runs] for side, runs in plan.controls.items()}
        assert controls == {
            BASELINE: [[91], [200], [], []][number], CANDIDATE: [BRIEF_RUN_STEPS] if new_code and number < 2 else []
        }  # fmt: skip
        assert number or plan.controls[BASELINE][0].seed == whole[0].seed, (
            "the run that leaves out steps is compared with it"
        )
        assert (plan.long is not None) == (new_code and number > 0)
        if plan.long:
            assert (plan.long.steps, plan.long.early) == (400, 364)
            assert plan.long.make_early_save_keys(1000) == {"checkpoint_every": 1364, "keep_checkpoints": 2}
        assert plan.timed[0].make_early_save_keys(1000) == {}
        seeds = [run.seed for run in plan.timed] + ([plan.long.seed] if plan.long else [])
        assert len(set(seeds)) == len(seeds)
    places = {next((at for at, run in enumerate(plan.timed) if run.whole), None) for plan in drawn}
    assert places == (set(range(5)) if number < 2 else {None})


@pytest.mark.parametrize("number", [0, 1])
def test_the_sides_take_turns_and_alternate_who_is_first(number: int) -> None:
    plan = RoundPlan.draw(POLICY, number, new_code=True, faster=True)
    first, second = plan.order
    turns = plan.list_turns(interleaved=True)
    assert [side for side, _ in turns[:2]] == [first, second]  # a control each
    pairs = [turns[at : at + 2] for at in range(2, len(turns), 2)]
    for place, ((one, ours), (other, theirs)) in enumerate(pairs):
        assert ours is theirs and (one, other) == ((first, second) if place % 2 == 0 else (second, first))
    assert len(pairs) == 5 + (number > 0)
    alone = plan.list_turns(interleaved=False)
    assert [side for side, _ in alone] == [first] * (len(alone) // 2) + [second] * (len(alone) // 2)
    for side in (BASELINE, CANDIDATE):
        assert (
            [run for of, run in turns if of == side] == [run for of, run in alone if of == side] == plan.list_runs(side)
        )


def test_a_long_run_is_made_only_if_new_code_looks_faster() -> None:
    assert RoundPlan.draw(POLICY, 1, new_code=True, faster=False).long is None
    assert RoundPlan.draw(POLICY, 1, new_code=False, faster=True).long is None
    assert PlannedRun(1, 10) == PlannedRun(1, 10) != PlannedRun(2, 10)


@pytest.mark.parametrize(
    ("steps", "min_gain", "worth"), [(100, 1.1, 9), (10, 1.02, 1), (3, 1.02, 1), (10, 1.25, 2), (80, 1.02, 2)]
)
def test_the_smallest_gain_is_worth_at_least_one_step(steps: int, min_gain: float, worth: int) -> None:
    policy = TrainingPolicy(steps=steps, min_gain=min_gain)
    assert policy.count_steps_to_leave_out_for_min_gain(steps) == policy.left_out_step_count == worth


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
def test_each_side_trains_with_the_step_settings_of_its_own_code(
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
        workspace=SimpleNamespace(config=SimpleNamespace(recipe="tiny")), changed_paths=paths,
    )  # fmt: skip
    found = make_gate_recipe(case, TrainingStart(tmp_path, 6, trunk, {}), tmp_path)
    assert found["compile"] == compiled and (found["batch"]["sequences"], found["batch"]["micro_sequences"]) == batch
    assert found["stability"] == trunk["stability"] | {"noise_scale_every": 0}
    assert all(found[key] == trunk[key] for key in trunk if key not in ("compile", "batch", "stability"))


@pytest.mark.parametrize(("precision", "dtypes"), [("fp32", ["fp32"]), ("bf16", ["bf16", "fp32"])])
def test_all_values_and_fp32_are_tried_on_the_first_case(precision: str, dtypes: list[str]) -> None:
    ops = [ChangedOp("swiglu", "reference", "fast"), ChangedOp("adamw", "reference", "reference")]
    jobs = make_oracle_jobs(OraclePolicy(cases=["small", "prime", "empty"]), ops, precision)
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


@pytest.mark.parametrize(("paths", "new_code"), [(["a.yaml", "trainer/b.py"], True), (["a.yaml", "b.pyx"], False)])
def test_the_stage_adds_some_steps_to_the_policys_for_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: list[str], new_code: bool
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(training, "make_gate_recipe", lambda case, start, code: {"of": code.name, "from": start.step})

    def compare(*given: Any) -> Any:
        asked.append(given)
        return {"state": "passed"}, "pair"

    monkeypatch.setattr(training, "compare_training", compare)
    sides = {"baseline": tmp_path / "base", "candidate": tmp_path / "patch"}
    case: Any = SimpleNamespace(
        **sides, start=TrainingStart(tmp_path, 6, {}, {}), work=tmp_path / "work", applied=SimpleNamespace(base="b", commit="c"), tries=3,
        changed_paths=paths, policy=PatchPolicy(training=TrainingPolicy(steps=11)), plant="plant", subject="subject", handed_on={},
    )  # fmt: skip
    for _ in range(60):
        result = training.run(case)
        assert (result.evidence, result.handed_on) == ({"state": "passed"}, "pair")
    for runs, policy, start, baseline, candidate, suspicions, tries in asked:
        assert (start, suspicions, tries) == (
            case.start,
            Suspicions(new_code),
            3,
        ) and policy.pairs == TrainingPolicy().pairs
        assert (runs.plant, runs.home, runs.purpose, runs.subject) == ("plant", case.work, "patch gate", "subject")
        for side, name, commit in ((baseline, "baseline", "b"), (candidate, "candidate", "c")):
            assert (side.code, side.commit, side.folder) == (sides[name], commit, case.work / name)
            assert side.recipe == {"of": sides[name].name, "from": 6}
    assert {given[1].steps for given in asked} == {11, 12, 13}, "a fixed number would tell a run that it is judged"
    case.start = None
    assert training.run(case).evidence == NO_START


def test_exploit_calls_are_drawn_again_for_each_verdict() -> None:
    policy = ExploitsPolicy(calls=8, recipe_calls=4, long_calls=1)
    ops = [ChangedOp("swiglu", "reference", "fast"), ChangedOp("adamw", "a", "b")]
    recipe = recipe_with(precision="bf16").model_dump()
    shapes = [
        exploits.reduce_recipe_sizes(policy, recipe, exploits.FEWER_ROWS),
        exploits.reduce_recipe_sizes(policy, recipe, exploits.NARROWER, heads=1, kv_heads=1),
    ]
    counts, first = set(), set()
    for seed in range(80):
        jobs = exploits.make_exploit_calls(policy, ops, recipe, random.Random(seed))
        assert list(dict.fromkeys((job["op"], job["implementation"]) for job in jobs)) == [
            (op.op, op.after) for op in ops
        ]
        for op in ops:
            mine = [job for job in jobs if job["op"] == op.op]
            of = {storage: [job for job in mine if job["storage"] == storage] for storage in range(3)}
            counts.add(len(of[0]))
            first.add(mine[0]["storage"])
            assert (len(of[1]), len(of[2]), len(mine)) == (4, 1, len(of[0]) + 5)
            assert [{tuple(job["shape"].items()) for job in of[storage]} for storage in (1, 2)] == [
                {tuple(shape.items())} for shape in shapes
            ]
            assert len({str(job["shape"]) for job in of[0]}) == 1
            for number, job in enumerate(mine, 1):
                assert job["about"].startswith(f"call {number} of {len(mine)}, bf16, batch {job['shape']['batch']}, ")
                assert (job["dtype"], job["values"]) == ("bf16", "normal")
            for calls in of.values():
                assert (
                    len([job for job in calls if job["swap"] is not None]) == len(calls) // 4
                    and calls[0]["swap"] is None
                )
                for before, job in zip(calls, calls[1:]):
                    assert (job["swap"] is None) == (job["seed"] != before["seed"])
    assert counts == {8, 9, 10} and first == {0, 1, 2}
