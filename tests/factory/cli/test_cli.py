"""The command line as a person meets it: real processes, real exit codes, one clear line for every mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from factory.core.workspace import Workspace
from tests.support.factory.command import factory
from tests.support.paths import ROOT


@pytest.fixture
def home(tmp_path: Path) -> Path:
    done = factory("init", "--no-tune", "--workspace", str(tmp_path / "w"))
    assert done.returncode == 0, done.stderr
    return tmp_path / "w"


def test_init_prints_the_next_step_and_is_safe_to_repeat(home: Path) -> None:
    again = factory("init", "--no-tune", "-w", str(home))
    assert again.returncode == 0 and "inbox" in again.stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["status", "-w", "nowhere"], 3, "no workspace at"),
        (["ingest", "missing.jsonl", "-w", "HOME"], 2, "missing.jsonl: no such file"),
        (["evaluate", "7", "-w", "HOME"], 2, "there is no candidate yet"),
        (["release", "-w", "HOME"], 2, "there is no candidate yet"),
        (["serve", "-w", "HOME", "--host", "0.0.0.0"], 2, "a key is required"),
        (["anneal", "-w", "HOME"], 2, "no trunk to anneal from"),
        (["train", "-w", "HOME"], 2, "nothing to train on"),
        (["proposals", "show", "3", "-w", "HOME"], 2, "no proposal 3"),
        (["provenance", "-w", "HOME"], 2, "name one: --document ID or --release N"),
        (["provenance", "--document", "x", "-w", "HOME"], 2, "no document 'x' was ever ingested"),
        (["provenance", "--release", "9", "-w", "HOME"], 2, "no release 9"),
        (["init", "-w", "HOME/../other", "--recipe", "dmeo"], 2, "no recipe 'dmeo'; did you mean 'demo'?"),
        (["stauts"], 2, "Did you mean 'status'"),
    ],
)
def test_mistakes_get_one_clear_line(home: Path, words: list[str], code: int, said: str) -> None:
    done = factory(*[word.replace("HOME", str(home)) for word in words])
    assert done.returncode == code, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr


def test_unknown_config_key(home: Path) -> None:
    (home / "factory.yaml").write_text("recpie: demo\n")
    done = factory("status", "-w", str(home))
    assert done.returncode == 2 and "did you mean 'recipe'?" in done.stderr


def test_second_daemon_is_refused(home: Path) -> None:
    with Workspace.open(home).lock("model-loop"):
        done = factory("run", "--once", "-w", str(home))
    assert done.returncode == 3 and f"process {os.getpid()} holds" in done.stderr


def test_listings_speak_json(home: Path) -> None:
    for words in (["status"], ["proposals"], ["proposals", "list"]):
        done = factory(*words, "--json", "-w", str(home))
        assert done.returncode == 0, done.stderr
        json.loads(done.stdout)


def test_run_once_with_nothing_to_do_ends(home: Path) -> None:
    done = factory("run", "--once", "-w", str(home))
    assert done.returncode == 0, done.stderr


def test_help_and_status_import_nothing_heavy(home: Path) -> None:
    """What makes them answer in under half a second, asserted without a clock."""
    heavy = {"torch", "mlflow", "sqlalchemy", "transformers", "langgraph", "openai", "numpy", "git"}
    for words in (["--help"], ["propose", "--help"], ["status", "-w", str(home)], ["proposals", "-w", str(home)]):
        code = (
            f"import sys, factory.cli as c\nsys.argv = ['factory', *{words!r}]\ntry: c.main()\nexcept SystemExit: pass\n"
            f"print('LOADED', *sorted(m for m in sys.modules if m in {heavy!r}))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert done.stdout.splitlines()[-1] == "LOADED", done.stdout[-500:] + done.stderr
