"""The judgement of a code change is a pure function; its numbers are held to numpy's."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from factory.core.errors import ConfigError
from factory.core.workspace import code_root
from factory.training.certificate import (
    CertificateEvidence,
    CertificatePolicy,
    Measure,
    Numbers,
    judge_certificate,
    measures,
)

POLICY = CertificatePolicy()
STEPS = 6
TENSORS = ("embedding", "blocks.0.qkv")


def trace(seed: int | None = None, **changes: object) -> Numbers:
    """A run like any other; ``seed`` moves what a seed moves."""
    draw = np.random.default_rng(seed)
    noise = (lambda size: draw.normal(0, 0.05, size)) if seed is not None else np.zeros
    series = {
        "loss": [float(v) for v in np.linspace(4, 3, STEPS) + noise(STEPS)],
        "grad_norm": [float(v) for v in 1 + noise(STEPS)],
        "lr": [0.001] * STEPS,
    }
    moved = {name: float(1 + noise(1)[0]) for name in TENSORS}
    optimizer = {f"exp_avg.{name}": float(2 + noise(1)[0]) for name in TENSORS} | {f"step.{n}": 9.0 for n in TENSORS}
    return replace(Numbers(series, moved, optimizer), **changes)  # type: ignore[arg-type]


def evidence(**changes: object) -> CertificateEvidence:
    made = CertificateEvidence(
        "a" * 40, "b" * 40, ["trainer/model/transformer.py"], 20, STEPS, "segment", (1, 2, 3), trace(), trace(), trace(),
        (trace(1), trace(2), trace(3)), apart=0.0, apart_again=0.0, apart_seeds=0.5,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def changed(name: str, step: int, by: float) -> Numbers:
    values = list(trace().series[name])
    values[step] = math.nan if values[step] is None else values[step] + by  # type: ignore[operator]
    return trace(series=trace().series | {name: values})


def missing(name: str, step: int) -> Numbers:
    values = list(trace().series[name])
    values[step] = None
    return trace(series=trace().series | {name: values})


@pytest.mark.parametrize(
    ("changes", "outcome", "said"),
    [
        ({}, "promote", "same to the last bit"),
        ({"changed": [], "old": None, "new": None, "others": ()}, "promote", "no runs were needed"),
        # harmless: rounding
        ({"new": changed("loss", 3, 1e-6), "apart": 1e-5}, "promote", "Inside seed noise"),
        ({"new": changed("lr", 3, 1e-11)}, "promote", "Inside seed noise: lr"),
        # wrong, each seen by something else
        ({"new": changed("loss", 0, 0.5)}, "reject", "loss (step 20) differs by 0.5"),
        ({"new": changed("loss", 5, 0.5)}, "reject", "loss (step 25) differs by 0.5"),
        ({"new": trace(series=trace().series | {"loss": [v + 0.05 for v in trace().series["loss"]]})}, "reject", "mean loss"),
        ({"new": changed("grad_norm", 2, 1.0)}, "reject", "grad_norm (step 22)"),
        ({"new": changed("lr", 2, 1e-5)}, "reject", "lr (step 22)"),
        ({"apart": 0.6}, "reject", "weights differs by 0.6, between seeds by 0.5: 1.2 of it"),
        ({"new": trace(moved={"embedding": 1.0, "blocks.0.qkv": 0.0})}, "reject", "tensor's update (blocks.0.qkv)"),
        ({"new": trace(moved=dict.fromkeys(TENSORS, 1.3))}, "reject", "length of the update"),
        ({"new": trace(optimizer=trace().optimizer | {"step.embedding": 8.0})}, "reject", "optimiser's step (step.embedding"),
        ({"new": trace(optimizer={k: 2 * v for k, v in trace().optimizer.items()})}, "reject", "optimiser's exp_avg"),
        # not finite, or gone
        ({"new": missing("loss", 4)}, "reject", "loss (step 24) differs by inf"),
        ({"new": trace(series={"lr": [0.001] * STEPS})}, "reject", "loss"),
        ({"apart": math.nan}, "reject", "weights"),
        ({"new": None, "new_failed": "exit 1: RuntimeError: boom"}, "reject", "RuntimeError: boom"),
        # both not finite at the same step: the same
        ({"old": missing("loss", 4), "again": missing("loss", 4), "new": missing("loss", 4)}, "promote", "to the last bit"),
        # no evidence
        ({"old": None, "old_failed": "exit 2: no such key"}, "hold", "no such key"),
        ({"others": (trace(1), trace(2))}, "hold", "over 2 seeds, 3 are needed"),
        ({"others": (trace(1),) * 3}, "hold", "no noise to compare with: loss"),
        ({"others": (trace(1), trace(2), missing("grad_norm", 0)), "apart_seeds": math.nan}, "hold", "weights"),
        ({"apart_seeds": 0.0}, "hold", "weights"),
        ({"others": tuple(trace(s, series={"loss": [None] * STEPS, "lr": [1.0] * STEPS}) for s in (1, 2, 3))}, "hold", "loss"),
        ({"old": trace(series={"loss": [None] * STEPS})}, "hold", "no losses"),
        ({"steps": 0}, "hold", "no losses"),
        # a witness that the new code no longer leaves: a person decides
        ({"new": trace(series={"loss": trace().series["loss"]})}, "hold", "no longer leaves what it is judged by: grad_norm, lr"),
        # what only the new code writes is not compared, and said
        ({"old": trace(series={"loss": trace().series["loss"]})}, "promote", "Not compared, because only one of them left it: grad_norm, lr"),
    ],
)  # fmt: skip
def test_judgement(changes: dict[str, object], outcome: str, said: str) -> None:
    found = judge_certificate(POLICY, evidence(**changes))
    assert found.outcome == outcome, found.reasons
    assert said in " ".join(found.reasons)


def test_state_that_only_one_of_them_has_is_named() -> None:
    more = trace(optimizer=trace().optimizer | {f"momentum.{name}": 1.0 for name in TENSORS})
    added = judge_certificate(POLICY, evidence(new=more))
    assert added.outcome == "promote"
    assert "left it: 2 tensors of the optimiser's state, first momentum.blocks.0.qkv" in added.reasons[-1]
    renamed = trace(optimizer={name.replace("exp_avg", "momentum"): value for name, value in trace().optimizer.items()})
    lost = judge_certificate(POLICY, evidence(new=renamed))
    assert lost.outcome == "hold" and "judged by: exp_avg.blocks.0.qkv, exp_avg.embedding" in lost.reasons[0]


def test_a_tighter_policy_refuses_what_the_noise_would_let_through() -> None:
    made = evidence(apart=0.3)
    assert judge_certificate(POLICY, made).outcome == "promote"
    assert judge_certificate(CertificatePolicy(share_of_noise=0.5), made).outcome == "reject"


def test_the_noise_is_numpys_root_mean_square_over_pairs() -> None:
    made = evidence(new=changed("loss", 1, 0.02), apart=0.1)
    found = {m.name: m for m in measures(made)}
    losses = np.array([one.series["loss"] for one in made.others])
    pairs = losses[[0, 0, 1]] - losses[[1, 2, 2]]
    assert found["loss"].noise == pytest.approx(np.sqrt((pairs**2).mean()))
    assert found["loss"].difference == pytest.approx(0.02) and found["loss"].where == "step 21"
    assert found["mean loss"].noise == pytest.approx(np.sqrt((pairs.mean(1) ** 2).mean()))
    lengths = np.array([np.sqrt(sum(v * v for v in one.moved.values())) for one in made.others])
    assert found["length of the update"].noise == pytest.approx(
        np.sqrt(((lengths[[0, 0, 1]] - lengths[[1, 2, 2]]) ** 2).mean())
    )
    assert found["weights"] == Measure("weights", 0.1, 0.5, 0.0) and found["weights"].share == pytest.approx(0.2)


NAMES = [m.name for m in measures(evidence())]


@given(st.floats(0, 3), st.floats(0.01, 1))
def test_further_apart_is_never_better(apart: float, share: float) -> None:
    policy = CertificatePolicy(share_of_noise=share)
    near, far = (judge_certificate(policy, evidence(apart=apart * more)).outcome for more in (1, 1.5))
    assert near == "promote" or far == "reject"
    assert (near == "promote") == (apart <= share * 0.5)


@given(st.sampled_from(["loss", "grad_norm"]), st.integers(0, STEPS - 1), st.floats(1e-9, 9) | st.floats(-9, -1e-9))
def test_one_step_outside_is_found_wherever_it_is(name: str, step: int, by: float) -> None:
    found = judge_certificate(POLICY, evidence(new=changed(name, step, by)))
    noise = {m.name: m for m in found.measures}[name].noise
    if abs(by) > noise * (1 + 1e-9):
        assert found.outcome == "reject" and any(f"step {20 + step}" in reason for reason in found.reasons)


def test_the_policy_file_is_the_documented_default_and_cannot_be_loosened(tmp_path: Path) -> None:
    assert CertificatePolicy.load(code_root() / "policies" / "gates" / "certificate.yaml") == POLICY
    for words in ("seeds: 2", "share_of_noise: 1.5", "steps: 0", "stesp: 20"):
        (tmp_path / "certificate.yaml").write_text(words)
        with pytest.raises(ConfigError):
            CertificatePolicy.load(tmp_path / "certificate.yaml")
