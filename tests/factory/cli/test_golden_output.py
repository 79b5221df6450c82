"""The output of each command, as a person reads it. Each command has a file in ``tests/golden/commands/`` with its ``--help`` and its output here.

The workspace is written by the test, so its numbers are the same on every machine. Values that differ by machine or by moment are shown as ⟨time⟩,
⟨size⟩, ⟨hash⟩ or ⟨workspace⟩.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from factory.cli import root as app
from factory.cli.app import get_current_user
from factory.core.workspace import Workspace
from factory.gates.release.evidence import ReleaseEvidence
from factory.ledger.ledger import Ledger, proposals
from kernels.contract.message import format_error_with_code
from tests.support.factory.command_tree import commands
from tests.support.golden import compare_with_golden
from tests.support.plants.release_scene import (
    add_candidate,
    add_document,
    add_judged,
    add_shard,
    add_verdict,
    promote,
    with_store,
)
from tests.support.plants.saved_plant import diagnosed, note

SHARD = [
    {
        "text": "A whole document of some twenty words, so that no rule about length drops it from what is shown here at all."
    },
    {"text": 7},
    {"body": "no column that is known"},
    {
        "messages": [
            {"role": "user", "content": "What is a shard?"},
            {"role": "assistant", "content": "A file of documents."},
        ]
    },
]
# What each command is asked, in this order. Where it says that it changes something, the next command sees it.
ASKED = """
status
duties
data list
data claims
anomalies list
anomalies show 1
anomalies show 9
anomalies accept 1 --why read
proposals list
proposals show 1
proposals show 9
proposals approve 1
releases list
releases show 1
releases show 9
releases diff 1 9
releases rollback 1
releases approve 3
releases override 3 --reason none
runs
tasks list
tasks check lost.jsonl
provenance --document ssssssssssssssss:0
provenance --document lost
provenance --release 9
clean --dry-run
config show retention
config set retention lost 3
ingest --preview shard.jsonl
ingest lost.jsonl
data remove --source lost --dry-run
data relabel --to-license MIT
data undo 9
data settle MIT --document lost
pause --why holidays
status
resume
retry 9
abandon 9
rewind 9
quarantine lost
train
anneal
evaluate 9
diagnose 9
audit 9
average --last 2
certify 9
compare lost.csv
generate --count 0
plan --params 8e9 --tokens 300e9 --gpus 8 --memory 80
profile --recipe lost
propose --agent lost
release --bundle 9
verify .
restore lost
upgrade
init --no-tune
backup --keys .
tune --op lost
check --repair lost
""".strip().splitlines()
HIDDEN = [
    (re.compile(r"\b[0-9a-f]{12,64}\b"), "⟨hash⟩"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?( ?UTC|Z|[+-]\d\d:?\d\d)?"), "⟨time⟩"),
    (re.compile(r"\b\d[\d,.]*(?: of \d[\d,.]*)? (?:[kMGT]i?B|days?|hours?|min|s)\b"), "⟨size⟩"),
]


@pytest.fixture
def home(workspace: Workspace, ledger: Ledger) -> Workspace:
    """A release, a champion, a held candidate, an anomaly that a person decides about, and a proposal."""
    with_store(workspace)
    add_shard(ledger)
    add_document(ledger, None)
    for number in (1, 2, 3):
        assert add_candidate(workspace, ledger) == number
    promote(ledger, 1, 1, add_verdict(ledger, 1))
    promote(ledger, 2, 2, add_verdict(ledger, 2, against=1))
    add_judged(ledger, 3, ReleaseEvidence(candidate=3, against="candidate:2", domains=("code",)), against=2)
    number = note(ledger, 1, 40)
    diagnosed(ledger, number, 1, ["unknown"], [])
    proposal = {
        "number": 1, "agent": "search", "target": "swiglu", "title": "swiglu: reference → native", "hypothesis": "It is faster.",
        "base_commit": "b" * 40, "branch": "factory/search/1-swiglu", "state": "judged", "patch_sha256": "p" * 64, "predicted_gain": 1.1,
        "created_at": 1.7e9, "verdict": add_verdict(ledger, 1),
    }  # fmt: skip
    with ledger.begin() as tx:
        tx.execute(proposals.insert().values(proposal))
    return workspace


def test_each_command_prints_its_golden_output(
    home: Workspace, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "dumb")
    (tmp_path / "shard.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SHARD))
    said: dict[str, list[str]] = defaultdict(list)
    leaves = [
        words
        for words in commands()
        if words and not any(one[: len(words)] == words and one != words for one in commands())
    ]
    for words in sorted(leaves):
        said[" ".join(words)].append(_run(home, tmp_path, [*words, "--help"]))
    for line in ASKED:
        words = shlex.split(line)
        name = next(" ".join(words[:length]) for length in (2, 1) if tuple(words[:length]) in leaves)
        said[name].append(_run(home, tmp_path, words))
    for name, texts in said.items():
        compare_with_golden(request, f"commands/{name.replace(' ', '-')}.txt", "\n\n".join(texts))


def _run(home: Workspace, folder: Path, words: list[str]) -> str:
    result = CliRunner().invoke(app, words, prog_name="factory", env={"FACTORY_HOME": str(home.root)})
    text = result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        text += f"factory: {format_error_with_code(result.exception)}\n"
    for path, name in (
        (home.root, "⟨workspace⟩"),
        (folder, "⟨folder⟩"),
        (Path.cwd(), "⟨folder⟩"),
        (Path(__file__).parents[3], "⟨checkout⟩"),
    ):
        text = text.replace(str(path), name)
    text = re.sub(rf"\b{re.escape(get_current_user())}\b", "⟨person⟩", text)
    for pattern, name in HIDDEN:
        text = pattern.sub(name, text)
    return f"$ factory {shlex.join(words)}\n{text.rstrip()}"
