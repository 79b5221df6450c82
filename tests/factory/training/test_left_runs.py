"""What the runs of a certificate and of a preflight left is read when no file handle is left: nothing is said about the runs then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from factory.core.faults import HANDLES, fault_of
from factory.training import certificate_runs, preflight_runs
from factory.training.certificate import CertificateEvidence
from factory.training.preflight import PreflightEvidence
from tests.support.failing.limits import few_handles
from trainer.contract.checkpoint import format as checkpoints

assert checkpoints.load, "what is imported only when it is needed needs a handle, too"


class Left:
    """As ``Runs`` and ``Flight``: their folders hold nothing."""

    ways = ()
    other_precision = False

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, *names: str) -> Path:
        return self.root.joinpath(*names)


def test_a_certificate(tmp_path: Path) -> None:
    runs, evidence = cast(Any, Left(tmp_path)), CertificateEvidence("a", "b", ["trainer"])
    with few_handles(), pytest.raises(OSError) as raised:
        certificate_runs.compare(evidence, tmp_path / "start", runs)
    assert fault_of(raised.value) == HANDLES
    assert "is not a checkpoint" in certificate_runs.compare(evidence, tmp_path / "start", runs).old_failed


def test_a_preflight(tmp_path: Path) -> None:
    flight, evidence = cast(Any, Left(tmp_path)), PreflightEvidence("a", 10, 4, True)
    with few_handles(), pytest.raises(OSError) as raised:
        preflight_runs.compare(evidence, flight)
    assert fault_of(raised.value) == HANDLES
    found = preflight_runs.compare(evidence, flight)
    assert found == replace(evidence, failed=found.failed) and "is not a checkpoint" in found.failed["straight"]
