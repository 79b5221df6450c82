"""A real plant with real documents and a trained trunk, for tests of what comes after: trained once for a state of the code, and copied."""

from __future__ import annotations

import json
import random
from pathlib import Path

import yaml

from factory.core.workspace import Workspace, WorkspaceConfig
from factory.git.repository import checkout_live_code, get_live_commit, remove_worktree
from factory.ingest.chain import ingest_shard
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.training.planning import plan_anneal, plan_trunk
from factory.training.training import run_segment
from tests.support.git import git
from tests.support.lent_libraries import lend
from tests.support.paths import ROOT
from tests.support.plants.kept import kept

WORDS = [
    "river", "stone", "under", "light", "quiet", "machine", "opens", "every", "letter", "before",
    "winter", "holds", "small", "bright", "number", "again", "turns", "into", "green", "field",
]  # fmt: skip


def write_shards(folder: Path) -> None:
    """Two small shards of made-up text: domains ``code``, ``docs`` and ``chat``, as the tiny recipe wants them."""
    random.seed(7)
    sentence = lambda: " ".join(random.choices(WORDS, k=random.randint(8, 16))).capitalize() + "."
    for number in range(2):
        lines = []
        for index in range(160):
            name = f"{number}-{index}"
            body = "\n".join(
                f"    {random.choice(WORDS)}_{random.randint(0, 999)} = {random.choice(WORDS)}({random.randint(0, 9999)})"
                for _ in range(12)
            )
            code = f"def {random.choice(WORDS)}_{index}(value):\n{body}\n    return value\n"
            docs = " ".join(sentence() for _ in range(8))
            question, answer = f"What is {random.choice(WORDS)} {index}?", sentence() + " " + sentence()
            chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            for domain, said in {"code": {"text": code}, "docs": {"text": docs}, "chat": {"messages": chat}}.items():
                key = f"{domain}/{name}"
                lines.append({"id": key} | said | {"domain": domain, "source": key})
        (folder / f"shard-{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def lenient(policy: str) -> str:
    """The release policy with floors that a two-second model can reach."""
    data = yaml.safe_load(policy)
    data |= {
        "documents_min": 1,
        "not_releasable_max": 1.0,
        "clusters_min": 2,
        "first_release": {"bits_per_byte_max": 99.0, "below_trigram_by": -99.0},
    }
    return yaml.safe_dump(data)


def lenient_plant(root: Path, repository: Path, **recipe: object) -> Workspace:
    """A workspace without a ledger: the tiny recipe with ``recipe``'s keys, a small vocabulary, floors that any model passes."""
    return lenient_workspace(root / "plant", repository, **recipe)


def lenient_workspace(folder: Path, repository: Path, **recipe: object) -> Workspace:
    workspace = lend(Workspace.create(folder, WorkspaceConfig(recipe="tiny", repository=str(repository))))
    write_lenient_policies(workspace, **recipe)
    return workspace


def write_lenient_policies(workspace: Workspace, **recipe: object) -> None:
    """A workspace's own: floors that any model passes, a small vocabulary, the tiny recipe with ``recipe``'s keys (``model``'s are added)."""
    own = workspace.root / "policies"
    for folder in ("gates", "recipes"):
        (own / folder).mkdir(parents=True, exist_ok=True)
    (own / "gates" / "release.yaml").write_text(lenient((ROOT / "policies" / "gates" / "release.yaml").read_text()))
    data = (ROOT / "policies" / "data.yaml").read_text()
    (own / "data.yaml").write_text(data.replace("vocab_size: 4096", "vocab_size: 512"))
    tiny = yaml.safe_load((ROOT / "policies" / "recipes" / "tiny.yaml").read_text())
    model = recipe.pop("model", {})
    assert isinstance(model, dict)
    (own / "recipes" / "tiny.yaml").write_text(yaml.safe_dump(tiny | recipe | {"model": tiny["model"] | model}))


def make_plant(root: Path, repository: Path, **recipe: object) -> tuple[Workspace, Ledger]:
    """The tiny recipe with ``recipe``'s keys, two ingested shards, one finished trunk segment of 20 steps; floors that it passes."""

    def make(folder: Path) -> None:
        workspace = lenient_workspace(folder, repository, **recipe)
        close(workspace, fill(workspace))

    kept(("trained", get_live_commit(repository), recipe), root / "plant", make, {"code": repository})
    made = opened(root / "plant")
    checkout_live_code(made[0])  # as its trainer left it
    return made


def close(workspace: Workspace, ledger: Ledger) -> None:
    """Leaves what a copy may be made of: nothing open, and no worktree that the repository knows by its folder."""
    ledger.engine.dispose()
    for worktree in workspace.worktrees.iterdir():
        remove_worktree(workspace.repository, worktree)


def opened(root: Path) -> tuple[Workspace, Ledger]:
    workspace = Workspace.open(root)
    return workspace, Ledger.open(workspace.ledger_url, workspace.root)


def fill(workspace: Workspace) -> Ledger:
    """Two ingested shards, and one finished trunk segment."""
    ledger = Ledger.create(workspace.ledger_url)
    before = random.getstate()
    write_shards(workspace.inbox)
    random.setstate(before)
    for path in sorted(workspace.inbox.iterdir()):
        ingest_shard(Plant(workspace, ledger), path)
        path.unlink()
    train_trunk(workspace, ledger)
    return ledger


def train_trunk(workspace: Workspace, ledger: Ledger, steps: int | None = None) -> int:
    number = plan_trunk(Plant(workspace, ledger), steps)
    run_segment(Plant(workspace, ledger), number)
    return number


def train_anneal(workspace: Workspace, ledger: Ledger) -> int:
    number = plan_anneal(Plant(workspace, ledger))
    run_segment(Plant(workspace, ledger), number)
    return number


def commit_edit(repository: Path, path: str, old: str, new: str) -> str:
    """Change a file of the live code and commit it; returns the commit."""
    file = repository / path
    if old:
        assert file.read_text().count(old) == 1, f"{path} holds {old!r} {file.read_text().count(old)} times"
        file.write_text(file.read_text().replace(old, new))
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(new)
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", f"change {path}")
    return git(repository, "rev-parse", "HEAD")
