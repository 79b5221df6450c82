from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests.support.trainer.segments import recipe_with
from trainer.monitor.stability import MOST_BLOCKS, Anomaly, StabilityDetector, ThroughputDetector

RECIPE = recipe_with(stability={"window": 32, "spike_deviations": 8.0, "skip_deviations": 40.0}).stability


def warmed(steps: int = 40) -> StabilityDetector:
    detector, noise = StabilityDetector(RECIPE), random.Random(1)
    for step in range(steps):
        assert detector.observe(step, 3 + noise.gauss(0, 0.05), 1 + noise.gauss(0, 0.05), False) == []
    return detector


def test_spikes_and_jumps_are_named_with_step_and_size() -> None:
    detector = warmed()
    found = detector.observe(40, 5.0, 4.0, False)
    assert [(a.step, a.kind, a.value) for a in found] == [(40, "loss_spike", 5.0), (40, "grad_norm_jump", 4.0)]
    assert found[0].usual == pytest.approx(3, abs=0.1) and found[0].deviations > 8


def test_one_spike_does_not_hide_the_next() -> None:
    detector = warmed()
    assert detector.observe(40, 50.0, 1.0, False)
    assert [a.kind for a in detector.observe(41, 5.0, 1.0, False)] == ["loss_spike"]


def test_a_new_level_becomes_the_usual_one() -> None:
    detector = warmed()
    flagged = [bool(detector.observe(step, 6.0, 1.0, False)) for step in range(40, 80)]
    assert flagged[0] and not flagged[-1]


def test_a_non_finite_value_is_an_anomaly_from_the_first_step_and_never_joins_the_window() -> None:
    detector = StabilityDetector(RECIPE)
    assert [a.kind for a in detector.observe(0, math.nan, math.inf, True)] == ["non_finite", "non_finite"]
    state = detector.state_dict()
    assert state["loss"] == state["grad_norm"] == []


def test_the_gradient_norm_limit_is_infinite_until_the_window_is_half_full() -> None:
    assert StabilityDetector(RECIPE).compute_grad_norm_limit() == math.inf
    assert 1.5 < warmed().compute_grad_norm_limit() < 6


def test_a_detector_restored_from_json_decides_the_same() -> None:
    detector, again = warmed(), StabilityDetector(RECIPE)
    again.load_state_dict(json.loads(json.dumps(detector.state_dict())))
    assert again.compute_grad_norm_limit() == detector.compute_grad_norm_limit()
    assert again.observe(40, 5.0, 1.0, False) == detector.observe(40, 5.0, 1.0, False)


