"""The decision on a window, as a table, and the comparison of live training's records with the replay's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from factory.audit.judge import judge_audit
from factory.audit.live_records import find_anomaly_difference, find_metrics_difference, read_whole_trace
from factory.audit.policy import AuditPolicy
from factory.runs.distance import find_unmatched_tensor, have_same_bits
from factory.runs.trace import RunTrace
from factory.runs.untrusted_files import UntrustedFileError
from kernels.contract.message import Message
from tests.support.messages import refused
from trainer.contract.checkpoint.format import Checkpoint, save_checkpoint

POLICY = AuditPolicy()
ROUNDED = {"drift": 1e-4, "moments": {"exp_avg": 1e-5, "exp_avg_sq": 0.0}}
NEAR = {
    "steps": 20,
    "same_bits": False,
    "told": [],
    "drift": 1e-4,
    "moments": {"exp_avg": 1e-5, "exp_avg_sq": 1e-7},
    "rounding": [ROUNDED],
}
SAME = {"same_bits": True, "drift": 0.0}


@pytest.mark.parametrize(
    ("changed", "outcome"),
    [
        ({}, "promote"),
        ({"same_bits": True}, "promote"),
        ({"missing": "the replay failed: out of time"}, "hold"),
        ({"missing": "the replay failed", "told": ["no lines"], "again": SAME}, "hold"),
        ({"drift": 5e-4}, "hold"),  # more than four times the effect of rounding; not confirmed
        ({"drift": 5e-4, "again": SAME}, "reject"),
        ({"drift": 3e-4, "again": SAME}, "promote"),
        (
            {"drift": 5e-4, "claimed": 0.4, "gate_steps": 10, "again": SAME},
            "reject",
        ),  # what the gate measured allows nothing
        ({"drift": 5e-4, "rounding": [ROUNDED, ROUNDED | {"drift": 2e-4}], "again": SAME}, "promote"),
        ({"drift": 4e-6, "rounding": [ROUNDED | {"drift": 0.0}]}, "promote"),  # less than a ten-thousandth of a step
        ({"drift": 6e-6, "rounding": [ROUNDED | {"drift": 0.0}], "again": SAME}, "reject"),
        ({"drift": 0.05, "rounding": [ROUNDED | {"drift": 0.02}], "again": SAME}, "promote"),
        ({"drift": 0.05, "rounding": [ROUNDED | {"drift": 0.07}], "again": SAME}, "hold"),  # too much hides in rounding
        ({"drift": 0.30, "rounding": [ROUNDED | {"drift": 0.07}], "again": SAME}, "reject"),
        ({"moments": {"exp_avg": 5e-5}, "again": SAME}, "reject"),
        ({"moments": {"exp_avg_sq": 2e-6}, "again": SAME}, "reject"),
        ({"moments": {"exp_avg": float("nan")}, "again": SAME}, "reject"),
        ({"moments": {"momentum": 1e-5}, "again": SAME}, "reject"),  # of a kind that rounding left alone
        ({"drift": 5e-4, "again": {"same_bits": False, "drift": 4e-4}}, "hold"),  # a device that adds in any order
        ({"drift": 5e-4, "again": {"same_bits": False, "drift": 1e-4}}, "reject"),
        ({"drift": 5e-4, "again": {"missing": "out of time"}}, "hold"),
        ({"drift": float("nan"), "again": SAME}, "reject"),
        ({"told": ["metrics.jsonl has no line of step 7"], "same_bits": True, "again": SAME}, "reject"),
        ({"told": ["metrics.jsonl has no line of step 7"]}, "hold"),
        ({"exact": True, "again": SAME}, "reject"),  # live code does it every time, the gate saw the same bits
        ({"exact": False, "again": SAME}, "promote"),  # live code does not repeat itself: bits are no evidence
    ],
)
def test_evidence_leads_to_the_expected_verdict(changed: dict[str, Any], outcome: str) -> None:
    verdict = judge_audit(POLICY, NEAR | changed)
    assert verdict.outcome == outcome, verdict
    assert verdict.reasons and all(isinstance(reason, Message) for reason in verdict.reasons)


LINES = [
    {"step": step, "kind": "trunk", "tokens": 100 * step, "loss": 4.0 - step / 10, "loss/code": 3.0, "z_loss": 1e-7, "grad_norm": 1.0, "lr": 1e-3,
     "skipped": False, "tokens_per_s": 1.0, "time": 1.0, "memory": 5}
    for step in range(4, 9)
]  # fmt: skip
ANOMALIES = [{"step": 6, "kind": "loss_spike"}, {"step": 7, "kind": "throughput_drop"}]


def trace(
    folder: Path,
    change: Callable[[list[dict[str, Any]]], object] = lambda lines: None,
    weights: float = 1.0,
    anomalies: Any = ANOMALIES,
) -> RunTrace:
    """What steps 5, 6 and 7 of a segment left."""
    folder.mkdir()
    lines = [dict(line) for line in LINES]
    change(lines)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "anomalies.jsonl").write_text("".join(json.dumps(line) + "\n" for line in anomalies))
    state = {"step": 8, "recipe": {"parallel": {}}, "skipped": ["x"]}
    save_checkpoint(
        folder / "checkpoints", Checkpoint({"w": torch.full((3,), weights)}, {"exp_avg.w": torch.ones(3)}, state)
    )
    return read_whole_trace(RunTrace(folder, 5, 8, ends=False))


def rounded(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        line.update(
            loss=line["loss"] * 1.001, grad_norm=line["grad_norm"] * 1.01, z_loss=-line["z_loss"], time=9.0, memory=7
        )


@pytest.mark.parametrize(
    ("change", "code", "data"),
    [
        (lambda lines: None, "", {}),
        (rounded, "", {}),
        (lambda lines: lines[2].update(more=1), "", {}),
        (lambda lines: lines.pop(2), "lines_missing", {"step": 6, "missing": 1}),
        (lambda lines: lines.clear(), "lines_missing", {"step": 5, "missing": 3}),
        (lambda lines: lines[2].update(loss=3.0), "value_differs", {"key": "loss", "live": 3.0}),
        (lambda lines: lines[2].update(loss=None), "value_differs", {"key": "loss", "live": None}),
        (lambda lines: lines[2].update(lr=2e-3), "value_differs", {"key": "lr", "live": 2e-3, "replay": 1e-3}),
        (lambda lines: lines[2].update({"loss/code": 2.0}), "value_differs", {"key": "loss/code", "live": 2.0}),
        (lambda lines: lines[2].update(grad_norm=2.0), "value_differs", {"key": "grad_norm", "live": 2.0}),
        (lambda lines: lines[2].update(tokens=7), "value_differs", {"key": "tokens", "live": 7}),
        (lambda lines: lines[2].update(skipped=True), "value_differs", {"key": "skipped", "live": True}),
        (lambda lines: lines[2].pop("z_loss"), "key_missing", {"key": "z_loss"}),
        (lambda lines: lines[0].update(loss=0.0), "", {}),  # before the window
    ],
)
def test_recorded_metrics_of_live_run_and_replay_must_agree(
    change: Any, code: str, data: dict[str, Any], tmp_path: Path
) -> None:
    base, live = trace(tmp_path / "base"), trace(tmp_path / "live", change)
    found = find_metrics_difference(live, base, POLICY.lines)
    if not code:
        assert found is None
        return
    assert found is not None and found.code == f"audit.{code}" and found.data.items() >= ({"step": 6} | data).items()


def test_the_bits_of_live_and_replayed_weights_are_compared(tmp_path: Path) -> None:
    base = trace(tmp_path / "base").final_checkpoint
    assert have_same_bits(
        trace(tmp_path / "lines", lambda lines: lines[2].update(time=9.0, z_loss=2e-7)).final_checkpoint, base
    )
    assert not have_same_bits(trace(tmp_path / "weights", weights=1.0000001).final_checkpoint, base)
    assert not find_unmatched_tensor(base, base)


def test_anomalies_must_agree_except_those_of_speed(tmp_path: Path) -> None:
    base = trace(tmp_path / "base")
    assert not find_anomaly_difference(trace(tmp_path / "quick", anomalies=ANOMALIES[:1]), base)
    fewer = find_anomaly_difference(trace(tmp_path / "fewer", anomalies=[]), base)
    assert fewer and (fewer.code, fewer.data) == ("audit.anomaly_missing", {"kind": "loss_spike", "step": 6})
    more = [*ANOMALIES, {"step": 7, "kind": "loss_spike"}]
    added = find_anomaly_difference(trace(tmp_path / "more", anomalies=more), base)
    assert added and (added.code, added.data) == ("audit.anomaly_added", {"kind": "loss_spike", "step": 7})


@pytest.mark.parametrize("harm", ["[" * 100_000 + "\n", '{"loss": 1}\n', '{"step": "6"}\n', "7\n"])
def test_an_unreadable_line_of_metrics_is_an_error(harm: str, tmp_path: Path) -> None:
    trace(tmp_path / "live")
    (tmp_path / "live" / "metrics.jsonl").write_text(harm)
    with pytest.raises(UntrustedFileError, match="metrics.jsonl has a line"):
        read_whole_trace(RunTrace(tmp_path / "live", 5, 8, ends=False))


def test_infinite_weights_and_links_are_refused(tmp_path: Path) -> None:
    with refused("audit.not_finite", UntrustedFileError):
        trace(tmp_path / "nan", weights=float("nan"))
    trace(tmp_path / "live")
    (tmp_path / "live" / "metrics.jsonl").unlink()
    (tmp_path / "live" / "metrics.jsonl").symlink_to("/etc/passwd")
    with refused("runs.missing", UntrustedFileError, file="metrics.jsonl"):
        read_whole_trace(RunTrace(tmp_path / "live", 5, 8, ends=False))
