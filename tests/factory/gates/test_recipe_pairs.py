"""The runs stage of the recipe gate without a trainer: the planned runs, their order, and the evidence from their files."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from factory.core.workspace import find_checkout_root
from factory.gates.recipe import runs as stage
from factory.gates.recipe.policy import RecipePolicy, RunsPolicy
from factory.gates.recipe.runs import (
    MeasuredRuns,
    RecipeSide,
    RunLengths,
    choose_run_lengths,
    lengthen_runs_in_policy,
    list_trained_domains,
    train_pairs,
)
from factory.gates.stage_interface import NO_START, NOTHING_HELD_OUT
from factory.gates.training_start import TrainingStart
from factory.runs.sandboxed_training import ArmRunEnd
from tests.support.gates.reasons import Expected, expect, tells
from tests.support.messages import codes, refused
from tests.support.trainer.segments import make_documents
from trainer.contract.data.token_shard import write_token_shard
from trainer.contract.errors import RecipeError, TrainerError
from trainer.contract.recipe import Recipe, copy_with_changed_keys

TINY = "policies/recipes/tiny.yaml"
RAW = Recipe.load(
    find_checkout_root() / TINY
).model_dump()  # eight sequences, a rate of 3e-3, a warm-up of 4, an anneal of 6
POLICY = RunsPolicy(
    seeds=3, steps=12, tail_steps=6, calmer_longer=3, wall_seconds=70.0, held_out_documents=5, held_out_bytes=99
)


def recipe(**keys: Any) -> Recipe:
    return Recipe.parse(copy_with_changed_keys(RAW, {name.replace("__", "."): value for name, value in keys.items()}))


COSINE = {"schedule__kind": "cosine", "schedule__cosine_steps": 40, "schedule__final_lr_share": 0.2}


@pytest.mark.parametrize(
    ("old", "new", "step", "times"),
    [
        ({}, {}, 6, 1),
        ({}, {"optimizer__lr": 2.9e-3}, 6, 3),
        ({}, {"optimizer__lr": 3.1e-3}, 6, 1),
        ({}, {"batch__sequences": 9}, 6, 3),
        ({}, {"batch__sequences": 7}, 6, 1),
        ({}, {"schedule__warmup_steps": 7}, 6, 3),
        ({}, {"schedule__warmup_steps": 6}, 6, 1),  # over where the runs begin
        ({}, {"schedule__warmup_steps": 5}, 0, 3),
        ({}, {"schedule__warmup_steps": 4}, 0, 1),
        (COSINE, COSINE | {"schedule__final_lr_share": 0.1}, 6, 3),
        (COSINE, COSINE | {"schedule__final_lr_share": 0.3}, 6, 1),
        (COSINE, COSINE, 6, 1),
        ({"schedule__final_lr_share": 0.2}, {"schedule__final_lr_share": 0.1}, 6, 1),  # of an anneal alone
    ],
)
def test_recipes_with_smaller_steps_get_longer_runs(
    old: dict[str, Any], new: dict[str, Any], step: int, times: int
) -> None:
    found = lengthen_runs_in_policy(POLICY, step, recipe(**old), recipe(**new))
    assert found == POLICY.model_copy(update={"steps": 12 * times, "tail_steps": 6 * times})


@pytest.mark.parametrize(
    ("keys", "trunk", "tail"),
    [
        ({}, 12, 6),
        ({"batch__sequences": 16}, 6, 3),
        ({"batch__sequences": 72}, 1, 1),  # two steps are the least
        ({"schedule__anneal_steps": 12}, 6, 12),
        ({"schedule__anneal_steps": 17}, 1, 17),
        ({"schedule__anneal_steps": 1}, 17, 1),
        ({"batch__sequences": 4}, 24, 12),
    ],
)
def test_the_candidates_run_lengths_match_the_baselines_tokens(keys: dict[str, Any], trunk: int, tail: int) -> None:
    assert choose_run_lengths(POLICY, 6, recipe(), recipe(**keys)) == {
        "baseline": RunLengths(12, 6),
        "candidate": RunLengths(trunk, tail),
    }


@pytest.mark.parametrize(
    ("keys", "code", "data"),
    [
        ({"batch__sequences": 73}, "recipe.batch_too_large", {"steps": 18}),
        ({"schedule__anneal_steps": 18}, "recipe.anneal_too_long", {"times": 3.0, "steps": 18}),
    ],
)
def test_impossible_runs_are_refused(keys: dict[str, Any], code: str, data: dict[str, Any]) -> None:
    with refused(code, RecipeError, **data):
        choose_run_lengths(POLICY, 6, recipe(), recipe(**keys))


def test_a_run_keeps_only_its_last_checkpoint() -> None:
    of = recipe(stability__noise_scale_every=3, checkpoint_every=2, keep_checkpoints=4, schedule__final_lr_share=0.3)
    raw = stage.make_run_recipe(of, keep_final_lr=False, precision="bf16")
    changes = {
        "checkpoint_every": stage.NEVER,
        "keep_checkpoints": 1,
        "precision": "bf16",
        "stability.noise_scale_every": 0,
    }
    assert raw == copy_with_changed_keys(
        of.model_dump(), changes | {"schedule.final_lr_share": 0.0, "parallel.tensor": 1, "parallel.replicas": 1}
    )
    assert stage.NEVER > 10**9


def start_of(folder: Path, **shard: Any) -> TrainingStart:
    documents = make_documents(1, {"code": 3, "docs": 2})
    made = write_token_shard(folder, documents, vocab_size=512, tokenizer_sha256="a" * 64)
    return TrainingStart(
        folder / "checkpoint",
        6,
        RAW,
        {"token_shards": [{"id": made.id, "path": str(made.path), "generation": 2, **shard}]},
        commit="c",
    )


def test_a_run_consists_of_two_arms_on_one_data_plan(tmp_path: Path) -> None:
    start = start_of(tmp_path, content="x", moved={"docs": "0"})
    assert list_trained_domains(start) == {"code", "docs"}
    side = RecipeSide("candidate", recipe(), dict(RAW), RunLengths(4, 3), {"code", "docs"}, "d" * 40, "cpu: {}\n")
    arms = side.make_arms(start, 7, tmp_path / "00042")
    assert [path.relative_to(tmp_path) for path in arms] == [Path("00042/trunk"), Path("00042/tail")]
    for arm, kind in zip(arms.values(), ("trunk", "anneal")):
        assert (arm.name, arm.code, arm.kernels) == (f"candidate, run 00042, {kind}", "d" * 40, "cpu: {}\n")
        spec = arm.make_spec()
        assert (spec["kind"], spec["code_commit"], spec["recipe"]) == (kind, "d" * 40, RAW)
        (shard,) = spec["data_plan"]["token_shards"]
        assert (shard["generation"], shard["content"], shard["moved"], spec["data_plan"]["seed"]) == (
            2,
            "x",
            {"docs": "0"},
            7,
        )
    trunk, tail = (arm.make_spec() for arm in arms.values())
    assert (trunk["first_step"], trunk["last_step"], trunk["restart_data"]) == (6, 10, True)
    assert (tail["first_step"], tail["last_step"], tail["restart_data"]) == (10, 13, False)
    assert trunk["initial_checkpoint"] == str(start.checkpoint)
    assert tail["initial_checkpoint"] == str(tmp_path / "00042" / "trunk" / "checkpoints" / "step-00000010")


# -- pairs ---------------------------------------------------------------------------------------------------------------
class Trainer:
    """Stands for ``Runs``: arms end as they are told, by the number of the run and its part."""

    def __init__(self, home: Path, ends: dict[tuple[int, int], dict[str, Any]]) -> None:
        self.home, self.ends = home, ends
        self.asked: list[Any] = []
        self.closed = False
        self.there: list[int] = []  # runs on disk whenever one is asked for

    def train_sandboxed(
        self, output: Path, code: Path, arms: dict[Path, str], wall_seconds: float
    ) -> Iterator[ArmRunEnd]:
        self.asked += [output, code, list(arms.items()), wall_seconds]
        with contextlib.ExitStack() as opened:
            opened.callback(setattr, self, "closed", True)
            for number, folder in enumerate(arms):
                end = dict(self.ends.get((number // 2, number % 2), {}))
                self.there.append(len(list(output.glob("segments/*"))))
                folder.mkdir(parents=True)
                lines = end.pop("lines", [(9.0, 1), (9.0, 1)] + [(float(number + n), n + 2) for n in range(3)])
                words = [
                    json.dumps({"step": n, "tokens_per_s": speed, "memory": held}) + "\n"
                    for n, (speed, held) in enumerate(lines)
                ]
                (folder / "metrics.jsonl").write_text("".join(words))
                held = os.open(folder, os.O_RDONLY)
                opened.callback(os.close, held)
                yield ArmRunEnd(folder, 1.0, opened=held, **end)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was read of each run."""
    read: list[Any] = []

    def read_alive(opened: int, last: int, origin: Any, aside: Path) -> Any:
        read.append((Path(os.readlink(f"/proc/self/fd/{opened}")), last, origin, aside))
        return SimpleNamespace(model={"w": torch.tensor(float(len(read)))})

    monkeypatch.setattr(stage, "read_live_checkpoint", read_alive)
    return read


