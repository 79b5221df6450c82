"""A public model is imported, served, trained further on a team's data, judged against itself, released and exported, with commands only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from factory.core.workspace import Workspace
from tests.support.factory.command import factory
from tests.support.factory.own_data import DATA, passages, write_shards
from tests.support.serving.serve_process import PATIENCE, served
from tests.support.trainer.public_model import save_public_model

# What a team of a laptop would lower in the recipe that the import wrote, and the rate that a model of random weights needs.
CHANGES = {
    "precision: auto": "precision: fp32",
    "compile: true": "compile: false",
    "  sequences: 128": "  sequences: 8",
    "  micro_sequences: 32": "  micro_sequences: 8",
    "  max_epochs: 4": "  max_epochs: 20",
    "    first: 200": "    first: 150",
}


def said(home: Path, *words: str) -> str:
    done = factory(*words, "-w", str(home))
    assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def releases(home: Path) -> list[dict[str, Any]]:
    return list(json.loads(said(home, "releases", "list", "--json")))


@pytest.mark.slow("imports, serves, trains, measures and judges a model: a minute of a core")
def test_a_public_model_is_improved_and_released_with_commands_only(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, home = tmp_path / "public", tmp_path / "factory"
    source.mkdir()
    data = DATA["three-domain prose"]
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}
    save_public_model(source, [one.text for one in passages()[::2]], vocab_size=1024, **sizes)
    facts = json.loads(said(home, "init", "--from", str(source), "--context", "128", "--no-tune", "--json"))
    assert (facts["release"], facts["class"], facts["licence"]) == (0, "LlamaForCausalLM", "apache-2.0")
    assert [(row["release"], row["verdict"], row["champion"]) for row in releases(home)] == [(0, "imported", True)]

    with served(Workspace.open(home)) as server:
        question = {"messages": [{"role": "user", "content": "What does it do?"}], "max_tokens": 8}
        answer = httpx.post(f"{server.address}/chat/completions", json=question, timeout=PATIENCE)
    assert answer.status_code == 200 and 1 <= answer.json()["usage"]["completion_tokens"] <= 8, answer.text

    recipe = Path(facts["recipe"])
    text = recipe.read_text()
    for old, new in CHANGES.items():
        assert old in text, old
        text = text.replace(old, new)
    lines = ["  lr: 0.01" if line.startswith("  lr:") else line for line in text.splitlines()]
    recipe.write_text("\n".join(lines) + "\n")
    said(home, "tune", "--seconds", "1")
    first, _ = write_shards(tmp_path, data)
    shutil.copy(first, home / "inbox" / first.name)
    said(home, "run", "--once")

    (zero, one) = releases(home)
    assert (zero["release"], zero["champion"], one["release"], one["champion"]) == (0, False, 1, True)
    assert (one["verdict"], one["against"]) == ("promote", "candidate:1")
    before, after = (json.loads(said(home, "releases", "show", name, "--json")) for name in ("0", "1"))
    assert before["bits_per_byte"] == after["champion_bits_per_byte"], "the import is the baseline"
    for domain in data.domains:
        assert after["bits_per_byte"][domain] < before["bits_per_byte"][domain], domain
    assert [row["kind"] for row in after["segments"]] == ["import", "trunk", "anneal"]
    assert after["imported"]["licence"] == "apache-2.0" and before["imported"] == after["imported"]

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(after["export"]),
        AutoTokenizer.from_pretrained(after["export"]),
    )
    ids = torch.tensor([tokenizer("def read(self):")["input_ids"]])
    assert bool(torch.isfinite(model(ids).logits).all()) and model.config.max_position_embeddings == 256
    said(home, "releases", "rollback", "0")
    assert [row["champion"] for row in releases(home)] == [True, False]
