"""A team takes its own data to a second release with commands only, and edits only what the releasability report advises."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.factory.command import factory
from tests.support.factory.own_data import DATA, OwnData, write_shards

# Small enough for half a minute of a core, and large enough to beat the byte trigram.
RECIPE = """name: own
precision: fp32
compile: false
checkpoint_every: 200
model: {vocab_size: 1024, d_model: 64, layers: 2, heads: 2, kv_heads: 1, head_dim: 32, d_ff: 192, context: 128}
mixture: {weights: {"*": 1.0}, max_epochs: 20}
batch: {sequences: 8}
optimizer: {lr: 1e-2}
schedule: {warmup_steps: 10, trunk_steps: {first: 200, later: 140}, anneal_steps: 40}
"""


def said(home: Path, *words: str) -> str:
    done = factory(*words, "-w", str(home))
    assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def holding(home: Path) -> list[dict[str, Any]]:
    """The lines of the report that name a reason to hold a release."""
    return [line for line in json.loads(said(home, "data", "list", "--json"))["releasable"] if line["ok"] is False]


def releases(home: Path) -> list[dict[str, Any]]:
    return list(json.loads(said(home, "status", "--json"))["releases"])


def begin(home: Path, data: OwnData) -> None:
    own = home / "policies" / "recipes" / "own.yaml"
    own.parent.mkdir(parents=True)
    own.write_text(RECIPE)
    said(home, "init", "--recipe", "own", "--no-tune")
    said(
        home, "tune", "--seconds", "1"
    )  # the daemon would take ten seconds of a core, and find kernels that g++ compiles
    if data.fields:  # what a team says of its columns, before it brings them
        with open(home / "policies" / "data.yaml", "a", encoding="utf-8") as policy:
            policy.write(data.fields)


@pytest.mark.slow("trains, measures and judges two candidates: a minute of a core")
@pytest.mark.sample("one-source chat")
@pytest.mark.parametrize("name", DATA)
def test_a_teams_own_data_reach_a_second_release_with_commands_only(name: str, tmp_path: Path) -> None:
    data, home = DATA[name], tmp_path / "factory"
    begin(home, data)
    first, second = write_shards(tmp_path, data)
    told = said(home, "ingest", str(first))
    advised = []
    for line in holding(home):
        assert line["text"]["text"] in told, "what holds releases is said when the data arrive"
        command = re.search(r"'factory ((?:config|data) .*?)'(?:$|[;,.])", line["todo"]["text"])
        assert command, line
        advised.append(command[1])
        said(home, *shlex.split(command[1]))
    assert len(advised) == (name == "one-source chat"), advised
    assert holding(home) == []

    said(home, "run", "--once")
    (released,) = releases(home)
    assert released["number"] == 1
    assert set(json.loads(said(home, "releases", "show", "1", "--json"))["bits_per_byte"]) >= set(data.domains)

    shutil.copy(second, home / "inbox" / second.name)
    said(home, "run", "--once")
    assert [one["number"] for one in releases(home)] == [1, 2], said(home, "status")
    assert holding(home) == []
