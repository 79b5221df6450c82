"""What the scout reads out of a trunk's record, what it proposes, what it never proposes twice, and that one value changes."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.proposal import gain_words
from agents.recipe_scout.changes import Tried, all_changes
from agents.recipe_scout.course import LEAST_SLOPE, Course, course_of, slope
from agents.recipe_scout.lines import changed, set_value
from agents.recipe_scout.scout import propose, tried
from agents.workbench import Attempt, ReadError
from trainer.errors import RecipeError
from trainer.recipe import Recipe

ROOT = Path(__file__).parents[2]
DEMO = "policies/recipes/demo.yaml"
RECIPES = sorted((ROOT / "policies" / "recipes").glob("*.yaml"))


class Bench:
    """A workbench over the shipped recipe and a given past."""

    def __init__(self, text: str = "") -> None:
        self.text = text or (ROOT / DEMO).read_text()
        self.past: dict[str, list[Attempt]] = {}

    def read(self, path: str) -> str:
        if path != DEMO:
            raise ReadError(path)
        return self.text

    def history(self, target: str) -> list[Attempt]:
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


def course(text: str = "", anomalies: dict[str, int] | None = None, lines: Any = None, **kwargs: Any) -> Course:
    said = changed(text or (ROOT / DEMO).read_text(), ("name",), "demo")[1]
    return course_of(said, DEMO, lines or record(), anomalies or {}, 4.0, 64, 0.002, **kwargs)


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
def test_one_line_changes_and_every_comment_stays(path: Path, key: str, value: float | str) -> None:
    text = path.read_text()
    new, recipe = changed(text, key.split("."), value)
    lines = [line for line in difflib.ndiff(text.splitlines(), new.splitlines()) if line[:1] in "+-"]
    assert sum(line[0] == "+" for line in lines) == 1 and sum(line[0] == "-" for line in lines) <= 1
    assert [line for line in text.splitlines() if "#" in line] == [line for line in new.splitlines() if "#" in line]
    expected: Any = Recipe.load(path).model_dump()
    inner = expected
    for part in key.split(".")[:-1]:
        inner = inner[part]
    inner[key.split(".")[-1]] = value
    assert recipe.model_dump() == expected


def test_a_comment_behind_the_value_stays_and_nonsense_is_refused() -> None:
    assert set_value("a:  # x\n  b: 1  # y\n", ("a", "b"), 2.5) == "a:  # x\n  b: 2.5  # y\n"
    for path in (("a", "b", "c"), ("a",)):
        with pytest.raises(RecipeError):
            set_value("a:\n  b: 1\n", path, 3)


# -- the record -------------------------------------------------------------------------------------------------------
def test_slopes_are_those_of_the_loss_in_bits_per_byte() -> None:
    found = course()
    assert found.slope == pytest.approx(1.0 / math.log(2) / 4.0)
    assert found.domain_slopes["docs"] == pytest.approx(found.slope) and found.supervised == pytest.approx(3500)
    assert found.step == 110 and found.tokens == 110 * 16 * 256 and found.judged_tokens == 64 * 16 * 256
    # tokens worth twice as much: as if the run had been twice as long
    expected = found.slope * math.log((found.tokens + 2 * found.judged_tokens) / (found.tokens + found.judged_tokens))
    assert found.gain_of_speed(2.0) == pytest.approx(expected)


def test_a_record_with_gaps_or_no_fall_gives_the_least_slope() -> None:
    gaps = [{"step": 0, "loss": None}, {"step": 1, "loss": 3.0}, {"step": 2}]
    assert slope(gaps, "loss") == slope([{"step": i, "loss": 2.0 + i} for i in range(9)], "loss") == LEAST_SLOPE
    assert course(lines=record(3, loss=None, grad_norm=None, z_loss=None)).slope > 0


# -- the choice -------------------------------------------------------------------------------------------------------
def keys(found: Course, rate: Tried = Tried()) -> dict[str, Any]:  # noqa: B008 - frozen
    return {change.words: change.gain for change in all_changes(found, rate)}


def test_the_rate_goes_towards_the_rule_and_down_after_anomalies() -> None:
    with_rate = lambda rate: (ROOT / DEMO).read_text().replace("lr: 4e-3", f"lr: {rate}")
    up, down = keys(course(with_rate("3e-4"))), keys(course(with_rate("0.1")))
    assert up["optimizer.lr 0.0003 → 0.0006"] > 0.01 and down["optimizer.lr 0.1 → 0.05"] > 0.01
    assert "optimizer.lr 0.004 → 0.002" in keys(course(anomalies={"loss_spike": 3, "plateau": 1}))
    assert "optimizer.lr 0.004 → 0.002" not in keys(course(anomalies={"plateau": 4}))


def test_a_domain_whose_loss_falls_faster_gets_more() -> None:
    found = replace(course(), domain_slopes={"code": 0.1, "docs": 0.1, "chat": 0.6})
    mixture = {words: gain for words, gain in keys(found).items() if words.startswith("mixture")}
    assert max(mixture, key=lambda words: mixture[words]) == "mixture.weights.chat 0.15 → 0.225"
    # at shares proportional to the slopes no move gains: the optimum of the mean over domains
    even = replace(found, domain_slopes={"code": 0.7, "docs": 0.15, "chat": 0.15})
    assert max(gain for words, gain in keys(even).items() if words.startswith("mixture")) < 0


def test_the_batch_is_halved_where_it_is_beyond_the_noise_scale() -> None:
    beyond, below = (keys(course(lines=record(noise_scale=scale)))["batch.sequences 16 → 8"] for scale in (1000, 1e6))
    assert beyond > 0.02 > 0.001 > below > 0
    assert not any("batch" in words for words in keys(course(lines=record(noise_scale=None))))


def test_the_warm_up_is_only_tried_while_it_runs() -> None:
    assert not any("warmup" in words for words in keys(course()))
    assert "schedule.warmup_steps 10 → 5" in keys(course(lines=record(6)))


def test_what_is_proposed_says_what_would_refute_it() -> None:
    found = course((ROOT / DEMO).read_text().replace("lr: 4e-3", "lr: 3e-4"))
    bench = Bench((ROOT / DEMO).read_text().replace("lr: 4e-3", "lr: 3e-4"))
    proposal = propose(found, bench)  # type: ignore[arg-type]
    assert proposal is not None and proposal.target == "quality:optimizer.lr"
    assert proposal.title == "recipe demo: optimizer.lr 0.0003 → 0.0006"
    assert proposal.edits[0].new_text == bench.text.replace("lr: 3e-4", "lr: 0.0006")
    half = f"{proposal.predicted_gain / 2:.4f}"
    assert f"less than {half} refutes the prediction" in proposal.hypothesis
    assert gain_words(proposal.target, 0.0123) == "0.0123 bits per byte better"
    assert gain_words("kernel:rope", 1.5) == "1.500× on the whole step"


def test_what_was_rejected_is_not_proposed_again_and_the_other_way_is_next() -> None:
    text = (ROOT / DEMO).read_text().replace("lr: 4e-3", "lr: 3e-4")
    found, bench = course(text, may_change=lambda key: key == "optimizer.lr"), Bench(text)
    seen: list[str] = []
    for _ in range(6):
        proposal = propose(found, bench)  # type: ignore[arg-type]
        if proposal is None:
            break
        seen.append(proposal.title.split(": ")[1])
        attempt = Attempt(proposal.patch_id, "reject", "no gain", proposal.title)
        bench.past.setdefault(proposal.target, []).append(attempt)
    assert seen[:2] == ["optimizer.lr 0.0003 → 0.0006", "optimizer.lr 0.0003 → 0.00015"]
    assert len(seen) == len(set(seen)) and proposal is None
    held = Bench(text)
    first = propose(found, held)  # type: ignore[arg-type]
    assert first is not None
    held.past[first.target] = [Attempt(first.patch_id, "hold", "too noisy", first.title)]
    again = propose(found, held)  # type: ignore[arg-type]
    assert again is not None and again.patch_id == first.patch_id and "hold, too noisy" in again.hypothesis
    held.past[first.target] = [Attempt(first.patch_id, "promote", "it gains", first.title)]
    assert propose(found, held) is None  # type: ignore[arg-type]  # it waits for a person


def test_each_rejection_makes_its_key_less_promising() -> None:
    text = (ROOT / DEMO).read_text().replace("lr: 4e-3", "lr: 3e-4")
    bench = Bench(text)
    elsewhere = [Attempt(str(n), "reject", "worse", f"recipe demo: optimizer.lr 0.09 → {n}") for n in range(12)]
    bench.past["quality:optimizer.lr"] = elsewhere
    proposal = propose(course(text), bench)  # type: ignore[arg-type]
    assert proposal is None or proposal.target != "quality:optimizer.lr"


@pytest.mark.parametrize(
    "title", ["", "x", "recipe demo: optimizer.lr a → b", "recipe: optimizer.lr - → ..", "→ 1 → 2"]
)
def test_a_title_that_says_nothing_is_not_believed(title: str) -> None:
    assert tried(0.01, [Attempt("", "reject", "", title)]) == Tried(rejected=1)


@pytest.mark.parametrize(
    "allowed", [lambda key: False, lambda key: key == "batch.sequences"], ids=["nothing", "the batch alone"]
)
def test_only_what_the_gate_lets_patches_change_is_proposed(allowed: Callable[[str], bool]) -> None:
    proposal = propose(course(lines=record(noise_scale=1000), may_change=allowed), Bench())  # type: ignore[arg-type]
    assert (proposal is not None) == allowed("batch.sequences")
    assert proposal is None or proposal.target == "quality:batch.sequences"
