"""The command line in real processes: exit codes, and one clear line for every mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.factory.command import factory
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace that no test of this file changes."""
    made = tmp_path_factory.mktemp("home") / "w"
    done = factory("init", "--no-tune", "--workspace", str(made))
    assert done.returncode == 0, done.stderr
    return made


def test_init_prints_the_next_step_and_is_safe_to_repeat(home: Path) -> None:
    again = factory("init", "--no-tune", "-w", str(home))
    assert again.returncode == 0 and "inbox" in again.stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["ingest", "missing.jsonl", "-w", "HOME"], 2, "missing.jsonl"),
        (["release", "-w", "HOME"], 2, "error[model_loop.no_candidate]"),
        (["anneal", "-w", "HOME"], 2, "error[training.no_trunk]"),
        (["train", "-w", "HOME"], 2, "error[training.no_shards]"),
        (["provenance", "-w", "HOME"], 2, "error[provenance.no_subject]"),
        (["init", "-w", "HOME/../other", "--recipe", "dmeo"], 2, "did you mean 'demo'?"),
        (["stauts"], 2, "Did you mean 'status'"),
    ],
)
def test_each_mistake_on_the_command_line_prints_one_line(home: Path, words: list[str], code: int, said: str) -> None:
    done = factory(*[word.replace("HOME", str(home)) for word in words])
    assert done.returncode == code, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr


def test_list_commands_print_json_with_the_option_json(home: Path) -> None:
    for words in (["proposals"], ["proposals", "list"]):
        done = factory(*words, "--json", "-w", str(home))
        assert done.returncode == 0, done.stderr
        json.loads(done.stdout)


def test_help_and_status_import_no_heavy_module(home: Path) -> None:
    """What makes them answer in under half a second, asserted without a clock."""
    heavy = {"torch", "mlflow", "sqlalchemy", "transformers", "langgraph", "openai", "numpy", "git"}
    plan = ["plan", "--params", "8e9", "--tokens", "300e9", "--gpus", "32"]
    for words in (["--help"], ["propose", "--help"], ["status", "-w", str(home)], ["proposals", "-w", str(home)], plan):
        code = (
            f"import sys, factory.cli as c\nsys.argv = ['factory', *{words!r}]\ntry: c.main()\nexcept SystemExit: pass\n"
            f"print('LOADED', *sorted(m for m in sys.modules if m in {heavy!r}))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert done.stdout.splitlines()[-1] == "LOADED", done.stdout[-500:] + done.stderr