def pairs(trainer: Trainer, score: Any) -> tuple[MeasuredRuns, list[str], list[Any]]:
    said: list[str] = []
    drawn: list[Any] = []

    def side(name: str, size: RunLengths) -> Any:
        def make_arms(start: TrainingStart, seed: int, folder: Path) -> dict[Path, str]:
            drawn.append((name, start.step, seed, folder))
            return {folder / part: f"{name} {part}" for part in ("trunk", "tail")}

        return SimpleNamespace(name=name, size=size, make_arms=make_arms)

    sides = {name: side(name, size) for name, size in (("baseline", RunLengths(4, 3)), ("candidate", RunLengths(2, 1)))}
    start = TrainingStart(Path("/checkpoint"), 6, {}, {})
    found = train_pairs(trainer, POLICY, start, sides, Path("/code"), {"w": torch.zeros(1)}, score, said.append)  # type: ignore[arg-type]
    return found, said, drawn


ORDER = ["baseline", "candidate", "candidate", "baseline", "baseline", "candidate"]


def test_both_sides_of_a_pair_share_a_seed_and_alternate_in_order(tmp_path: Path, left: list[Any]) -> None:
    trainer = Trainer(tmp_path, {})
    found, said, drawn = pairs(trainer, lambda weights: {"code": float(weights["w"]), "docs": float(weights["w"]) + 1})
    assert [name for name, *_ in drawn] == ORDER and {step for _, step, *_ in drawn} == {6}
    seeds = [seed for _, _, seed, _ in drawn]
    assert seeds[::2] == seeds[1::2] and len(set(seeds)) == 3
    names = [folder.name for *_, folder in drawn]
    assert names == [f"{int(names[0]) + n:05d}" for n in range(6)] and {folder.parent for *_, folder in drawn} == {
        tmp_path / "recipe" / "segments"
    }
    output, code, arms, seconds = trainer.asked
    assert (output, code, seconds) == (tmp_path / "recipe", Path("/code"), 70.0) and trainer.closed
    assert [arm for _, arm in arms] == [f"{name} {part}" for name in ORDER for part in ("trunk", "tail")]
    assert trainer.there == [0, 1] * 6, "a run is gone once it is scored"
    assert [(path.name, last) for path, last, *_ in left] == [
        ("tail", {"baseline": 13, "candidate": 9}[name]) for name in ORDER
    ]
    assert all(aside == tmp_path and torch.equal(origin["w"], torch.zeros(1)) for *_, origin, aside in left)
    of = {side: [float(n) for n, name in enumerate(ORDER, 1) if name == side] for side in stage.SIDES}
    assert found.bits == {side: [{"code": n, "docs": n + 1} for n in numbers] for side, numbers in of.items()}
    assert said == [f"{name}: {n + 0.5:.4f} bits per byte" for n, name in enumerate(ORDER, 1)]
    # both parts' lines without the first two: of the first run 0 1 2, then 9 9 1 2 3
    assert found.tokens_per_s["baseline"][0] == 2.0 and len(found.tokens_per_s["candidate"]) == 3
    assert found.memory == {"baseline": 4.0, "candidate": 4.0} and (found.failed, found.failed_side) == ("", "")
    assert found.to_json() == found.bits | {f"{side}_tokens_per_s": found.tokens_per_s[side] for side in stage.SIDES} | {
        f"{side}_memory": 4.0 for side in stage.SIDES
    }  # fmt: skip


