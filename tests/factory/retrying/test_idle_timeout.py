"""A tool of live code without activity is killed; a tool that computes or writes is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from factory.core.errors import SegmentError
from factory.ledger.plant import Plant
from factory.retrying.watchdog import kill_when_idle, measure_process_activity
from factory.runs.live_code import LiveCode
from factory.training.exporting import export_candidate
from tests.support.git import git
from tests.support.messages import refused
from tests.support.plants.trained_plant import make_plant, train_anneal

LIMIT_S = 2.0


def test_a_tool_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    program = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    done = LiveCode(tmp_path, None, False, hung_seconds=1.0).run_python("-c", program)
    assert (
        done.returncode == -9
        and done.stderr.startswith("the factory killed")
        and "for 1 s " in done.stderr
        and "hung_seconds" in done.stderr
    )
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # until its new parent has waited for it
            os.kill(int(done.stdout), 0)
            time.sleep(0.1)


@pytest.mark.sample("works")
@pytest.mark.parametrize(
    "work", ["sum(range(10**6)); time.sleep(0.2)", "print('x', flush=True); time.sleep(0.1)"], ids=["works", "writes"]
)
def test_a_tool_that_works_or_writes_is_not_killed(tmp_path: Path, work: str) -> None:
    program = f"import time\nend = time.monotonic() + 2 * {LIMIT_S}\nwhile time.monotonic() < end: {work}"
    assert LiveCode(tmp_path, None, False, hung_seconds=LIMIT_S).run_python("-c", program).returncode == 0


def test_the_activity_of_a_process_includes_its_descendants() -> None:
    words = [
        "import os, sys",
        "sys.stdin.readline()",
        "os.write(2, b'12345678')",
        "print('done', flush=True)",
        "sys.stdin.readline()",
    ]
    with subprocess.Popen(
        [sys.executable, "-c", "\n".join(words)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdin and process.stdout
        with kill_when_idle(process.pid, 600.0) as killed:
            before = measure_process_activity(process.pid)
            print(file=process.stdin, flush=True)
            process.stdout.readline()
            after = measure_process_activity(process.pid)
            assert before[0] == after[0] == 1 and after[2] - before[2] == len("12345678done\n")
            print(file=process.stdin, flush=True)
            process.wait()
        assert killed == [] and measure_process_activity(process.pid) == (0, 0, 0)


@pytest.mark.slow("a small factory trains")
def test_an_export_that_hangs_is_killed_and_reported(tmp_path: Path, code_repository: Path) -> None:
    code = tmp_path / "code"
    shutil.copytree(code_repository, code, symlinks=True)
    workspace, ledger = make_plant(tmp_path, code)
    number = train_anneal(workspace, ledger)
    (workspace.root / "policies" / "retries.yaml").write_text("hung_seconds: 2.0\n")
    tool = code / "trainer" / "contract" / "checkpoint" / "export.py"
    first = "from __future__ import annotations\n"
    tool.write_text(tool.read_text().replace(first, f"{first}import time\ntime.sleep(600)\n"))
    git(code, "commit", "--quiet", "--all", "-m", "an exporter that waits")
    with ledger.begin() as tx:
        tx.exec_driver_sql("UPDATE segments SET code_commit = ?", (git(code, "rev-parse", "HEAD"),))
    with refused("training.export_failed", SegmentError) as raised:
        export_candidate(Plant(workspace, ledger), number)
    assert "hung_seconds" in raised.value.data["error"]
