"""Each anomaly detector reports something in some run. The reports are in the files that are compared, so a patch cannot change a detector unseen."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.factory.matrix import prepare
from trainer.contract.json_lines import read_json_lines
from trainer.monitor.signals import KINDS

RUNS = {
    "detectors that report everything": {"skipped_outlier", "loss_spike", "loss_drop", "domain_spike", "domain_drop", "divergence"},
    "jumps and a plateau that are reported": {"grad_norm_jump", "plateau", *KINDS.values()},
    "a loss that is not finite": {"non_finite"},
    "routers and ranks that are reported": {"router_collapse", "rank_grad_norm"},
}  # fmt: skip


@pytest.mark.long("the longest tiny runs of the gate, and two ranks")
def test_each_detector_reports_something_in_the_matrix(tmp_path: Path) -> None:
    """All kinds but the throughput's, which is of time and not compared."""
    with ExitStack() as after:
        made = prepare(tmp_path, after, list(RUNS))
        for name, kinds in RUNS.items():
            (path,) = tmp_path.glob(f"baseline/*/segments/{made.plan.names[name]}/anomalies.jsonl")
            assert kinds <= {anomaly["kind"] for anomaly in read_json_lines(path)}, name