def test_memory_is_measured_in_the_first_run_and_speed_even_in_short_runs(tmp_path: Path, left: list[Any]) -> None:
    ends = {(0, 0): {"lines": [(5.0, 7)]}, (0, 1): {"lines": [(3.0, 8)]}, (3, 0): {"lines": [(5.0, 100)]}}
    found, _, _ = pairs(Trainer(tmp_path, ends), lambda weights: {"code": 1.0})
    assert found.memory["baseline"] == 8.0 and found.tokens_per_s["baseline"][0] == 4.0


@pytest.mark.parametrize(
    ("ends", "side", "problem", "scored"),
    [
        ({(1, 0): {"failed": "no"}}, "candidate", "no", 1),
        ({(2, 1): {"failed": "no"}}, "candidate", "no", 2),
        ({(0, 0): {"failed": "no"}}, "baseline", "no", 0),
        (
            {(3, 1): {"failed": "late", "out_of_time": True}},
            "",
            expect("recipe.stopped", done=3, runs=6, seconds=70),
            3,
        ),
        (
            {(1, 0): {"failed": "late", "out_of_time": True}},
            "",
            expect("recipe.stopped", done=1, runs=6, seconds=70),
            1,
        ),
    ],
)
def test_the_first_run_that_fails_ends_all_runs(
    tmp_path: Path, left: list[Any], ends: Any, side: str, problem: Any, scored: int
) -> None:
    trainer = Trainer(tmp_path, ends)
    found, said, _ = pairs(trainer, lambda weights: {"code": 1.0})
    assert (found.failed_side, len(left), len(said)) == (side, scored, scored)
    assert found.failed == problem if side else tells([found.failed], problem)
    assert found.out_of_time == (side == "") and trainer.closed
    assert sum(map(len, found.bits.values())) == scored


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_without_a_finite_loss_fail_their_side(tmp_path: Path, left: list[Any], bad: float) -> None:
    found, _, _ = pairs(Trainer(tmp_path, {}), lambda weights: {"code": 1.0, "docs": bad if len(left) == 2 else 1.0})
    assert (
        found.failed_side == "candidate"
        and tells([found.failed], expect("recipe.no_finite_loss"))
        and not found.out_of_time
    )
    assert len(found.bits["baseline"]) == 1 and not found.bits["candidate"]