def test_the_gradient_norm_limit_changes_only_after_every_read_every_steps() -> None:
    """Steps are read every fourth step, and after step 9 because of a checkpoint. That reading changes the limit only from step 12 on."""
    seldom, often = (
        StabilityDetector(RECIPE.model_copy(update={"read_every": every, "window": 8})) for every in (4, 1)
    )
    noise, limits, usual = random.Random(2), [], []
    for step in range(17):
        if step == 10:
            kept = json.loads(json.dumps(seldom.state_dict()))
            seldom = StabilityDetector(seldom.recipe)
            seldom.load_state_dict(kept)
        limits.append(seldom.compute_grad_norm_limit())
        usual.append(often.compute_grad_norm_limit())
        record = {"step": step, "loss": 3.0, "grad_norm": 1 + noise.gauss(0, 0.05), "skipped": False}
        if step == 7:
            record.pop("loss")  # a step without targets
        for detector in (seldom, often):
            detector.after_step(record)
    assert limits == [usual[step // 4 * 4] for step in range(17)] and len(set(usual[8:])) > 4
    assert limits[:4] == [math.inf] * 4 and math.isfinite(limits[4])
    assert kept["limit"] == limits[8] and "limit" not in often.state_dict()
    older = StabilityDetector(seldom.recipe)
    older.load_state_dict({key: value for key, value in kept.items() if key != "limit"})
    assert older.compute_grad_norm_limit() == usual[10]
    early = StabilityDetector(seldom.recipe)
    early.load_state_dict(json.loads(json.dumps(StabilityDetector(seldom.recipe).state_dict())))
    assert early.compute_grad_norm_limit() == math.inf


def test_a_skipped_outlier_is_marked_as_skipped() -> None:
    assert [a.kind for a in warmed().observe(40, 3.0, 500.0, True)] == ["skipped_outlier"]


DEFAULTS = recipe_with().stability
Series = Iterator[tuple[float, float]]  # loss and gradient norm, step by step


def falling(seed: int, floor: float = 1.8) -> Series:
    """A loss that falls by a power law with noise of 2 % that wanders as the mix of documents does, and its gradients'
    norm, whose logarithm varies by 0.2: measured on runs of the tiny and the demo recipe, and a little above it."""
    noise, wander, step = random.Random(seed), 0.0, 0
    while True:
        loss = floor + 7 * (1 + step / 20) ** -0.6
        wander = 0.6 * wander + 0.8 * noise.gauss(0, 1)
        yield loss * (1 + 0.02 * wander), (0.4 + 2 * (1 + step / 30) ** -0.5) * math.exp(noise.gauss(0, 0.2))
        step += 1


def watch(detector: StabilityDetector, series: Series, steps: int, first: int = 0) -> list[Anomaly]:
    found = []
    for step in range(first, first + steps):
        loss, grad_norm = next(series)
        found += detector.observe(step, loss, grad_norm, grad_norm > detector.compute_grad_norm_limit())
    return found


def test_a_falling_noisy_loss_is_no_anomaly() -> None:
    """10 000 steps, three seeds. Of 100 seeds (10⁶ steps) twelve told one: ten of the gradient's norm, two plateaus."""
    told = Counter(a.kind for seed in (1, 2, 3) for a in watch(StabilityDetector(DEFAULTS), falling(seed), 10_000))
    assert not told


def changed(what: Callable[[int, float, float], tuple[float, float]], after: int, seed: int) -> Series:
    """The falling series, with what happens from a step on."""
    for step, (loss, grad_norm) in enumerate(falling(seed)):
        yield what(step - after, loss, grad_norm) if step >= after else (loss, grad_norm)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kind", "what", "within"),
    [
        ("loss_spike", lambda t, x, g: (x * 1.5 if t == 0 else x, g), 1),
        ("grad_norm_jump", lambda t, x, g: (x, 5 * g), 1),
        ("skipped_outlier", lambda t, x, g: (x, 100 * g if t == 0 else g), 1),
        ("loss_drop", lambda t, x, g: (x * 0.6 if t == 0 else x, g), 1),
        ("non_finite", lambda t, x, g: (math.nan, g), 1),
        ("non_finite", lambda t, x, g: (x, math.inf), 1),
        ("divergence", lambda t, x, g: (x * 1.5, g), 40),
        ("divergence", lambda t, x, g: (x * (1 + 0.01 * t), g), 80),
        ("divergence", lambda t, x, g: (x * 1.002**t, g), 200),
        ("plateau", lambda t, x, g: (2.6 + random.Random(t).gauss(0, 0.05), g), 640),
    ],
    ids=["spike", "jump", "outlier", "drop", "nan", "inf", "step-up", "slope", "drift", "flat"],
)
def test_anomalies_are_reported_soon(
    kind: str, what: Callable[[int, float, float], tuple[float, float]], within: int, seed: int
) -> None:
    after, detector = 600, StabilityDetector(DEFAULTS)
    series = changed(what, after, seed)
    assert watch(detector, series, after) == []
    assert kind in {a.kind for a in watch(detector, series, within, first=after)}


def first_of(kind: str, what: Callable[[int, float, float], tuple[float, float]], seed: int) -> Anomaly:
    """What is told of the falling series when something happens from step 600 on."""
    detector, series = StabilityDetector(DEFAULTS), changed(what, 600, seed)
    assert watch(detector, series, 600) == []
    return next(a for a in watch(detector, series, 100, first=600) if a.kind == kind)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kind", "what", "earliest", "latest"),
    [
        # the norm climbs by a fourth a step, six steps before the loss shows anything
        ("loss_spike", lambda t, x, g: (x * (1.6 if t >= 6 else 1), g * 1.25 ** (t + 1)), 597, 602),
        ("grad_norm_jump", lambda t, x, g: (x, g * 5 ** (t + 1)), 597, 600),
        ("loss_spike", lambda t, x, g: (x * 1.5, g), 597, 600),
        ("loss_drop", lambda t, x, g: (x * 0.6, g), 585, 600),
        ("divergence", lambda t, x, g: (x * (1 + 0.01 * t), g), 597, 610),
    ],
    ids=["norms first", "norm", "loss", "too low", "divergence"],
)
def test_an_anomaly_says_where_it_began(
    kind: str, what: Callable[[int, float, float], tuple[float, float]], earliest: int, latest: int, seed: int
) -> None:
    found = first_of(kind, what, seed)
    assert found.onset is not None and earliest <= found.onset <= min(latest, found.step)


