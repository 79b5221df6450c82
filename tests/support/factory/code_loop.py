"""A whole small factory for tests of the code loop: a git repository of this checkout's code, and a workspace with a trained trunk.

Made once a test session (a few seconds of real training) and shared; every test adds proposals of its own.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
import yaml

from factory.core.workspace import Workspace, WorkspaceConfig, find_checkout_root
from factory.demo.demo import use_plain_kernels
from factory.git import repository
from factory.ingest import tokenizer
from factory.ingest.rules.held_out_split import goes_to_sealed_half_on_tie
from factory.ledger.ledger import (
    Ledger,
    checkpoints,
    data_plans,
    documents,
    held_out,
    proposals,
    segments,
    shards,
    verdicts,
)
from factory.ledger.stored_paths import to_stored_paths
from tests.support.git import git
from tests.support.plants.kept import kept
from tests.support.plants.trained_plant import close, opened
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.token_shard import TokenizedDocument, write_token_shard
from trainer.contract.recipe import Recipe

STEPS = 6
MEASURE_SECONDS = 10  # one or two of the eight implementations that a proposer may ask for, five seconds each
GATE = """
oracle: {cases: [small]}
isolated: {pairs: 3}
training: {sequences: 0, steps: 200, pairs: 2, budget_seconds: 1, long: 2}
evals: {documents: 2, document_bytes: 256}
"""


@dataclass(frozen=True)
class Made:
    workspace: Workspace
    ledger: Ledger
    target: Path

    @property
    def base(self) -> str:
        return repository.get_live_commit(self.target)

    def verdict_on(self, number: int) -> dict[str, Any]:
        """The verdict on a proposal, which is judged."""
        judged = proposals.join(verdicts, verdicts.c.id == proposals.c.verdict)
        is_it = proposals.c.number == number, proposals.c.state == "judged"
        (row,) = self.ledger.select_rows(sa.select(verdicts).select_from(judged).where(*is_it))
        return row

    def left_behind(self) -> list[str]:
        """Whatever a proposal may leave besides its branch."""
        worktrees = git(self.target, "worktree", "list", "--porcelain").count("worktree ")
        odd = [
            path.name for path in self.workspace.worktrees.iterdir() if not re.fullmatch("live-[0-9a-f]{12}", path.name)
        ]
        return odd + (["a registered worktree"] if worktrees > 2 else [])


@contextmanager
def fewer_steps(workspace: Workspace) -> Iterator[None]:
    """Where a gate run is to compare weights, and not to time anything."""
    policy = workspace.policy_path("gates/patch.yaml")
    text = policy.read_text()
    assert "steps: 200" in text
    policy.write_text(text.replace("steps: 200", "steps: 50"))
    try:
        yield
    finally:
        policy.write_text(text)


def make_target(folder: Path) -> Path:
    """The code that is trained with, as a repository of its own."""
    for name in ("kernels", "models", "trainer", "agents", "policies"):
        shutil.copytree(find_checkout_root() / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    kernels = folder / "policies" / "kernels.yaml"
    kernels.write_text(use_plain_kernels(kernels.read_text()))  # so that there is something to propose
    git(folder.parent, "init", "-q", "-b", "main", str(folder))
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "base")
    return folder


@functools.cache
def make() -> Made:
    root = Path(tempfile.mkdtemp(prefix="code-loop-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    target = make_target(root / "target")
    kept(
        ("code loop", repository.get_live_commit(target)),
        root / "workspace",
        lambda at: _fill(at, target),
        {"code": target},
    )
    return Made(*opened(root / "workspace"), target)


def _fill(folder: Path, target: Path) -> None:
    workspace = Workspace.create(folder, WorkspaceConfig(recipe="tiny", repository=str(target)))
    ledger = Ledger.create(workspace.ledger_url)
    (workspace.root / "policies" / "gates").mkdir(parents=True, exist_ok=True)
    (workspace.root / "policies" / "gates" / "patch.yaml").write_text(GATE)
    agents = yaml.safe_load((find_checkout_root() / "policies" / "agents.yaml").read_text())
    (workspace.root / "policies" / "agents.yaml").write_text(
        yaml.safe_dump(agents | {"measure_seconds": MEASURE_SECONDS})
    )
    recipe = Recipe.load(workspace.recipe_path())
    texts = [path.read_text()[:4000] for path in sorted((find_checkout_root() / "trainer").rglob("*.py"))]
    words = tokenizer.train_tokenizer(iter(texts), recipe.model.vocab_size, workspace.tokenizer)
    made = []
    for number, text in enumerate(texts * 4):
        ids, mask = words.encode_text(text[(number * 37) % 500 :])
        domain = ("code", "docs", "chat")[number % 3]
        mask[: len(mask) // 2 if domain == "chat" else 0] = False  # an op that leaves these out rounds otherwise
        made.append(TokenizedDocument(f"{number}", f"{number}", domain, "s", "MIT", ids.astype(np.uint32), mask))
    shard = write_token_shard(workspace.shards, made, vocab_size=recipe.model.vocab_size, tokenizer_sha256=words.sha256)
    plan = DataPlan.make_for_segment(recipe.mixture, "trunk", [(shard.id, str(shard.path), 0)], recipe.seed)
    segment = workspace.segments / "1"
    segment.mkdir(parents=True)
    spec = {
        "kind": "trunk", "recipe": recipe.model_dump(), "data_plan": json.loads(plan.to_json()), "first_step": 0,
        "last_step": STEPS, "initial_checkpoint": None, "code_commit": repository.get_live_commit(target), "kernels": None,
    }  # fmt: skip
    (segment / "segment.json").write_text(json.dumps(spec))
    subprocess.run(
        [sys.executable, "-m", "trainer", str(segment)],
        cwd=target,
        check=True,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
    )
    result = json.loads((segment / "result.json").read_text())
    with ledger.begin() as tx:
        tx.execute(
            shards.insert().values(
                sha256="a" * 64, name="s", path="s", bytes=1, state="ingested", ingested_at=time.time()
            )
        )
        for number, text in enumerate(texts[:6]):
            domain, key = ("code", "docs", "chat")[number % 3], f"{'a' * 16}:{number}"
            tx.execute(
                documents.insert().values(key=key, id=key, shard="a" * 64, row=number, domain=domain, fate="held_out")
            )
            tx.execute(
                held_out.insert().values(
                    key=key,
                    domain=domain,
                    group_key=key,
                    sealed=goes_to_sealed_half_on_tie(key),
                    content={"text": text},
                )
            )
        tx.execute(
            data_plans.insert().values(
                id=plan.id, plan=to_stored_paths(folder, json.loads(plan.to_json())), created_at=time.time()
            )
        )
        tx.execute(
            segments.insert().values(
                id=1,
                kind="trunk",
                generation=1,
                recipe="tiny",
                recipe_json=recipe.model_dump(),
                recipe_sha256=recipe.sha256,
                data_plan=plan.id,
                code_commit=spec["code_commit"],
                first_step=0,
                last_step=STEPS,
                state="done",
                folder=ledger.to_stored_path(segment),
                result=to_stored_paths(folder, result),
                created_at=time.time(),
            )  # fmt: skip
        )
        tx.execute(
            checkpoints.insert().values(
                id=result["manifest_sha256"],
                segment=1,
                step=STEPS,
                path=ledger.to_stored_path(result["checkpoint"]),
                created_at=time.time(),
            )
        )
    close(workspace, ledger)
