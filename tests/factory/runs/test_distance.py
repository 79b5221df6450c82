"""The distance of two runs equals a separate computation with numpy."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from factory.runs.distance import (
    TensorDistance,
    find_different_weights,
    find_unmatched_tensor,
    find_value_differences,
    have_same_bits,
    measure_checkpoint_distance,
    measure_norm_error,
    measure_tensor_distances,
    measure_tensor_norms,
    save_perturbed_checkpoint,
    sum_distances,
    sum_moment_distances_by_kind,
)
from trainer.contract.checkpoint.format import Checkpoint, load_checkpoint, save_checkpoint


def left(seed: int, **more: torch.Tensor) -> Checkpoint:
    draw = torch.Generator().manual_seed(seed)
    model = {name: torch.randn(4, 3, generator=draw) for name in ("a", "b")}
    optimizer = {
        f"{kind}.{name}": torch.randn(4, 3, generator=draw) for kind in ("exp_avg", "exp_avg_sq") for name in "ab"
    }
    return Checkpoint(model | more, optimizer | {"rng": torch.zeros(2, dtype=torch.uint8)}, {"step": 4})


def test_weights_are_compared_by_their_change_since_the_start_and_moments_directly() -> None:
    one, two, begun, other = (left(seed) for seed in range(4))
    found = measure_checkpoint_distance(one, two, begun.model, other.model)
    a, b, c, d = (x.model["a"].double().numpy() for x in (one, two, begun, other))
    assert found.weights["a"].apart == pytest.approx(np.linalg.norm((b - d) - (a - c)), rel=1e-12)
    assert found.weights["a"].size == pytest.approx(np.linalg.norm(a - c), rel=1e-12)
    m, n = (x.optimizer["exp_avg.a"].double().numpy() for x in (one, two))
    assert found.list_relative_distances_by_tensor()["exp_avg.a"] == pytest.approx(
        np.linalg.norm(n - m) / np.linalg.norm(m), rel=1e-12
    )
    assert "rng" not in found.moments
    whole = sum_distances(measure_tensor_distances(one.model, two.model).values())
    both = [np.concatenate([x.model[n].double().numpy().ravel() for n in "ab"]) for x in (one, two)]
    assert whole.apart == pytest.approx(np.linalg.norm(both[1] - both[0]), rel=1e-12)
    kinds = sum_moment_distances_by_kind(found.moments)
    assert kinds.keys() == {"exp_avg", "exp_avg_sq"}
    assert kinds["exp_avg"].apart == pytest.approx(math.hypot(*(found.moments[f"exp_avg.{n}"].apart for n in "ab")))
    assert measure_tensor_norms(one.model)["a"] == pytest.approx(np.linalg.norm(a))


def test_a_tensor_without_counterpart_is_infinitely_far() -> None:
    one = left(0)
    for other in (left(0, c=torch.ones(2)), left(0, a=torch.ones(2))):
        assert (
            math.inf in measure_checkpoint_distance(one, other).list_relative_distances_by_tensor().values()
            and math.inf in measure_checkpoint_distance(other, one).list_relative_distances_by_tensor().values()
        )
        assert (
            find_unmatched_tensor(one, other)
            and not have_same_bits(one, other)
            and find_different_weights(one.model, other.model)
        )
    assert measure_tensor_distances(one.model, one.model, {"a": one.model["a"]})["b"].relative_distance == math.inf, (
        "it is not known where b began"
    )


def test_checkpoints_that_differ_in_one_bit_are_not_the_same() -> None:
    one, two = left(0), left(0)
    assert (
        have_same_bits(one, two)
        and not find_different_weights(one.model, two.model)
        and set(measure_checkpoint_distance(one, two).list_relative_distances_by_tensor().values()) == {0.0}
    )
    two.optimizer["rng"][0] += 1
    assert not have_same_bits(one, two), "the generator counts, though it is no distance"
    two = left(0)
    two.model["b"][0, 0] = torch.nextafter(two.model["b"][0, 0], torch.tensor(9.0))
    assert not have_same_bits(one, two) and find_different_weights(one.model, two.model) == ["b"]
    assert 0 < measure_checkpoint_distance(one, two).weights["b"].relative_distance < 1e-6


def test_the_distance_of_a_tensor_with_a_nan_is_infinite() -> None:
    one, two = left(0), left(0)
    two.model["a"][0, 0] = math.nan
    assert not measure_checkpoint_distance(one, two).weights["a"].relative_distance <= 1e9 and not have_same_bits(
        two, two
    )


def test_a_perturbed_checkpoint_differs_by_one_rounding_in_the_weights_and_in_nothing_else(tmp_path: Path) -> None:
    straight = save_checkpoint(tmp_path / "straight", left(0))
    one, two = (save_perturbed_checkpoint(straight, tmp_path / str(seed), 2.0**-9, seed) for seed in (1, 2))
    held, made = load_checkpoint(straight), load_checkpoint(one)
    shares = ((made.model["a"] - held.model["a"]) / held.model["a"]).abs()
    assert torch.allclose(shares, torch.full_like(shares, 2.0**-9), rtol=1e-3)
    assert (
        all(made.optimizer[name].equal(tensor) for name, tensor in held.optimizer.items()) and made.state == held.state
    )
    assert find_different_weights(made.model, load_checkpoint(two).model) == ["a", "b"]
    before = (one / "manifest.json").stat().st_mtime_ns
    assert (
        save_perturbed_checkpoint(straight, tmp_path / "1", 2.0**-9, 1) == one
        and (one / "manifest.json").stat().st_mtime_ns == before
    )


def test_the_share_of_a_zero_size_is_zero_or_infinite() -> None:
    assert (
        TensorDistance(0.0, 0.0).relative_distance == 0.0
        and TensorDistance(1.0, 0.0).relative_distance == TensorDistance(math.nan, 1.0).relative_distance == math.inf
    )


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        *((2.0, odd, [("x: loss", math.inf)]) for odd in (math.nan, math.inf, "2.0", None, 2, [2.0])),
        (2.0, 2.5, [("x: loss", 0.2)]),
        ([1.0, {"a": 4.0}], [1.0, {"a": 3.0}], [("x: loss[1]: a", 0.25)]),
        ([1.0], [1.0, 2.0], [("x: loss", math.inf)]),
        (math.nan, math.nan, []),
    ],
)
def test_recorded_values_that_differ_have_the_expected_distances(
    one: object, other: object, found: list[tuple[str, float]]
) -> None:
    """A value that is not a finite number is never a small difference. Of clocks only the type counts."""
    sides = ({"loss": value, "time": time} for value, time in ((one, 5.0), (other, 7.0)))
    told = list(find_value_differences(*sides, {"time"}, "x"))
    assert [
        (what[: len(name)], far.relative_distance) for (what, far), (name, _) in zip(told, found, strict=True)
    ] == found
    assert [far.relative_distance for _, far in find_value_differences({"time": 5.0}, {"time": "fast"}, {"time"})] == [
        math.inf
    ]


def test_the_error_of_a_norm_is_that_of_the_tensor_whose_fp32_sum_is_the_most_wrong() -> None:
    exact = {"ones": torch.ones(1 << 12), "steps": torch.tensor(3), "empty": torch.zeros(0), "nothing": torch.zeros(8)}
    assert measure_norm_error(exact) == 0.0
    assert measure_norm_error(exact | {"lost": torch.tensor([1.0, math.nan])}) == 0.0
    long = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
    assert 2.0**-26 < measure_norm_error({"ones": torch.ones(4), "long": long}) < (1 << 20) * 2.0**-24, "Higham's bound"