def test_the_onset_of_a_non_finite_loss_is_the_rise_of_the_gradient_norm() -> None:
    found = first_of("non_finite", lambda t, x, g: (math.nan if t == 5 else x, g * 2 ** (t + 1)), 1)
    assert found.step == 605 and found.onset is not None and 597 <= found.onset <= 601


def test_the_onset_of_a_plateau_is_the_beginning_of_the_judged_windows() -> None:
    noise, detector = random.Random(2), StabilityDetector(DEFAULTS)
    found = [a for step in range(800) for a in detector.observe(step, 3 + noise.gauss(0, 0.05), 1.0, False)]
    plateau = next(a for a in found if a.kind == "plateau")
    assert plateau.onset == plateau.step + 1 - DEFAULTS.window * DEFAULTS.plateau_windows


def domains_of(step: int, noise: random.Random) -> dict[str, tuple[float, float]]:
    """code always with 900 tokens; chat in two of three steps, with 20 to 200 tokens and the noise that belongs to them."""
    found = {"code": (1.5 + noise.gauss(0, 0.03), 900.0)}
    if step % 3:
        tokens = float(noise.randint(20, 200))
        found["chat"] = (3 + noise.gauss(0, 0.05) * (110 / tokens) ** 0.5, tokens)
    return found


@pytest.mark.parametrize(("factor", "kind"), [(1.4, "domain_spike"), (0.6, "domain_drop")])
def test_a_domain_whose_loss_is_far_off_is_named(factor: float, kind: str) -> None:
    """The mean loss stays what it is: of 1000 tokens only 100 are chat's."""
    detector, noise = StabilityDetector(DEFAULTS), random.Random(3)
    observe = lambda step, found: detector.observe(step, 1.6 + noise.gauss(0, 0.03), 1.0, False, found)
    for step in range(2000):
        assert [a.kind for a in observe(step, domains_of(step, noise)) if a.kind != "plateau"] == []
    found = domains_of(2000, noise) | {"chat": (3 * factor, 110.0)}
    (told,) = observe(2000, found)
    assert (told.kind, told.where, told.step) == (kind, "domain/chat", 2000)
    assert told.usual == pytest.approx(3, abs=0.1) and abs(told.deviations) > DEFAULTS.spike_deviations
    assert (told.deviations > 0) == (factor > 1)


def test_a_domain_of_few_tokens_may_lie_further_off() -> None:
    judged = []
    for tokens in (900.0, 9.0):
        detector = StabilityDetector(DEFAULTS)
        for step in range(100):
            detector.observe(step, 3.0, 1.0, False, {"code": (1.5 + 0.03 * math.sin(step), 900.0)})
        judged.append([a.kind for a in detector.observe(100, 3.0, 1.0, False, {"code": (2.5, tokens)})])
    assert judged == [["domain_spike"], []]


def test_an_older_state_without_domains_and_trace_is_restored() -> None:
    """Older checkpoints have such a state. An older detector also finds its keys in a new state."""
    detector, noise = StabilityDetector(DEFAULTS), random.Random(3)
    for step in range(100):
        detector.observe(step, 3 + noise.gauss(0, 0.05), 1.0, False, domains_of(step, noise))
    state = json.loads(json.dumps(detector.state_dict()))
    again = StabilityDetector(DEFAULTS)
    again.load_state_dict(state)
    assert again.state_dict() == detector.state_dict() and again.trace == detector.trace
    low = {"code": (0.5, 900.0)}
    assert again.observe(100, 3.0, 1.0, False, low) == detector.observe(100, 3.0, 1.0, False, low) != []
    older = StabilityDetector(DEFAULTS)
    older.load_state_dict({key: value for key, value in state.items() if key not in ("domains", "trace")})
    (told,) = older.observe(100, 5.0, 1.0, False, low)
    assert told.kind == "loss_spike" and told.onset == 100


