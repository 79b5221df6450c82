"""Small real parts: token shards of random documents, and segment folders of the tiny recipe."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.forks.quick import forked
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from trainer.__main__ import main
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.token_shard import TokenizedDocument, TokenShard
from trainer.contract.recipe import Recipe

TINY = ROOT / "policies" / "recipes" / "tiny.yaml"
MakeShard = Callable[..., TokenShard]


def make_documents(
    seed: int, counts: dict[str, int], longest: int = 90, vocab_size: int = 512
) -> list[TokenizedDocument]:
    """Documents whose tokens are a noisy walk, so that there is something to learn; chat ones are half masked."""
    rng = np.random.default_rng(seed)
    documents = []
    for domain, count in counts.items():
        for i in range(count):
            length = int(rng.integers(2, longest))
            tokens = (rng.integers(3, vocab_size) + 7 * np.arange(length) + rng.integers(0, 3, length)) % vocab_size
            tokens[-1] = 0
            mask = np.ones(length, bool)
            if domain == "chat":
                mask[: length // 2] = False
            key = f"{domain}-{seed}-{i}"
            documents.append(TokenizedDocument(key, key, domain, "test", "none", tokens.astype(np.uint32), mask))
    return documents


def one_sided_chats(count: int, seed: int = 0) -> list[TokenizedDocument]:
    """Of 20 to 159 tokens; 2 to 9 of them, at the start or at the end, carry loss."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        length, answer = int(rng.integers(20, 160)), int(rng.integers(3, 10))
        mask = np.zeros(length, bool)
        mask[slice(-answer, None) if i % 2 else slice(1, answer)] = True
        ids = rng.integers(3, 512, length).astype(np.uint32)
        made.append(TokenizedDocument(f"chat-{seed}-{i}", str(i), "chat", "test", "MIT", ids, mask))
    return made


def plan_of(*shards: TokenShard, generations: list[int] | None = None, **keywords: Any) -> DataPlan:
    """A plan over shards, all of generation 0 unless said otherwise."""
    numbers = generations or [0] * len(shards)
    listed = [{"id": s.id, "path": str(s.path), "generation": g} for s, g in zip(shards, numbers, strict=True)]
    keywords = {"weights": {"code": 0.6, "docs": 0.2, "chat": 0.2}, "max_epochs": 4, "seed": 3} | keywords
    return DataPlan.from_json({"token_shards": listed} | keywords)


def recipe_with(**changes: Any) -> Recipe:
    """The tiny recipe with keys changed; dots are written as double underscores."""
    raw = Recipe.load(TINY).model_dump()
    for path, value in changes.items():
        *outer, last = path.split("__")
        inner = raw
        for part in outer:
            inner = inner[part]
        inner[last] = value
    return Recipe.parse(raw)


def write_spec(folder: Path, plan: DataPlan, recipe: Recipe | None = None, **keywords: Any) -> Path:
    """A segment folder, ready to run."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = {
        "kind": "trunk",
        "recipe": (recipe or Recipe.load(TINY)).model_dump(),
        "data_plan": json.loads(plan.to_json()),
        "first_step": 0,
        "last_step": 20,
        "initial_checkpoint": None,
        "code_commit": "0" * 40,
        "kernels": None,
    } | keywords
    (folder / "segment.json").write_text(json.dumps(spec))
    return folder


def start_trainer(
    folder: Path | list[Path], *launcher: str, program: tuple[str, ...] = ("-m", "trainer"), **keywords: Any
) -> subprocess.Popen[str]:
    """The real process, from the repository's root; several folders one after the other."""
    folders = ["--wait", *map(str, folder)] if isinstance(folder, list) else [str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    fork = forked(environment)
    ranks = ("--no-python", *fork, sys.executable) if launcher and fork else ()  # torchrun's are forks as it is one
    command = [*fork, sys.executable, *launcher, *ranks, *program, *folders]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, **keywords)


def run_trainer(folder: Path | list[Path], *launcher: str, **keywords: Any) -> tuple[int, str]:
    """(exit code, stderr)."""
    process = start_trainer(folder, *launcher, **keywords)
    _, errors = process.communicate(timeout=PATIENCE_S)
    return process.returncode, errors


def train_here(folder: Path) -> tuple[int, str]:
    """As ``run_trainer``, in this process: for what a run leaves, where how its process starts and ends is not the question."""
    said = io.StringIO()
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(said),
        torch.random.fork_rng(devices=[]),
    ):
        code = main([str(folder)])
    return code, said.getvalue()
