"""The whole demo on the slowest class of machine, with real text, real training and a real sandbox."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from factory.core import devices
from factory.core.console import Terminal
from factory.core.workspace import Workspace
from factory.demo.demo import _corpus, send_new_files_to_inbox
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.status import read_status
from tests.support.factory.command import factory
from tests.support.patience import PATIENCE_S
from tests.support.text.library import write_library

EMULATED = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


@pytest.mark.timeout(5 * PATIENCE_S)
@pytest.mark.long("a whole demo of two minutes, which takes more on two slow cores")
def test_the_demo_runs_without_fast_bf16(tmp_path: Path) -> None:
    """The demo makes two candidates, a release that beats the byte trigram, and one judged proposal. A second run finds all done."""
    words = [sys.executable, "-m", "factory", "demo", "--minutes", "2", "--workspace", str(tmp_path / "demo")]
    suites_own = {"OMP_NUM_THREADS", *devices.COMPILER_SETTINGS}
    environment = {name: value for name, value in os.environ.items() if name not in suites_own} | EMULATED
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE_S)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "precision fp32 (measured" in done.stdout and "For 2 minutes" in done.stdout
    facts = read_status(Workspace.open(tmp_path / "demo"))
    assert len(facts["candidates"]) == 2 and len(facts["releases"]) >= 1
    released = facts["candidates"][facts["releases"][0]["candidate"] - 1]["summary"]
    for domain, bits in released["bpb"].items():
        trigram = next(v for name, v in released["baselines"][domain].items() if "trigram" in name)
        assert bits < trigram, (domain, bits, trigram)
    outcomes = [proposal["outcome"] for proposal in facts["proposals"]]
    if "nothing proposed: no change was found" not in done.stdout:  # as on a busy machine
        assert len(outcomes) == 1 and outcomes[0] in ("promote", "hold", "reject")
    again = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert again.returncode == 0
    assert read_status(Workspace.open(tmp_path / "demo")) == facts or not outcomes  # which it then tries again


def test_the_corpus_is_written_once_and_copied_whole_into_the_inbox(
    workspace: Workspace, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda *_: {"stdlib": str(write_library(tmp_path / "library"))})
    files = _corpus(workspace, Terminal(), 2.0)
    written = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
    assert written and sorted(path.name for path in files[0].parent.iterdir()) == sorted(written)
    assert _corpus(workspace, Terminal(), 2.0) == files
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in files} == written
    send_new_files_to_inbox(Plant(workspace, ledger), files)
    assert {path.name: path.read_bytes() for path in workspace.inbox.iterdir()} == {
        name: content for name, (content, _) in written.items()
    }


def test_minutes_out_of_range_are_one_error_and_write_nothing(tmp_path: Path) -> None:
    done = factory("demo", "--minutes", "1", "--workspace", str(tmp_path / "demo"))
    assert done.returncode == 2 and not (tmp_path / "demo").exists()
    assert (
        "error[demo.minutes]" in done.stderr and "from 2 to 120, not 1" in done.stderr and done.stderr.count("\n") == 1
    )
