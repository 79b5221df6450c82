"""Tests with a real git repository: commits, refusals, and no branches or folders left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factory.computing.tuned_kernels import open_live_kernels_file
from factory.core.faults import BROKEN, find_fault_in
from factory.core.workspace import Workspace, WorkspaceConfig, find_checkout_root
from factory.git import repository
from factory.git.git_store import ENVIRONMENT
from factory.git.repository import AppliedPatch, RepositoryError, ScopeError
from factory.git.scope import AgentsPolicy, FileChange, find_scope_problems
from tests.support.git import git
from tests.support.messages import refused

POLICY = AgentsPolicy.load(find_checkout_root() / "policies" / "agents.yaml")
FILES = {
    "kernels/ops.py": "def op(x):\n    return x\n",
    "trainer/__init__.py": "",
    "policies/kernels.yaml": "cpu:\n  rms_norm: reference\n",
    "factory/judge.py": "THRESHOLD = 1\n",
    "README.md": "# target\n",
}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git(tmp_path, "init", "-q", "-b", "main", str(folder))
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "base")
    return folder


@pytest.fixture
def live(tmp_path: Path, target: Path) -> Workspace:
    return Workspace.create(tmp_path / "workspace", WorkspaceConfig(repository=str(target)))


def apply(
    target: Path, edits: list[tuple[str, str]], worktrees: Path, branch: str = "factory/search/1-try"
) -> AppliedPatch:
    base = repository.get_live_commit(target)
    return repository.apply_proposal(
        target, base, edits, policy=POLICY, branch=branch, message="Try it\n\nWhy not.", worktrees=worktrees
    )


def left_behind(target: Path) -> tuple[str, int]:
    return git(target, "branch", "--list", "factory/*"), len(git(target, "worktree", "list").splitlines())


# -- the live code ---------------------------------------------------------------------------------------------------
def test_live_code_is_checked_out_once_and_repaired(live: Workspace, target: Path) -> None:
    folder = repository.checkout_live_code(live)
    assert folder.name == f"live-{git(target, 'rev-parse', 'HEAD')[:12]}"
    assert {p: (folder / p).read_text() for p in FILES} == FILES
    assert git(folder, "status", "--porcelain") == ""
    before = (folder / "kernels/ops.py").stat().st_mtime_ns
    assert repository.checkout_live_code(live) == folder and (folder / "kernels/ops.py").stat().st_mtime_ns == before

    (folder / "kernels/ops.py").write_text("tampered")
    repository.checkout_live_code(live)
    assert (folder / "kernels/ops.py").read_text() == FILES["kernels/ops.py"]


@pytest.mark.parametrize(
    "damage", ["folder deleted", "pruned", "registration deleted", "half written", "a file in its place"]
)
def test_damaged_live_code_is_checked_out_again(live: Workspace, target: Path, damage: str) -> None:
    import shutil

    folder = repository.checkout_live_code(live)
    if damage == "half written":
        (folder / "kernels/ops.py").unlink()
    else:
        if damage == "registration deleted":
            shutil.rmtree(target / ".git" / "worktrees")
        else:
            shutil.rmtree(folder)
        if damage == "pruned":
            git(target, "worktree", "prune")
        if damage == "a file in its place":
            folder.write_text("what")
    assert repository.checkout_live_code(live) == folder
    assert (folder / "kernels/ops.py").read_text() == FILES["kernels/ops.py"]
    assert git(folder, "rev-parse", "HEAD") == git(target, "rev-parse", "HEAD")
    assert left_behind(target)[1] == 2


def test_a_detached_head_is_allowed_and_uncommitted_files_are_named(live: Workspace, target: Path) -> None:
    git(target, "checkout", "-q", "--detach")
    (target / "kernels/ops.py").write_text("not committed\n")
    (target / "README.md").write_text("not code\n")
    assert repository.list_changed_files(target) == ["kernels/ops.py"]
    folder = repository.checkout_live_code(live)
    assert (folder / "kernels/ops.py").read_text() == FILES["kernels/ops.py"]


@pytest.mark.parametrize("what", ["no folder", "no repository", "inside another", "no commit"])
def test_a_folder_that_is_not_a_repository_with_a_commit_is_refused(tmp_path: Path, target: Path, what: str) -> None:
    folder = {"no folder": tmp_path / "none", "inside another": target / "kernels"}.get(what, tmp_path / "plain")
    if what in ("no repository", "no commit"):
        folder.mkdir()
    if what == "no commit":
        git(folder, "init", "-q")
    code = {"no folder": "git.no_folder", "no commit": "git.no_commit"}.get(what, "git.no_checkout")
    with refused(code, RepositoryError, repository=folder):
        repository.get_live_commit(folder)


# -- proposals -------------------------------------------------------------------------------------------------------
def test_a_patch_becomes_one_commit_on_a_branch(target: Path, tmp_path: Path) -> None:
    base = git(target, "rev-parse", "HEAD")
    edits = [("policies/kernels.yaml", "cpu:\n  rms_norm: fast\n"), ("kernels/new.py", "x = 1\n")]
    applied = apply(target, edits, tmp_path / "try")
    assert git(target, "rev-parse", "HEAD") == base and git(target, "status", "--porcelain") == ""
    assert git(target, "rev-parse", "factory/search/1-try") == applied.commit
    assert git(target, "log", "-1", "--format=%an <%ae> %P %B", applied.commit).startswith(
        f"factory <factory@localhost> {base} Try"
    )
    assert (applied.worktree / "kernels/new.py").read_text() == "x = 1\n"
    assert [c.path for c in repository.read_file_changes(target, base, applied.commit)] == [
        "kernels/new.py",
        "policies/kernels.yaml",
    ]
    assert "+  rms_norm: fast" in repository.read_patch(target, base, applied.commit)

    new = repository.reword_commit(target, applied, "Judged\n")
    assert git(target, "log", "-1", "--format=%s", "factory/search/1-try") == "Judged"
    assert repository.hash_patch(target, base, new) == applied.patch_sha256
    assert repository.list_numbers_of_proposal_branches(target) == {1}

    repository.remove_worktree(target, applied.worktree)
    repository.remove_branch(target, applied.branch)
    assert left_behind(target) == ("", 1) and not applied.worktree.exists()


def test_no_variable_of_our_environment_reaches_git(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hook := tmp_path / "hooks" / "reference-transaction").parent.mkdir()
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)
    base = repository.get_live_commit(target)
    hostile = {
        "GIT_DIR": "nowhere",
        "GIT_INDEX_FILE": "nowhere",
        "GIT_TRACE": f"{tmp_path}/ran",
        "GIT_EXEC_PATH": "nowhere",
    }
    hostile |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.hooksPath", "GIT_CONFIG_VALUE_0": str(hook.parent)}
    for name, value in hostile.items():
        monkeypatch.setenv(name, value)
    assert apply(target, [("kernels/new.py", "x = 1\n")], tmp_path / "1").base == base
    assert not (tmp_path / "ran").exists()


def test_equal_patches_have_equal_hashes(target: Path, tmp_path: Path) -> None:
    one = apply(target, [("kernels/ops.py", "a = 1\n")], tmp_path / "1", "factory/search/1-a")
    two = apply(target, [("kernels/ops.py", "a = 1\n")], tmp_path / "2", "factory/search/2-a")
    three = apply(target, [("kernels/ops.py", "a = 2\n")], tmp_path / "3", "factory/search/3-a")
    assert one.patch_sha256 == two.patch_sha256 != three.patch_sha256


def test_an_existing_branch_is_never_moved(target: Path, tmp_path: Path) -> None:
    first = apply(target, [("kernels/ops.py", "a = 1\n")], tmp_path / "1")
    with pytest.raises(RepositoryError):
        apply(target, [("kernels/ops.py", "a = 2\n")], tmp_path / "2")
    assert git(target, "rev-parse", "factory/search/1-try") == first.commit and not (tmp_path / "2").exists()


def test_a_failed_checkout_leaves_no_branch_and_no_folder(target: Path, tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("a file where a folder is needed")
    with pytest.raises((RepositoryError, OSError)):
        apply(target, [("kernels/ops.py", "a = 1\n")], tmp_path / "occupied" / "try")
    assert left_behind(target) == ("", 1)


def test_executable_files_keep_their_mode(target: Path, tmp_path: Path) -> None:
    (target / "kernels/ops.py").chmod(0o755)
    git(target, "commit", "-q", "-am", "executable")
    applied = apply(target, [("kernels/ops.py", "a = 1\n")], tmp_path / "try")
    assert repository.read_file_modes(target, applied.commit)["kernels/ops.py"] == "100755"


def test_a_branch_name_has_only_safe_characters() -> None:
    assert (
        repository.make_branch_name("search", 3, "Attention: grouped rows!")
        == "factory/search/3-attention-grouped-rows"
    )
    assert repository.make_branch_name("../x", 3, "$(rm -rf /)\n") == "factory/x/3-rm-rf"
    assert repository.make_branch_name("", 3, "…") == "factory/agent/3-patch"


# -- the rules of scope ------------------------------------------------------------------------------------------------
PARTS = [
    "kernels",
    "trainer",
    "policies",
    "recipes",
    "factory",
    "KERNELS",
    "..",
    ".",
    "",
    "a.py",
    "b.yaml",
    "kernels.yaml",
]
PARTS += [".gitattributes", "conftest.py", "é.py", "a\n.py", "a\0.py", "con.py", "a .py", "-a.py", "C:"]
paths = st.lists(st.sampled_from(PARTS) | st.text(max_size=4), min_size=1, max_size=4).map("/".join)


@given(paths)
def test_only_plain_names_in_scope_pass(path: str) -> None:
    if not find_scope_problems(POLICY, [FileChange(path, b"x = 1\n")], {}):
        assert path.isascii() and ".." not in path.split("/") and not path.startswith("/")
        assert path.startswith(("kernels/", "trainer/", "policies/recipes/")) or path == "policies/kernels.yaml"
        assert (
            path.endswith((".py", ".yaml", ".cpp", ".h", ".cu", ".cuh"))
            and path.isprintable()
            and "conftest" not in path
        )


@pytest.mark.parametrize(
    ("path", "code", "data"),
    [
        ("kernels/swiglu/fused.cpp", None, {}),
        ("kernels/swiglu/own.cuh", None, {}),
        ("kernels/swiglu/fused.rs", "scope.wrong_suffix", {"rules": ["kernels/**"]}),
        ("trainer/fast.cpp", "scope.wrong_suffix", {"rules": ["trainer/**"], "suffixes": [".py"]}),
        ("policies/recipes/x.py", "scope.wrong_suffix", {"rules": ["policies/recipes/**"], "suffixes": [".yaml"]}),
        ("kernels/contract/op.cpp", "scope.protected", {"rule": "kernels/contract/**"}),
        ("trainer/__init__.py", "scope.protected", {"rule": "trainer/contract/**"}),
        ("factory/x.cpp", "scope.not_patchable", {}),
    ],
)
def test_a_refused_path_names_the_rule_that_refuses_it(path: str, code: str | None, data: dict[str, Any]) -> None:
    problems = [
        one.data["problem"]
        for one in find_scope_problems(POLICY, [FileChange(path, b"x")], {"trainer/__init__.py": "100644"})
    ]  # type: ignore[attr-defined]
    assert [one.code for one in problems] == ([code] if code else [])
    assert not code or data.items() <= problems[0].data.items()


def test_a_scope_error_lists_all_problems(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ScopeError) as error:
        apply(target, [("factory/judge.py", "THRESHOLD = 0\n"), ("kernels/a.py", "\x1b[2K")], tmp_path / "try")
    problems = [one.data["problem"].code for one in error.value.problems]
    assert problems == ["scope.not_patchable", "scope.invisible_character"] and left_behind(target) == ("", 1)


def test_a_fault_of_the_machine_during_a_git_command_is_raised(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing disk must not be read as an unknown branch, an unmerged commit or other live kernels."""
    fails = tmp_path / "git"
    fails.write_text("#!/bin/sh\necho 'fatal: unable to read tree: Input/output error' >&2\nexit 128\n")
    fails.chmod(0o755)
    monkeypatch.setitem(ENVIRONMENT, "PATH", f"{tmp_path}:{ENVIRONMENT['PATH']}")
    asked = (
        lambda: repository.get_branch_commit(tmp_path, "factory/search/1-x"),
        lambda: repository.is_ancestor(tmp_path, "a", "b"),
        lambda: repository.get_live_commit(tmp_path),
        lambda: open_live_kernels_file(workspace).__enter__(),
    )
    for ask in asked:
        with pytest.raises(RepositoryError, match="Input/output error") as raised:
            ask()
        assert find_fault_in(raised.value) == BROKEN
