"""The judgement of a code change is a pure function. Its numbers equal those of numpy."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from factory.core.errors import ConfigError
from factory.core.workspace import find_checkout_root
from factory.training.certificate import (
    CertificateEvidence,
    CertificatePolicy,
    JudgedRunNumbers,
    RunDifference,
    compute_run_differences,
    judge_certificate,
)
from tests.support.messages import the

POLICY = CertificatePolicy()
STEPS = 6
OUTSIDE, near = "outside_noise", pytest.approx
TENSORS = ("embedding", "blocks.0.qkv")


def trace(seed: int | None = None, **changes: object) -> JudgedRunNumbers:
    """A run; ``seed`` changes the numbers that depend on the seed."""
    draw = np.random.default_rng(seed)
    noise = (lambda size: draw.normal(0, 0.05, size)) if seed is not None else np.zeros
    series = {
        "loss": [float(v) for v in np.linspace(4, 3, STEPS) + noise(STEPS)],
        "grad_norm": [float(v) for v in 1 + noise(STEPS)],
        "lr": [0.001] * STEPS,
    }
    moved = {name: float(1 + noise(1)[0]) for name in TENSORS}
    optimizer = {f"exp_avg.{name}": float(2 + noise(1)[0]) for name in TENSORS} | {f"step.{n}": 9.0 for n in TENSORS}
    return replace(JudgedRunNumbers(series, moved, optimizer), **changes)  # type: ignore[arg-type]


def evidence(**changes: object) -> CertificateEvidence:
    made = CertificateEvidence(
        "a" * 40, "b" * 40, ["trainer/model/transformer.py"], 20, STEPS, "segment", (1, 2, 3), trace(), trace(), trace(),
        (trace(1), trace(2), trace(3)), apart=0.0, apart_again=0.0, apart_seeds=0.5,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def changed(name: str, step: int, by: float) -> JudgedRunNumbers:
    values = list(trace().series[name])
    values[step] = math.nan if values[step] is None else values[step] + by  # type: ignore[operator]
    return trace(series=trace().series | {name: values})


def missing(name: str, step: int) -> JudgedRunNumbers:
    values = list(trace().series[name])
    values[step] = None
    return trace(series=trace().series | {name: values})


@pytest.mark.parametrize(
    ("changes", "outcome", "code", "data"),
    [
        ({}, "promote", "same_bits", {"steps": STEPS}),
        ({"changed": [], "old": None, "new": None, "others": ()}, "promote", "no_change", {}),
        # harmless: rounding
        ({"new": changed("loss", 3, 1e-6), "apart": 1e-5}, "promote", "inside_noise", {}),
        ({"new": changed("lr", 3, 1e-11)}, "promote", "inside_noise", {"measure": "lr"}),
        # wrong changes, each with the measure that shows it
        ({"new": changed("loss", 0, 0.5)}, "reject", OUTSIDE, {"measure": "loss", "place": " (step 20)", "difference": near(0.5)}),
        ({"new": changed("loss", 5, 0.5)}, "reject", OUTSIDE, {"measure": "loss", "place": " (step 25)", "difference": near(0.5)}),
        ({"new": trace(series=trace().series | {"loss": [v + 0.05 for v in trace().series["loss"]]})}, "reject", OUTSIDE, {"measure": "mean loss"}),
        ({"new": changed("grad_norm", 2, 1.0)}, "reject", OUTSIDE, {"measure": "grad_norm", "place": " (step 22)"}),
        ({"new": changed("lr", 2, 1e-5)}, "reject", OUTSIDE, {"measure": "lr", "place": " (step 22)"}),
        ({"apart": 0.6}, "reject", OUTSIDE, {"measure": "weights", "difference": 0.6, "noise": 0.5, "share": near(1.2)}),
        ({"new": trace(moved={"embedding": 1.0, "blocks.0.qkv": 0.0})}, "reject", OUTSIDE,
         {"measure": "tensor's update length", "place": " (blocks.0.qkv)"}),
        ({"new": trace(moved=dict.fromkeys(TENSORS, 1.3))}, "reject", OUTSIDE, {"measure": "length of the update"}),
        ({"new": trace(optimizer=trace().optimizer | {"step.embedding": 8.0})}, "reject", OUTSIDE,
         {"measure": "optimiser's step", "place": " (step.embedding)"}),
        ({"new": trace(optimizer={k: 2 * v for k, v in trace().optimizer.items()})}, "reject", OUTSIDE, {"measure": "optimiser's exp_avg"}),
        # not finite, or missing
        ({"new": missing("loss", 4)}, "reject", OUTSIDE, {"measure": "loss", "place": " (step 24)", "difference": math.inf}),
        ({"new": trace(series={"lr": [0.001] * STEPS})}, "reject", OUTSIDE, {"measure": "loss"}),
        ({"apart": math.nan}, "reject", OUTSIDE, {"measure": "weights"}),
        ({"new": None, "new_failed": "exit 1: RuntimeError: boom"}, "reject", "new_code_failed", {"why": "exit 1: RuntimeError: boom"}),
        # both not finite at the same step: equal
        ({"old": missing("loss", 4), "again": missing("loss", 4), "new": missing("loss", 4)}, "promote", "same_bits", {}),
        # no evidence
        ({"old": None, "old_failed": "exit 2: no such key"}, "hold", "old_code_failed", {"why": "exit 2: no such key"}),
        ({"others": (trace(1), trace(2))}, "hold", "too_few_seeds", {"measured": 2, "needed": 3}),
        ({"others": (trace(1),) * 3}, "hold", "no_noise", {"measures": ["loss"]}),
        ({"others": (trace(1), trace(2), missing("grad_norm", 0)), "apart_seeds": math.nan}, "hold", "no_noise", {"measures": ["weights"]}),
        ({"apart_seeds": 0.0}, "hold", "no_noise", {"measures": ["weights"]}),
        ({"others": tuple(trace(s, series={"loss": [None] * STEPS, "lr": [1.0] * STEPS}) for s in (1, 2, 3))}, "hold", "no_noise", {}),
        ({"old": trace(series={"loss": [None] * STEPS})}, "hold", "no_losses", {}),
        ({"steps": 0}, "hold", "no_losses", {}),
        # the new code no longer writes a measure: a person decides
        ({"new": trace(series={"loss": trace().series["loss"]})}, "hold", "measures_lost", {"lost": ["grad_norm", "lr"]}),
        # series that only the new code writes are not compared, and named
        ({"old": trace(series={"loss": trace().series["loss"]})}, "promote", "series_not_compared", {"series": ["grad_norm", "lr"]}),
    ],
)  # fmt: skip
def test_the_evidence_determines_the_outcome_and_the_reason(
    changes: dict[str, object], outcome: str, code: str, data: dict[str, object]
) -> None:
    found = judge_certificate(POLICY, evidence(**changes))
    assert found.outcome == outcome, found.reasons
    same = [reason.data for reason in found.reasons if reason.code == f"training.certificate.{code}"]
    assert any(data == {name: said[name] for name in data} for said in same), found.reasons


def test_state_that_only_one_commit_writes_is_named() -> None:
    more = trace(optimizer=trace().optimizer | {f"momentum.{name}": 1.0 for name in TENSORS})
    added = judge_certificate(POLICY, evidence(new=more))
    assert added.outcome == "promote"
    assert the(added.reasons, "training.certificate.state_not_compared").data == {
        "tensors": 2,
        "first": "momentum.blocks.0.qkv",
    }
    renamed = trace(optimizer={name.replace("exp_avg", "momentum"): value for name, value in trace().optimizer.items()})
    lost = judge_certificate(POLICY, evidence(new=renamed))
    assert lost.outcome == "hold"
    assert the(lost.reasons, "training.certificate.measures_lost").data["lost"] == [
        "exp_avg.blocks.0.qkv",
        "exp_avg.embedding",
    ]


def test_a_tighter_policy_refuses_a_difference_inside_the_noise() -> None:
    made = evidence(apart=0.3)
    assert judge_certificate(POLICY, made).outcome == "promote"
    assert judge_certificate(CertificatePolicy(share_of_noise=0.5), made).outcome == "reject"


def test_the_noise_equals_numpys_root_mean_square_over_pairs_of_seeds() -> None:
    made = evidence(new=changed("loss", 1, 0.02), apart=0.1)
    found = {m.name: m for m in compute_run_differences(made)}
    losses = np.array([one.series["loss"] for one in made.others])
    pairs = losses[[0, 0, 1]] - losses[[1, 2, 2]]
    assert found["loss"].noise == pytest.approx(np.sqrt((pairs**2).mean()))
    assert found["loss"].difference == pytest.approx(0.02) and found["loss"].where == "step 21"
    assert found["mean loss"].noise == pytest.approx(np.sqrt((pairs.mean(1) ** 2).mean()))
    lengths = np.array([np.sqrt(sum(v * v for v in one.moved.values())) for one in made.others])
    assert found["length of the update"].noise == pytest.approx(
        np.sqrt(((lengths[[0, 0, 1]] - lengths[[1, 2, 2]]) ** 2).mean())
    )
    assert found["weights"] == RunDifference("weights", 0.1, 0.5, 0.0) and found[
        "weights"
    ].multiple_of_noise == pytest.approx(0.2)


NAMES = [m.name for m in compute_run_differences(evidence())]


@given(st.floats(0, 3), st.floats(0.01, 1))
def test_a_larger_difference_is_never_judged_better(apart: float, share: float) -> None:
    policy = CertificatePolicy(share_of_noise=share)
    near, far = (judge_certificate(policy, evidence(apart=apart * more)).outcome for more in (1, 1.5))
    assert near == "promote" or far == "reject"
    assert (near == "promote") == (apart <= share * 0.5)


@given(st.sampled_from(["loss", "grad_norm"]), st.integers(0, STEPS - 1), st.floats(1e-9, 9) | st.floats(-9, -1e-9))
def test_a_difference_at_any_single_step_is_found(name: str, step: int, by: float) -> None:
    found = judge_certificate(POLICY, evidence(new=changed(name, step, by)))
    noise = {m.name: m for m in found.measures}[name].noise
    if abs(by) > noise * (1 + 1e-9):
        assert found.outcome == "reject" and any(f"step {20 + step}" in reason for reason in found.reasons)


def test_the_policy_file_is_the_documented_default_and_cannot_be_loosened(tmp_path: Path) -> None:
    assert CertificatePolicy.load(find_checkout_root() / "policies" / "gates" / "certificate.yaml") == POLICY
    for words in ("seeds: 2", "share_of_noise: 1.5", "steps: 0", "stesp: 20"):
        (tmp_path / "certificate.yaml").write_text(words)
        with pytest.raises(ConfigError):
            CertificatePolicy.load(tmp_path / "certificate.yaml")