def test_a_divergence_is_reported_once_until_it_ends() -> None:
    detector = StabilityDetector(DEFAULTS)
    worse = lambda t, x, g: (x * (2.0 if t < 400 or t >= 800 else 1.0), g)
    found = watch(detector, changed(worse, 600, 1), 2000)
    diverged = [a.step for a in found if a.kind == "divergence"]
    assert len(diverged) == 2 and 600 < diverged[0] < 664 and 1400 < diverged[1] < 1464
    assert "plateau" not in {a.kind for a in found if a.step < 1400}


def test_a_plateau_is_reported_once_and_again_after_the_loss_has_fallen() -> None:
    """A loss as it is when the rate is too low, then lowered, then again."""
    noise = random.Random(2)
    level = lambda step: 3.0 if step < 2000 else max(2.0, 3.0 - (step - 2000) / 1500)
    series = ((level(step) + noise.gauss(0, 0.05), 1.0) for step in range(10**6))
    told = [a for a in watch(StabilityDetector(DEFAULTS), series, 8000) if a.kind == "plateau"]
    assert len(told) == 2
    assert 500 < told[0].step < 800 and told[0].value == pytest.approx(3.0, abs=0.05)
    assert 3500 < told[1].step < 6500 and told[1].value == pytest.approx(2.0, abs=0.05)


def test_the_loss_history_stays_small_and_can_be_restored_at_any_step() -> None:
    recipe = recipe_with(stability={"window": 8, "plateau_windows": 4}).stability
    detector = StabilityDetector(recipe)
    for step in range(8 * 200 + 3):
        detector.observe(step, 3 + math.sin(step), 1.0, False)
        if step % 97 == 0:
            again = StabilityDetector(recipe)
            again.load_state_dict(json.loads(json.dumps(detector.state_dict())))
            assert again.state_dict() == detector.state_dict()
            detector = again
    assert MOST_BLOCKS / 2 <= len(detector.course.blocks) < MOST_BLOCKS
    assert len(detector.course.blocks) * detector.course.windows == 200
    kept = detector.state_dict()
    as_json = json.dumps(kept)
    for step in range(20):
        detector.observe(step, 3.0, 1.0, False)
    assert json.dumps(kept) == as_json  # a thread writes it while the next steps run
    detector.load_state_dict(kept)
    undisturbed = StabilityDetector(recipe)
    for step in range(8 * 200 + 3):
        undisturbed.observe(step, 3 + math.sin(step), 1.0, False)
    assert undisturbed.state_dict() == detector.state_dict()


def test_a_throughput_drop_is_reported_once_and_not_for_single_slow_steps() -> None:
    detector, noise = ThroughputDetector(DEFAULTS, "here"), random.Random(4)
    rate = lambda step: noise.uniform(80, 120) * (0.1 if step % 50 == 0 or step < 2 else 1.0)  # compilation, saves
    assert [a for step in range(1000) for a in detector.observe(step, rate(step))] == []
    slow = [a for step in range(1000, 1300) for a in detector.observe(step, 0.4 * rate(step))]
    assert [(a.kind, a.step < 1010) for a in slow] == [("throughput_drop", True)]
    assert slow[0].deviations == pytest.approx(slow[0].value / slow[0].usual) and slow[0].deviations < 0.5
    assert [a for step in range(1300, 1400) for a in detector.observe(step, rate(step))] == []
    again = [a for step in range(1400, 1450) for a in detector.observe(step, 0.4 * rate(step))]
    assert len(again) == 1


@pytest.mark.parametrize(("machine", "told"), [("here", ["throughput_drop"]), ("elsewhere", [])])
def test_a_throughput_drop_across_a_restart_is_reported_only_on_the_same_machine(machine: str, told: list[str]) -> None:
    before = ThroughputDetector(DEFAULTS, "here")
    for step in range(100):
        assert before.observe(step, 100.0 + step % 3) == []
    after = ThroughputDetector(DEFAULTS, machine)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    compiling = [after.observe(step, 5.0) for step in range(100, 103)]
    assert compiling == [[]] * 3  # single slow steps are none
    slow = [a for step in range(103, 160) for a in after.observe(step, 40.0)]
    assert [a.kind for a in slow] == told
    again = ThroughputDetector(DEFAULTS, machine)
    again.load_state_dict(json.loads(json.dumps(after.state_dict())))
    assert [a for step in range(160, 200) for a in again.observe(step, 40.0)] == []  # it was told