# -- the stage -------------------------------------------------------------------------------------------------------------
def case_of(folder: Path, start: TrainingStart | None, new: Recipe, changes: Any) -> Any:
    for side, of in (("base", recipe()), ("patch", new)):
        (folder / side / TINY).parent.mkdir(parents=True)
        (folder / side / TINY).write_text(json.dumps(of.model_dump()))
        (folder / side / "policies" / "kernels.yaml").write_text("cpu: {swiglu: auto}\n")

    @contextlib.contextmanager
    def task(title: str, total: float) -> Any:
        yield SimpleNamespace(advance=lambda amount, note: told.append((title, total, amount, note)))

    told: list[Any] = []
    return SimpleNamespace(
        start=start, changed_paths=[TINY], handed_on={"static": changes}, baseline=folder / "base", candidate=folder / "patch", told=told,
        policy=RecipePolicy(changes=["optimizer.lr"], runs=POLICY), plant="plant", work=folder / "work", subject="proposal:1",
        workspace=SimpleNamespace(root=folder), progress=SimpleNamespace(task=task), applied=SimpleNamespace(base="b" * 40),
    )  # fmt: skip


def staged(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    found: MeasuredRuns,
    texts: Any = ("text",),
    start: Any = None,
    new: Any = None,
    changes: Any = None,
) -> tuple[Any, list[Any], Any]:
    """The stage's result, and what it asked for."""
    asked: list[Any] = []

    def texts_of(*given: Any) -> Any:
        asked.append(given)
        return list(texts), "evals"

    def paired(
        runs: Any, policy: Any, start: Any, sides: Any, code: Path, origin: Any, score: Any, advance: Any
    ) -> Any:
        advance("words")
        asked.append((runs, policy, sides, code, origin, score("weights")))
        return found

    monkeypatch.setattr(stage, "read_held_out_texts", texts_of)
    monkeypatch.setattr(stage, "train_pairs", paired)
    monkeypatch.setattr(stage, "measure_bits_per_byte", lambda *given: given)
    monkeypatch.setattr(stage, "copy_cache", lambda *given: asked.append(given))
    monkeypatch.setattr(stage.checkpoint_files, "read_tensors", lambda *given: given)
    case = case_of(
        folder, start, new or recipe(optimizer__lr=1e-3), {"optimizer.lr": (3e-3, 1e-3)} if changes is None else changes
    )
    return stage.run(case).evidence, asked, case


DONE = MeasuredRuns(bits={"baseline": [{"code": 2.0}], "candidate": [{"code": 1.0}]})


