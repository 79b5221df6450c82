"""A commit's compile cache is copied only from code that the commit contains entirely, and never from undone code."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from factory.core import devices
from factory.core.errors import WorkspaceError
from factory.core.workspace import Workspace, WorkspaceConfig
from factory.git.repository import get_live_commit
from factory.ledger.ledger import Ledger, data_plans, proposals, segments
from factory.ledger.plant import Plant
from factory.runs import compile_cache
from factory.runs.compile_cache import copy_older_cache
from factory.runs.live_code import LiveCode
from tests.support.factory.code_loop import make_target
from tests.support.plants.trained_plant import git

FILE = Path("trainer") / "model" / "transformer.py"


class History:
    """Commits of a real repository, of which some trained and compiled, some are merged proposals."""

    def __init__(self, root: Path) -> None:
        self.code = make_target(root / "code")
        self.workspace = Workspace.create(root / "plant", WorkspaceConfig(repository=str(self.code)))
        self.ledger = Ledger.create(self.workspace.ledger_url)
        self.number = 0
        with self.ledger.begin() as tx:
            tx.execute(data_plans.insert().values(id="plan", plan={}, created_at=0.0))

    def commit(self, message: str = "A change") -> str:
        path = self.code / FILE
        path.write_text(f"{path.read_text()}# {message}\n")
        git(self.code, "commit", "-qam", message)
        return get_live_commit(self.code)

    def patch(self, state: str = "approved", target: str = "op:rms_norm", message: str = "A patch") -> str:
        self.number += 1
        base, commit = get_live_commit(self.code), self.commit(message)
        values = {"number": self.number, "agent": "search", "target": target, "title": message, "hypothesis": "",
                  "base_commit": base, "branch": f"agent/{self.number}", "commit": commit, "state": state, "created_at": 0.0}  # fmt: skip
        with self.ledger.begin() as tx:
            tx.execute(proposals.insert().values(**values))
        return commit

    def reverted(self, commit: str) -> None:
        with self.ledger.begin() as tx:
            tx.execute(proposals.update().where(proposals.c.commit == commit).values(state="reverted"))

    def trained(self, commit: str, text: str = "entry") -> Path:
        """A segment of that commit, and what it compiled."""
        with self.ledger.begin() as tx:
            tx.execute(
                segments.insert().values(
                    kind="trunk",
                    generation=0,
                    data_plan="plan",
                    recipe="tiny",
                    recipe_json={},
                    recipe_sha256="",
                    code_commit=commit,
                    first_step=0,
                    last_step=1,
                    folder=f"segments/{time.monotonic_ns()}",
                    state="done",
                    created_at=0.0,
                )  # fmt: skip
            )
        cache = self.compiled(commit)
        for name in ("inductor/fxgraph/ab/entry", "triton/kernel.cubin"):
            (cache / name).parent.mkdir(parents=True, exist_ok=True)
            (cache / name).write_text(f"{text} of {commit}")
        return cache

    def compiled(self, commit: str) -> Path:
        return devices.get_compiled_code_folder(self.workspace.root, commit)

    def begins(self, commit: str) -> Path | None:
        return copy_older_cache(Plant(self.workspace, self.ledger), commit)


@pytest.fixture()
def history(tmp_path: Path) -> Iterator[History]:
    yield History(tmp_path)


def test_a_merged_patch_starts_with_a_copy_of_the_cache_of_the_code_before_it(history: History) -> None:
    first = history.trained(get_live_commit(history.code))
    merged = history.patch()
    LiveCode.check_out_commit(Plant(history.workspace, history.ledger), merged)
    own = history.compiled(merged)
    names = ["inductor/fxgraph/ab/entry", "triton/kernel.cubin"]
    assert sorted(str(path.relative_to(own)) for path in own.rglob("*") if path.is_file()) == names
    for name in names:
        assert (own / name).read_bytes() == (first / name).read_bytes()
        assert (own / name).stat().st_ino != (first / name).stat().st_ino, (
            "through a link newer code would write into older code's cache"
        )
    assert [path.name for path in own.parent.iterdir() if "begin" in path.name] == []
    (own / names[0]).write_text("its own")
    assert history.begins(merged) is None and (own / names[0]).read_text() == "its own", "it has one already"
    history.trained(merged, "newer")
    assert history.begins(history.patch()) == own, "the newest"


def test_older_code_never_reads_the_cache_of_newer_code(history: History) -> None:
    before = get_live_commit(history.code)
    history.trained(history.patch())
    assert history.begins(before) is None and not history.compiled(before).exists()


def test_code_that_takes_a_patch_back_starts_with_an_empty_cache(history: History) -> None:
    hostile = history.patch()
    history.trained(hostile)
    history.reverted(hostile)
    undone = history.commit(f"Revert proposal 1\n\nThis reverts {hostile}.")
    assert history.begins(undone) is None
    clean = history.trained(undone)
    assert history.begins(history.patch()) == clean, "its own cache is clean"


def test_a_proposal_that_undoes_another_starts_with_an_empty_cache(history: History) -> None:
    history.trained(history.patch())
    history.trained(history.patch())
    assert history.begins(history.patch(target="undo:1", message="Undo proposal 1")) is None


def test_a_persons_change_of_agents_code_starts_with_an_empty_cache(history: History) -> None:
    people = history.trained(get_live_commit(history.code))
    assert history.begins(history.commit("By a person")) == people, "all of the code is people's"
    history.trained(history.patch())
    history.trained(history.patch())
    by_hand = history.commit("It may take a patch back, by hand")
    assert history.begins(by_hand) == people, "which no agent's patch ever wrote in"
    people.rename(people.with_name("gone"))
    assert history.begins(history.commit("Once more")) is None


def test_the_cache_of_code_on_another_branch_is_not_read(history: History) -> None:
    before = get_live_commit(history.code)
    history.trained(history.commit("On a line that is given up"))
    git(history.code, "reset", "-q", "--hard", before)
    assert history.begins(history.commit("On another")) is None


def test_large_caches_are_skipped_and_only_plain_files_are_copied(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = history.trained(get_live_commit(history.code))
    os.mkfifo(cache / "inductor" / "pipe")
    (cache / "inductor" / "link").symlink_to("/etc/passwd")
    (cache / "elsewhere").symlink_to("/etc")
    merged = history.patch()
    with monkeypatch.context() as small:
        small.setattr(compile_cache, "MOST_BYTES", 10)
        assert history.begins(merged) is None
    (history.workspace.root / "cache" / "beginning" / "left").mkdir(parents=True)  # of a factory that was killed
    assert history.begins(merged) == cache
    names = {str(path.relative_to(history.compiled(merged))) for path in history.compiled(merged).rglob("*")}
    assert names == {
        "inductor",
        "inductor/fxgraph",
        "inductor/fxgraph/ab",
        "inductor/fxgraph/ab/entry",
        "triton",
        "triton/kernel.cubin",
    }


def test_two_processes_do_not_copy_a_cache_at_the_same_time(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    history.trained(get_live_commit(history.code))
    merged = history.patch()
    monkeypatch.setattr(compile_cache, "PATIENCE_SECONDS", 0.0)
    with history.workspace.hold_lock("compile-cache"), pytest.raises(WorkspaceError, match=r"compile-cache.lock"):
        history.begins(merged)
