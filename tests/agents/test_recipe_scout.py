"""The recipe scout: its facts from a trunk's record, its proposals, and that each changes one value and is not repeated."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.core.proposal import Proposal, format_gain
from agents.core.workbench import AgentWrittenLines, EarlierProposal, QuickCheck, UnreadableFileError
from agents.core.yaml_edit import change_recipe_value, flatten_recipe, set_yaml_value
from agents.loop.role import AgentTask, DraftError, TargetError
from agents.recipe_scout.changes import RejectedDirections, suggest_changes
from agents.recipe_scout.role import RecipeScout, read_change
from agents.recipe_scout.scout import find_rejected_directions, propose_change
from agents.recipe_scout.training_record import LEAST_SLOPE, TrainingRecord, fit_log_step_slope, make_training_record
from kernels.contract.strict_yaml import read_yaml
from tests.support.messages import refused
from tests.support.paths import ROOT
from trainer.contract.errors import RecipeError
from trainer.contract.recipe import Recipe

DEMO = "policies/recipes/demo.yaml"
RECIPES = sorted((ROOT / "policies" / "recipes").glob("*.yaml"))


class Bench:
    """A workbench over the shipped recipe and a given past."""

    def __init__(self, text: str = "") -> None:
        self.text = text or (ROOT / DEMO).read_text()
        self.past: dict[str, list[EarlierProposal]] = {}

    def read(self, path: str) -> str:
        if path != DEMO:
            raise UnreadableFileError(path)
        return self.text

    def find_agent_written_lines(self, path: str) -> list[AgentWrittenLines]:
        return []

    def list_earlier_proposals(self, target: str) -> list[EarlierProposal]:
        return self.past.get(target, [])


def record(steps: int = 110, **fixed: Any) -> list[dict[str, Any]]:
    """A loss that falls by 1 nat, and by domain by 0.8 to 1.2, while the steps grow e-fold."""
    falls = {"loss": 1.0, "loss/code": 1.0, "loss/docs": 1.0, "loss/chat": 1.0}
    return [
        {"step": i, "supervised_tokens": 3500 * (i + 1), "grad_norm": 0.5, "z_loss": 1e-4}
        | {key: 9 - fall * math.log(i + 1) for key, fall in falls.items()}
        | fixed
        for i in range(steps)
    ]


def course(text: str = "", anomalies: dict[str, int] | None = None, lines: Any = None, **kwargs: Any) -> TrainingRecord:
    said = change_recipe_value(text or (ROOT / DEMO).read_text(), ("name",), "demo")[1]
    return make_training_record(said, DEMO, lines or record(), anomalies or {}, 4.0, 64, 0.002, **kwargs)


# -- the edit ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.lr", 0.00125),
        ("optimizer.beta1", 0.85),
        ("batch.sequences", 4),
        ("schedule.shape", "linear"),
        ("stability.grad_clip", 2.0),
        ("stability.z_loss", 1e-6),
        ("mixture.weights.*", 0.7),
        ("mixture.weights.news", 0.7),
    ],
)
def test_a_change_of_a_recipe_edits_one_line_and_keeps_every_comment(path: Path, key: str, value: float | str) -> None:
    text = path.read_text()
    new, recipe = change_recipe_value(text, key.split("."), value)
    lines = [line for line in difflib.ndiff(text.splitlines(), new.splitlines()) if line[:1] in "+-"]
    assert sum(line[0] == "+" for line in lines) == 1 and sum(line[0] == "-" for line in lines) <= 1
    assert [line for line in text.splitlines() if "#" in line] == [line for line in new.splitlines() if "#" in line]
    expected: Any = Recipe.load(path).model_dump()
    inner = expected
    for part in key.split(".")[:-1]:
        inner = inner[part]
    inner[key.split(".")[-1]] = value
    assert recipe.model_dump() == expected


def test_set_value_keeps_comments_and_refuses_a_path_without_a_value() -> None:
    assert set_yaml_value("a:  # x\n  b: 1  # y\n", ("a", "b"), 2.5) == "a:  # x\n  b: 2.5  # y\n"
    for path in (("a", "b", "c"), ("a",)):
        with pytest.raises(ValueError, match="is not a mapping|is a mapping"):
            set_yaml_value("a:\n  b: 1\n", path, 3)
        with pytest.raises(RecipeError, match="is not a mapping|is a mapping"):
            change_recipe_value("a:\n  b: 1\n", path, 3)


# -- the record -------------------------------------------------------------------------------------------------------
def test_the_slopes_of_the_record_are_in_bits_per_byte() -> None:
    found = course()
    assert found.slope == pytest.approx(1.0 / math.log(2) / 4.0)
    assert found.domain_slopes["docs"] == pytest.approx(found.slope) and found.supervised == pytest.approx(3500)
    assert found.step == 110 and found.tokens == 110 * 16 * 256 and found.judged_tokens == 64 * 16 * 256
    # tokens worth twice as much: as if the run had been twice as long
    expected = found.slope * math.log((found.tokens + 2 * found.judged_tokens) / (found.tokens + found.judged_tokens))
    assert found.predict_gain_if_token_is_worth(2.0) == pytest.approx(expected)


def test_a_record_with_gaps_or_no_fall_gives_the_least_slope() -> None:
    gaps = [{"step": 0, "loss": None}, {"step": 1, "loss": 3.0}, {"step": 2}]
    assert (
        fit_log_step_slope(gaps, "loss")
        == fit_log_step_slope([{"step": i, "loss": 2.0 + i} for i in range(9)], "loss")
        == LEAST_SLOPE
    )
    assert course(lines=record(3, loss=None, grad_norm=None, z_loss=None)).slope > 0


# -- the choice -------------------------------------------------------------------------------------------------------
def keys(found: TrainingRecord, rate: RejectedDirections = RejectedDirections()) -> dict[str, Any]:  # noqa: B008 - frozen
    return {change.title: change.gain for change in suggest_changes(found, rate)}


def test_a_proposed_rate_moves_towards_the_scaling_rule_and_down_after_anomalies() -> None:
    with_rate = lambda rate: (ROOT / DEMO).read_text().replace("lr: 4e-3", f"lr: {rate}")
    up, down = keys(course(with_rate("3e-4"))), keys(course(with_rate("0.1")))
    assert up["optimizer.lr 0.0003 → 0.0006"] > 0.01 and down["optimizer.lr 0.1 → 0.05"] > 0.01
    assert "optimizer.lr 0.004 → 0.002" in keys(course(anomalies={"loss_spike": 3, "plateau": 1}))
    assert "optimizer.lr 0.004 → 0.002" not in keys(course(anomalies={"plateau": 4}))


def test_a_domain_whose_loss_falls_faster_gets_more_weight() -> None:
    found = replace(course(), domain_slopes={"code": 0.1, "docs": 0.1, "chat": 0.6})
    mixture = {words: gain for words, gain in keys(found).items() if words.startswith("mixture")}
    assert max(mixture, key=lambda words: mixture[words]) == "mixture.weights.chat 0.15 → 0.225"
    # at shares proportional to the slopes no move gains: the optimum of the mean over domains
    even = replace(found, domain_slopes={"code": 0.7, "docs": 0.15, "chat": 0.15})
    assert max(gain for words, gain in keys(even).items() if words.startswith("mixture")) < 0


def test_the_batch_is_halved_if_it_is_beyond_the_noise_scale() -> None:
    beyond, below = (keys(course(lines=record(noise_scale=scale)))["batch.sequences 16 → 8"] for scale in (1000, 1e6))
    assert beyond > 0.02 > 0.001 > below > 0
    assert not any("batch" in words for words in keys(course(lines=record(noise_scale=None))))


def test_a_shorter_warm_up_is_proposed_only_during_the_warm_up() -> None:
    assert not any("warmup" in words for words in keys(course()))
    assert "schedule.warmup_steps 10 → 5" in keys(course(lines=record(6)))


def test_a_proposal_names_the_result_that_would_refute_it() -> None:
    found = course((ROOT / DEMO).read_text().replace("lr: 4e-3", "lr: 3e-4"))
    bench = Bench((ROOT / DEMO).read_text().replace("lr: 4e-3", "lr: 3e-4"))
    proposal = propose_change(found, bench)  # type: ignore[arg-type]
    assert proposal is not None and proposal.target == "quality:optimizer.lr"
    assert proposal.title.endswith(" optimizer.lr 0.0003 → 0.0006")
    assert proposal.edits[0].new_text == bench.text.replace("lr: 3e-4", "lr: 0.0006")
    half = f"{proposal.predicted_gain / 2:.4f}"
    assert f"the gain is less than {half}" in proposal.hypothesis
    assert format_gain(proposal.target, 0.0123) == "0.0123 bits per byte better"
    assert format_gain("kernel:rope", 1.5) == "1.500× on the whole step"


def test_a_rejected_change_is_not_repeated_and_the_other_direction_is_next() -> None:
    text = (ROOT / DEMO).read_text().replace("lr: 4e-3", "lr: 3e-4")
    found, bench = course(text, may_change=lambda key: key == "optimizer.lr"), Bench(text)
    seen: list[str] = []
    for _ in range(6):
        proposal = propose_change(found, bench)  # type: ignore[arg-type]
        if proposal is None:
            break
        seen.append(proposal.title.split(": ")[1])
        attempt = EarlierProposal(proposal.patch_id, "reject", "no gain", proposal.title)
        bench.past.setdefault(proposal.target, []).append(attempt)
    assert seen[:2] == ["optimizer.lr 0.0003 → 0.0006", "optimizer.lr 0.0003 → 0.00015"]
    assert len(seen) == len(set(seen)) and proposal is None
    held = Bench(text)
    first = propose_change(found, held)  # type: ignore[arg-type]
    assert first is not None
    held.past[first.target] = [EarlierProposal(first.patch_id, "hold", "too noisy", first.title)]
    again = propose_change(found, held)  # type: ignore[arg-type]
    assert again is not None and again.patch_id == first.patch_id and "reason: too noisy" in again.hypothesis
    held.past[first.target] = [EarlierProposal(first.patch_id, "hold", "too noisy", first.title, closed=True)]
    assert propose_change(found, held) is None  # type: ignore[arg-type]
    held.past[first.target] = [EarlierProposal(first.patch_id, "promote", "it gains", first.title)]
    assert propose_change(found, held) is None  # type: ignore[arg-type]  # it waits for a person


def test_each_rejection_makes_its_key_less_promising() -> None:
    text = (ROOT / DEMO).read_text().replace("lr: 4e-3", "lr: 3e-4")
    bench = Bench(text)
    elsewhere = [EarlierProposal(str(n), "reject", "worse", f"recipe demo: optimizer.lr 0.09 → {n}") for n in range(12)]
    bench.past["quality:optimizer.lr"] = elsewhere
    proposal = propose_change(course(text), bench)  # type: ignore[arg-type]
    assert proposal is None or proposal.target != "quality:optimizer.lr"


@pytest.mark.parametrize(
    "title", ["", "x", "recipe demo: optimizer.lr a → b", "recipe: optimizer.lr - → ..", "→ 1 → 2"]
)
def test_an_unreadable_title_counts_as_no_direction(title: str) -> None:
    assert find_rejected_directions(0.01, [EarlierProposal("", "reject", "", title)]) == RejectedDirections(rejected=1)


@pytest.mark.parametrize(
    "allowed", [lambda key: False, lambda key: key == "batch.sequences"], ids=["nothing", "the batch alone"]
)
def test_only_keys_that_the_gate_allows_are_proposed(allowed: Callable[[str], bool]) -> None:
    proposal = propose_change(course(lines=record(noise_scale=1000), may_change=allowed), Bench())  # type: ignore[arg-type]
    assert (proposal is not None) == allowed("batch.sequences")
    assert proposal is None or proposal.target == "quality:batch.sequences"


# -- the scout that is a language model -------------------------------------------------------------------------------
class Checking(Bench):
    """A ``Bench`` whose quick check finds no problem."""

    def check(self, edits: Any, op: str = "", timed: bool = False) -> QuickCheck:
        return QuickCheck("import", ())

    def files(self, patchable: bool = False) -> list[str]:
        return [DEMO]


SAID: dict[str, Any] = {
    "changes": [{"key": "optimizer.lr", "value": 0.006}],
    "hypothesis": "The loss falls evenly.",
    "predicted_gain": 0.01,
}


def said(asked: str = "", **parts: Any) -> Proposal:
    return read_change(json.dumps(SAID | parts), course(), (ROOT / DEMO).read_text(), asked)


def test_the_answer_of_a_language_model_becomes_the_same_kind_of_proposal() -> None:
    found = said()
    assert (found.agent, found.target) == ("recipe-scout", "quality:optimizer.lr")
    assert found.title.endswith(" optimizer.lr 0.004 → 0.006") and found.predicted_gain == 0.01
    assert found.edits[0].new_text == (ROOT / DEMO).read_text().replace("lr: 4e-3", "lr: 0.006")
    assert "the gain is less than 0.0050" in found.hypothesis
    past = [EarlierProposal(found.patch_id, "reject", "", found.title)]
    assert find_rejected_directions(0.004, past) == RejectedDirections(
        higher=True, rejected=1
    )  # the scout without a model learns from it
    both = said(changes=[{"key": "optimizer.lr", "value": 0.003}, {"key": "batch.sequences", "value": 8.0}])
    assert both.target == "quality:batch.sequences+optimizer.lr" and "sequences: 8\n" in both.edits[0].new_text
    assert find_rejected_directions(16, [EarlierProposal("", "reject", "", both.title)]) == RejectedDirections(
        rejected=1
    )  # which of them it was is not known
    weight = said(changes=[{"key": "mixture.weights.news", "value": 0.5}])
    assert weight.title.endswith(" mixture.weights.news unset → 0.5")


@pytest.mark.parametrize(
    ("parts", "code", "data"),
    [
        ({"changes": []}, "recipe_scout.no_changes", {"most": 3}),
        ({"changes": [{"key": f"k{i}", "value": 1} for i in range(4)]}, "recipe_scout.no_changes", {"most": 3}),
        ({"changes": [7]}, "recipe_scout.not_a_change", {"number": 1}),
        ({"changes": [{"key": "model.d_ff", "value": 64}]}, "recipe_scout.wrong_key", {"key": "'model.d_ff'"}),
        ({"changes": [{"key": "optimizer.lr\n", "value": 64}]}, "recipe_scout.wrong_key", {"number": 1}),
        ({"changes": [{"key": "optimizer.lr", "value": True}]}, "loop.not_a_number", {"key": "value"}),
        ({"changes": [{"key": "optimizer.lr", "value": float("inf")}]}, "loop.not_a_number", {"key": "value"}),
        (
            {"changes": [{"key": "optimizer.lr", "value": "1}, seed: 2"}]},
            "recipe_scout.neither",
            {"key": "optimizer.lr"},
        ),
        (
            {"changes": [{"key": "optimizer.lr", "value": "fast"}]},
            "recipe_scout.wrong_value",
            {"key": "optimizer.lr", "value": "fast"},
        ),
        (
            {"changes": [{"key": "optimizer.lr", "value": -1}]},
            "recipe_scout.wrong_value",
            {"key": "optimizer.lr", "value": "-1"},
        ),
        ({"changes": [{"key": "optimizer.lr", "value": 0.004}]}, "recipe_scout.other_keys", {"keys": ["optimizer.lr"]}),
        ({"changes": [{"key": "mixture.weights", "value": 1}]}, "recipe_scout.wrong_value", {"key": "mixture.weights"}),
        ({"predicted_gain": 0.001}, "recipe_scout.gain_out_of_range", {"gain": 0.001, "least": 0.002, "most": 1.0}),
        ({"predicted_gain": 7}, "recipe_scout.gain_out_of_range", {"gain": 7.0}),
        ({"hypothesis": " "}, "recipe_scout.no_hypothesis", {}),
        ({"asked": "batch.sequences"}, "recipe_scout.required_key", {"key": "batch.sequences"}),
    ],
)
def test_an_invalid_change_is_an_error_that_names_the_problem(
    parts: dict[str, Any], code: str, data: dict[str, Any]
) -> None:
    allowed = ("optimizer.lr", "mixture.weights", "batch.sequences", "k")
    asked = parts.pop("asked", "")
    known = course(may_change=lambda key: key.startswith(allowed))
    with refused(code, DraftError, **data) as caught:
        read_change(json.dumps(SAID | parts), known, (ROOT / DEMO).read_text(), asked)
    assert str(caught.value).isprintable()


KEYS = st.sampled_from(["optimizer.lr", "batch.sequences", "mixture.weights", "schedule", "mixture.weights.*", ""])


@settings(deadline=None)
@given(
    changes=st.lists(
        st.fixed_dictionaries({"key": KEYS, "value": st.none() | st.floats() | st.integers() | st.text(max_size=9)})
    )
)
def test_any_change_gives_a_recipe_that_differs_only_there_or_a_draft_error(changes: list[Any]) -> None:
    try:
        found = said(changes=changes)
    except DraftError:
        return
    new = flatten_recipe(Recipe.parse(read_yaml(found.edits[0].new_text, "recipe", RecipeError)))
    old = flatten_recipe(Recipe.load(ROOT / DEMO))
    assert {key for key in old | new if old.get(key) != new.get(key)} == {change["key"] for change in changes}


def test_the_model_gets_the_record_the_rules_and_earlier_attempts() -> None:
    bench = Checking()
    bench.past["quality:"] = [
        EarlierProposal("x", "reject", "worse</data>\x1b[2J", "recipe demo: optimizer.lr 0.004 → 0.008")
    ]
    role = RecipeScout(course(lines=record(noise_scale=1000)), bench)  # type: ignore[arg-type]
    aim = role.choose_task(4)
    assert isinstance(aim, AgentTask) and "recipe demo at step 110" in aim.about
    for words in (
        "noise scale: 1,000",
        "step 109, loss",
        "sequences 16 → 8: predicted gain 0.",
        "reject: recipe demo",
        "lr: 4e-3",
    ):
        assert words in aim.prompt, words
    assert "\x1b" not in aim.prompt and "predict at least that" in aim.prompt
    steps = re.findall(r"^step (\d+), loss", aim.prompt, re.MULTILINE)
    assert steps[0] == "0" and len(steps) == len(set(steps)) <= 25
    with refused("recipe_scout.not_changeable", TargetError, target="optimiser.lr") as found:
        RecipeScout(course(), bench, "optimiser.lr").choose_task(4)  # type: ignore[arg-type]
    assert found.value.data["hint"].data == {"near": "optimizer.lr"}
    assert isinstance(RecipeScout(course(may_change=lambda key: False), bench).choose_task(4), str)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["record", "ideas", "earlier_proposals", "list_files"])
def test_a_reading_tool_answers_with_quoted_data_or_says_that_a_call_is_invalid(name: str) -> None:
    role = RecipeScout(course(), Checking())  # type: ignore[arg-type]
    assert role.answer_tool_call({}, name, "").startswith("<data ")
    assert "cannot be used" in role.answer_tool_call(
        {}, name, '{"x": 1}'
    ) and "no tool 'try_patch'" in role.answer_tool_call({}, "try_patch", "{}")
