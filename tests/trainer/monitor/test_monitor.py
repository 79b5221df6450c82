"""Compares each number of the monitor with the same number computed in another way."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.trainer.segments import MakeShard
from tests.support.trainer.small_models import ALONE, run_of
from trainer.batch import Batch, make_batch
from trainer.monitor.hook import UpdateOutcome, WeightUpdate, copy_numbers_to_host
from trainer.monitor.monitor import TURN_STEPS, UpdateMonitor, find_layer_of_parameter
from trainer.optim.optimizer import Optimizer, compute_sums_of_squares
from trainer.run import SegmentRun

LONG = pytest.mark.long("200 steps beside two batches each; the cheapest way to train is in the fast tier")
EXPERTS = {"count": 4, "per_token": 2, "d_ff": 16}


def test_the_noise_scale_is_that_of_a_known_gradient_and_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """g = G + noise of covariance Σ / tokens, with halves and batches of changing size, per round of all layers."""
    monkeypatch.setattr("trainer.monitor.monitor.TURN_STEPS", 1)
    parameters = {"blocks.0.q": (40, 30), "blocks.1.q": (20, 10), "embedding": (50, 20)}
    held = {name: nn.Parameter(torch.zeros(shape)) for name, shape in parameters.items()}
    optimizer = Optimizer.__new__(Optimizer)
    optimizer.parameters = held
    monitor = UpdateMonitor(optimizer, ALONE)
    generator = torch.Generator().manual_seed(0)
    draw = lambda name: torch.randn(parameters[name], generator=generator)
    signal = {name: 0.1 * draw(name) for name in held}
    spread = {
        name: (1 + 3 * torch.rand(parameters[name], generator=generator)) for name in held
    }  # sqrt of Σ's diagonal
    truth = sum(float(s.square().sum()) for s in spread.values()) / sum(
        float(g.square().sum()) for g in signal.values()
    )
    scales = []
    for step in range(3 * 400):
        tokens = 2000 if step < 600 else 6000
        first = tokens // 2 if step % 2 else tokens // 5
        one, two = (
            {n: (signal[n] + spread[n] * draw(n) / math.sqrt(part)) * part / tokens for n in held}
            for part in (first, tokens - first)
        )
        for n, parameter in held.items():
            parameter.grad = one[n]
        measured = monitor.after_half_batch(step, False)
        for n, parameter in held.items():
            parameter.grad = one[n] + two[n]
        update = WeightUpdate(step, optimizer.gradients(), compute_sums_of_squares(optimizer.gradients()))
        monitor.before_update(update)
        (numbers,) = copy_numbers_to_host(monitor.after_update(update))
        record = monitor.record(numbers, UpdateOutcome(tokens, first if measured else 0, False))
        if step >= 3:
            scales.append(record["noise_scale"])
    for part_of_run in (scales[60:600], scales[660:]):
        assert sum(part_of_run) / len(part_of_run) == pytest.approx(truth, rel=0.05)


def two_batches(run: SegmentRun, batch: Batch) -> tuple[float, float]:
    """(tr(Σ), |G|²) of the weights as they are: McCandlish et al., arXiv 1812.06162, appendix A.1, eq. A.1 and A.2.

    Each half of the batch once as the small batch; gradients of their own losses, by autograd.
    """
    halves = []
    for part in batch.split_into_micro_batches(len(batch.tokens_BT) // 2):
        part.pop("domains_BT")
        carries = (part.pop("weights_BT") > 0).float()
        loss, _, _ = run.model.loss(**part, weights_BT=carries / carries.sum(), z_loss=run.recipe.stability.z_loss)
        gradients = torch.autograd.grad(loss, list(run.model.parameters()))
        halves.append((float(carries.sum()), torch.cat([g.flatten() for g in gradients]).double()))
    (n, g), (m, h) = halves
    big, tokens = (n * g + m * h) / (n + m), n + m
    square = lambda x: float(x @ x)
    signals = [(tokens * square(big) - b * square(x)) / (tokens - b) for b, x in halves]
    noises = [(square(x) - square(big)) / (1 / b - 1 / tokens) for b, x in halves]
    return sum(noises) / 2, sum(signals) / 2


@pytest.mark.parametrize(
    ("name", "clip", "rows", "every"),
    [
        pytest.param("adamw", 1e9, 4, 0, marks=LONG),
        pytest.param("adamw", 0.2, 4, 0, marks=LONG),
        pytest.param("muon", 1.0, 4, 0, marks=LONG),
        ("adamw", 1.0, None, 2),
    ],
)
def test_the_noise_scale_of_a_run_equals_an_estimate_from_two_batch_sizes(
    tmp_path: Path,
    make_shard: MakeShard,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    clip: float,
    rows: int | None,
    every: int,
) -> None:
    """At a training rate, clipped or not: the mean of 120 steps, over which the truth itself changes several times.

    With four micro-batches a step, or with one that is split at every second step.
    """
    monkeypatch.setattr("trainer.monitor.monitor.SMOOTHING", 0.0)
    monkeypatch.setattr("trainer.monitor.monitor.TURN_STEPS", 1)
    changes = {"batch__sequences": 16, "batch__micro_sequences": rows, "optimizer__name": name}
    changes |= {"stability__noise_scale_every": every, "stability__grad_clip": clip, "stability__skip_deviations": 1e9}
    run = run_of(tmp_path, make_shard, 1500, **changes)
    ours, theirs = [], []
    for step in range(200):
        batch = make_batch(run.order)
        if step >= 80:
            theirs.append(two_batches(run, batch))
        run.train_step(batch)
        if step >= 80:
            ours.append(run.monitor.compute_noise_and_signal())
    of = lambda pairs: sum(noise for noise, _ in pairs) / sum(signal for _, signal in pairs)
    assert of(ours) == pytest.approx(of(theirs), rel=0.15)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer__name": "muon", "batch__micro_sequences": 2, "stability__grad_clip": 0.1},
        {"model__experts": EXPERTS, "batch__micro_sequences": 4},
    ],
    ids=["plain", "muon-clipped", "experts"],
)
def test_norms_and_ratios_equal_those_computed_from_all_weights(
    tmp_path: Path, make_shard: MakeShard, changes: dict[str, Any]
) -> None:
    run = run_of(tmp_path, make_shard, **changes)
    seen = set()
    for step in range(2 * TURN_STEPS * len(run.monitor.layers)):
        batch = make_batch(run.order)
        by_layer = gradient_squares(run, batch)
        before = {n: p.detach().double() for n, p in run.model.named_parameters()}
        record = run.train_step(batch)
        for layer, square in by_layer.items():
            assert record[f"grad_norm/{layer}"] == pytest.approx(math.sqrt(square), rel=1e-4)
        assert record["grad_norm"] == pytest.approx(math.sqrt(sum(by_layer.values())), rel=1e-4)
        written = [key for key in record if key.startswith("update_ratio/")]
        assert len(written) == (step % TURN_STEPS == 0)
        if not written:
            continue
        layer = written[0].partition("/")[2]
        moved = norm(
            [p.detach() - before[n] for n, p in run.model.named_parameters() if find_layer_of_parameter(n) == layer]
        )
        held = norm([before[n] for n in before if find_layer_of_parameter(n) == layer])
        assert record[written[0]] == pytest.approx(moved / held, rel=1e-4) and moved > 0
        seen.add(layer)
    assert seen == {"embedding", "blocks.0", "blocks.1"}
    assert "noise_scale" in record


def test_a_split_step_computes_the_same_as_a_whole_one(tmp_path: Path, make_shard: MakeShard) -> None:
    """Only the order of the sums differs; with an odd number of rows, and when it is switched off, not even that."""

    def records(name: str, rows: int, every: int) -> list[dict[str, Any]]:
        changes = {"batch__sequences": rows, "stability__noise_scale_every": every}
        run = run_of(tmp_path / name, make_shard, **changes)
        return [run.train_step(make_batch(run.order)) for _ in range(8)]

    whole, split = records("whole", 8, 0), records("split", 8, 4)
    for mine, other in zip(whole, split):
        shared = [key for key in mine if key not in ("kind", "memory", "noise_scale")]
        assert [other[key] for key in shared] == pytest.approx([mine[key] for key in shared], rel=1e-3, abs=1e-5)
    assert ["noise_scale" in record for record in split] == [False] * 3 + [True] * 5
    assert not any("noise_scale" in record for record in whole + records("odd", 7, 4))
    assert len({record["noise_scale"] for record in split[3:7]}) == 1  # until the next split step


def gradient_squares(run: SegmentRun, batch: Batch) -> dict[str, float]:
    """Σ gradient² by layer, by autograd over the whole batch at once."""
    part = batch.split_into_micro_batches(None)[0]
    part.pop("domains_BT")
    experts = run.recipe.model.experts
    z_share = experts.z_loss / batch.tokens_BT.numel() if experts else 0.0
    loss, _, _ = run.model.loss(**part, z_loss=run.recipe.stability.z_loss, router_z_share=z_share)
    names, parameters = zip(*run.model.named_parameters())
    found: dict[str, float] = {}
    for name, gradient in zip(names, torch.autograd.grad(loss, parameters)):
        found[find_layer_of_parameter(name)] = found.get(find_layer_of_parameter(name), 0.0) + float(
            gradient.double().square().sum()
        )
    return found


def norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def test_a_skipped_step_changes_no_state_and_has_an_update_ratio_of_zero(tmp_path: Path, make_shard: MakeShard) -> None:
    run = run_of(tmp_path, make_shard, batch__micro_sequences=4)
    for _ in range(4 * TURN_STEPS):
        run.train_step(make_batch(run.order))
    state = json.dumps(run.monitor.state_dict())
    weights = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    batch = make_batch(run.order)
    batch.weights_BT[0, 0] = math.nan
    record = run.train_step(batch)
    assert record["skipped"] and [v for k, v in record.items() if k.startswith("update_ratio")] == [0.0]
    assert json.dumps(run.monitor.state_dict()) == state
    assert all(torch.equal(p, weights[n]) for n, p in run.model.named_parameters())
    assert math.isfinite(record["noise_scale"]) and not run.train_step(make_batch(run.order))["skipped"]


def test_the_monitors_state_survives_json(tmp_path: Path, make_shard: MakeShard) -> None:
    run = run_of(tmp_path, make_shard, batch__micro_sequences=4)
    for _ in range(5 * TURN_STEPS):
        run.train_step(make_batch(run.order))
    again = UpdateMonitor(run.optimizer, ALONE)
    again.load_state_dict(json.loads(json.dumps(run.monitor.state_dict())))
    numbers = {"grad_norms": [1.0, 2.0, 3.0]}
    outcome = UpdateOutcome(100, 0.0, False)
    assert again.record(numbers, outcome) == run.monitor.record(numbers, outcome)
    assert again.record(numbers, outcome) != UpdateMonitor(run.optimizer, ALONE).record(numbers, outcome)
