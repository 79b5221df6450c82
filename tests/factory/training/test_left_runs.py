"""Without free file handles, the files of a certificate's or preflight's runs cannot be read. Such an error is not evidence about the runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from factory.core.faults import NO_FILE_HANDLES, find_fault_in
from factory.runs.trace import RunTrace
from factory.training import certificate_runs, preflight_runs
from factory.training.certificate import CertificateEvidence
from factory.training.preflight import PreflightEvidence
from tests.support.failing.limits import few_handles
from trainer.contract.checkpoint import format as checkpoints

assert checkpoints.load_checkpoint, "what is imported only when it is needed needs a handle, too"


def test_a_certificate_raises_without_file_handles_instead_of_judging(tmp_path: Path) -> None:
    evidence, nothing = CertificateEvidence("a", "b", ["trainer"]), RunTrace(tmp_path / "run", 0, 4)
    compare = lambda: certificate_runs.compare_certificate_runs(
        evidence, tmp_path / "start", nothing, nothing, [nothing] * 3, nothing
    )
    with few_handles(), pytest.raises(OSError) as raised:
        compare()
    assert find_fault_in(raised.value) == NO_FILE_HANDLES
    assert "is not a checkpoint" in compare().old_failed


def test_a_preflight_raises_without_file_handles_instead_of_judging(tmp_path: Path) -> None:
    evidence, nothing = PreflightEvidence("a", 10, 4, True), RunTrace(tmp_path / "run", 0, 4)
    compare = lambda: preflight_runs.compare_preflight_runs(
        evidence, [], tmp_path / "step", lambda _: tmp_path, lambda _: nothing
    )
    with few_handles(), pytest.raises(OSError) as raised:
        compare()
    assert find_fault_in(raised.value) == NO_FILE_HANDLES
    found = compare()
    assert found == replace(evidence, failed=found.failed) and "is not a checkpoint" in found.failed["straight"]