def test_the_stage_plans_the_runs_of_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = start_of(tmp_path / "shards")
    found, asked, case = staged(monkeypatch, tmp_path, DONE, start=start, texts="abc")
    (documents, size, plant), cache, (runs, policy, sides, code, origin, score) = asked
    assert (documents, size, plant) == (5, 99, "plant") and policy.steps == 36
    assert cache[1] == tmp_path / "work" / "recipe" / "cache" and "c" in str(cache[0])
    assert (runs.plant, runs.home, runs.purpose, runs.subject) == ("plant", case.work, "recipe gate", "proposal:1")
    assert origin == (start.checkpoint, "model") and code == case.baseline
    assert score == ("weights", recipe().model_dump(), list("abc"), "evals")
    for name, lr in (("baseline", 3e-3), ("candidate", 1e-3)):
        side = sides[name]
        assert (side.name, side.commit, side.held, side.size) == (name, "b" * 40, {"code", "docs"}, RunLengths(36, 18))
        assert (
            side.recipe.optimizer.lr == side.raw["optimizer"]["lr"] == lr
            and side.kernels == "cpu:\n  swiglu: reference\n"
        )
        assert side.raw["schedule"]["final_lr_share"] == 0.0 and side.raw["precision"] == RAW["precision"]
    assert case.told == [("runs, both recipes", 6, 1, "words")]
    assert found == DONE.to_json() | {
        "state": "passed", "reasons": found["reasons"], "held_out_documents": 3, "from_step": 6,
        "same_cost": True, "steps": {"baseline": [36, 18], "candidate": [36, 18]},
    }  # fmt: skip
    assert tells(found["reasons"], expect("recipe.trained", seeds=3, trunk=36, tail=18, step=6))


@pytest.mark.parametrize(
    ("found", "state", "expected", "late"),
    [
        (
            MeasuredRuns(failed="no", failed_side="candidate"),
            "failed",
            expect("recipe.run_failed", side="candidate", problem="no"),
            False,
        ),
        (
            MeasuredRuns(failed="no", failed_side="baseline"),
            "missing",
            expect("recipe.run_failed", side="baseline", problem="no"),
            False,
        ),
        (MeasuredRuns(failed="late", out_of_time=True), "missing", expect(""), True),
    ],
)
def test_a_failure_is_attributed_to_its_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: MeasuredRuns, state: str, expected: Expected, late: bool
) -> None:
    told, _, _ = staged(monkeypatch, tmp_path, found, start=start_of(tmp_path / "shards"))
    assert (told["state"], told.get("out_of_time", False), told["from_step"]) == (state, late, 6)
    assert tells(told["reasons"], expected) and found.failed in told["reasons"][0]


FLOOR = {"schedule.final_lr_share": (0.0, 0.5)}


@pytest.mark.parametrize(
    ("new", "changes", "state", "expected"),
    [
        (recipe(batch__sequences=4), {"batch.sequences": (8, 4)}, "passed", expect("recipe.trained")),
        (recipe(schedule__final_lr_share=0.5), FLOOR, "passed", expect("recipe.trained")),
        (recipe(stability__grad_clip=0.3), {"stability.grad_clip": (1.0, 0.3)}, "passed", expect("recipe.trained")),
        (
            recipe(optimizer__beta1=0.8),
            {"optimizer.beta1": (0.9, 0.8), "mixture.weights.code": (1, 2)},
            "passed",
            expect("recipe.trained"),
        ),
        (recipe(schedule__final_lr_share=0.5), {}, "failed", expect("recipe.key_is_set")),
        (
            recipe(batch__sequences=4096),
            {"batch.sequences": (8, 4096)},
            "missing",
            expect("recipe.cannot_run", error="recipe.batch_too_large"),
        ),
    ],
)
def test_the_stage_passes_only_changes_that_the_runs_can_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: Recipe, changes: Any, state: str, expected: Expected
) -> None:
    told, asked, _ = staged(monkeypatch, tmp_path, DONE, start=start_of(tmp_path / "shards"), new=new, changes=changes)
    assert told["state"] == state and tells(told["reasons"], expected), told
    if state == "passed":
        assert told["same_cost"] == ("batch.sequences" not in changes)
        assert asked[2][2]["candidate"].raw["schedule"]["final_lr_share"] == (0.5 if changes is FLOOR else 0.0)


def test_missing_prerequisites_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = start_of(tmp_path / "shards")
    other = [
        TrainingStart(start.checkpoint, 6, copy_with_changed_keys(RAW, keys), start.plan)
        for keys in ({"model.d_ff": 128}, {"optimizer.name": "muon"})
    ]
    for number, (begun, texts, expected) in enumerate(
        [(None, "a", NO_START), (start, "", NOTHING_HELD_OUT), *((one, "a", None) for one in other)]
    ):
        told, asked, _ = staged(monkeypatch, tmp_path / str(number), DONE, texts, begun)
        other_model = told["state"] == "missing" and codes(told["reasons"]) == ["recipe.other_model"]
        assert told == expected if expected else other_model
        assert len(asked) == (1 if expected is NOTHING_HELD_OUT else 0)
    damaged = start_of(tmp_path / "damaged shards", moved={"code": "90"})
    told, _, _ = staged(monkeypatch, tmp_path / "damaged", DONE, start=damaged)
    assert told["state"] == "missing"
    with pytest.raises(TrainerError):
        list_trained_domains(damaged)
