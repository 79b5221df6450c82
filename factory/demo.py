"""``factory demo``: the whole factory once, on real text, through the same code paths as the daemon.

Nothing here is scripted but the arrival of the shards: what happens to them is the reconcile loop's and the code loop's business, and
every number of the last screen is read back from the ledger. Killed half-way, the same command goes on where it was.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import yaml

from factory import daemon
from factory.console import Terminal
from factory.errors import FactoryError, InputError, WorkspaceError
from factory.ledger import Ledger, proposals, sa, shards
from factory.repository import fork
from factory.status import snapshot
from factory.summary import summary
from factory.workspace import Config, Workspace, code_root

MARK = ".demo"  # only a folder with this file in it may be thrown away by --fresh
BAD_SHARD = "surprise-00.jsonl"
CODE = "code"  # in the workspace: a repository of the demo's own, so that yours gets no branches


def run_demo(where: Path, terminal: Terminal, *, fresh: bool = False) -> None:
    """Raises: WorkspaceError when the folder holds a workspace that no demo made."""
    began = time.monotonic()
    root = where.expanduser().resolve()
    if root.exists() and any(root.iterdir()):
        if not (root / MARK).exists():
            raise WorkspaceError(f"{root} holds something that no demo made: name another folder with --workspace")
        if fresh:
            if (root / "factory.yaml").exists():
                with Workspace.open(root).lock(daemon.LOCK):  # not under a demo that is running
                    pass
            shutil.rmtree(root)
    terminal.heading(
        "1  A workspace, a copy of the code that begins with plain kernels, and a corpus: the standard library of this Python"
    )
    root.mkdir(parents=True, exist_ok=True)
    (root / MARK).touch()
    workspace = Workspace.create(root, Config(repository=CODE))
    if not workspace.repository.exists():
        fork(
            code_root(),
            workspace.repository,
            plain_kernels,
            "policies/kernels.yaml",
            "The demo begins with plain kernels",
        )
    ledger = Ledger.create(workspace.ledger_url)
    with workspace.lock(daemon.LOCK):
        corpus = _corpus(workspace, terminal)
        first = [path for path in corpus if path.stem.endswith("-00")]
        terminal.heading("2  First shards arrive: ingest, train, evaluate, gate, release")
        _arrive(workspace, ledger, first)
        daemon.reconcile(workspace, ledger, terminal, settle=0.0)
        terminal.heading(
            "3  New shards arrive, one of them bad: training goes on from the trunk, candidate 2 meets the champion"
        )
        _arrive(workspace, ledger, [path for path in corpus if path not in first] + [_bad_shard(workspace, ledger)])
        daemon.reconcile(workspace, ledger, terminal, settle=0.0)
    terminal.heading("4  The code loop: time every line of the training step, propose one patch, measure it, judge it")
    failure: FactoryError | None = None
    try:
        _code_loop(workspace, ledger, terminal)
    except FactoryError as error:  # no sandbox here, say: all that came before stands
        failure = error
        terminal.line(f"  the code loop could not run: {error}")
    terminal.heading("5  What happened")
    for line in summary(workspace, snapshot(workspace), time.monotonic() - began):
        terminal.line(line)
    if failure:
        raise failure


def plain_kernels(policy: str) -> str:
    """kernels.yaml with what runs untuned in place of ``auto``: where a factory stands before it has measured anything."""
    from agents.search_proposer import choose
    from kernels.choice import UNTUNED

    for device, choice in yaml.safe_load(policy).items():
        for op in choice if isinstance(choice, dict) else ():
            policy = choose(policy, device, op, UNTUNED.get(op, "reference"))
    return policy


def _corpus(workspace: Workspace, terminal: Terminal) -> list[Path]:
    from factory.corpus import write_corpus

    folder, aside = workspace.root / "corpus", workspace.root / "corpus.part"
    if not folder.exists():
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        write_corpus(aside, terminal)
        os.rename(aside, folder)
    found = sorted(path for path in folder.glob("*.jsonl") if path.name != BAD_SHARD)
    if not found:
        raise InputError(f"{folder} holds no shards: run 'factory demo --fresh'")
    terminal.line("  " + ", ".join(f"{path.name} {path.stat().st_size / 1e6:.1f} MB" for path in found))
    return found


def _bad_shard(workspace: Workspace, ledger: Ledger) -> Path:
    """Made once, when the first documents are in: it holds copies of ingested and of held-out documents."""
    from factory.corpus import write_bad_shard

    path = workspace.root / "corpus" / BAD_SHARD
    if not path.exists():
        aside = path.with_suffix(".part")
        write_bad_shard(aside, workspace, ledger)
        os.replace(aside, path)
    return path


def _arrive(workspace: Workspace, ledger: Ledger, files: list[Path]) -> None:
    """Drop shards into the inbox as a person would; those already ingested stay where they are."""
    from trainer.token_shard import file_sha256

    known = {row["sha256"] for row in ledger.rows(sa.select(shards.c.sha256))}
    for path in files:
        if file_sha256(path) not in known:
            aside = workspace.inbox / f"{path.name}.part"
            shutil.copyfile(path, aside)
            os.replace(aside, workspace.inbox / path.name)


def _code_loop(workspace: Workspace, ledger: Ledger, terminal: Terminal) -> None:
    from factory.proposing import propose

    if ledger.one(sa.select(proposals.c.number).where(proposals.c.verdict.is_not(None))) is None:
        with workspace.lock("code-loop"):
            propose(workspace, ledger, terminal, agent="search")
