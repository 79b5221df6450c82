"""``factory init``: recipe, vocabulary, tokenizer and data policy fit one another, or nothing is made."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from factory.cli.app import app
from factory.core.errors import FactoryError
from factory.core.workspace import Workspace
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.tokenizer import train
from factory.presets import making
from factory.presets.presets import Hardware
from tests.support.factory.made_up_text import prose
from tests.support.git import git
from trainer.contract.recipe import Recipe


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same wherever the test runs: a laptop."""
    monkeypatch.setattr(Hardware, "here", classmethod(lambda cls: cls((), 8e9, 1)))


def init(*words: str) -> str:
    """What is said of it: empty when the workspace is ready."""
    done = CliRunner().invoke(app, ["init", "--no-tune", *words])
    if done.exit_code == 0:
        return ""
    assert isinstance(done.exception, FactoryError), done.exception
    return str(done.exception)


def sizes(root: Path) -> tuple[str, int, int, int]:
    """(recipe, its vocabulary, the data policy's, bytes of the sample)."""
    workspace = Workspace.open(root)
    policy = DataPolicy.load(workspace.policy("data.yaml")).tokenizer
    recipe = Recipe.load(workspace.recipe_path())
    return workspace.config.recipe, recipe.model.vocab_size, policy.vocab_size, policy.sample_bytes


def test_what_it_says_next_lets_every_later_command_find_the_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = lambda *words: CliRunner().invoke(app, ["init", "--no-tune", *words]).stdout
    assert "export" not in said()
    line = next(line for line in said("-w", "my factory").splitlines() if "export" in line)
    assert line == f"so that later commands find it: export FACTORY_HOME='{tmp_path / 'my factory'}'"
    monkeypatch.setenv("FACTORY_HOME", str(tmp_path / "my factory"))
    assert "export" not in said()


def test_a_repository_that_nothing_can_be_trained_with_is_refused(tmp_path: Path, code_repository: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.py").write_text("x = 1")
    for words in (["init", "--quiet"], ["add", "a.py"], ["commit", "--quiet", "--message=a"]):
        git(tmp_path / "other", *words)
    for folder, why in (
        ("nowhere", "no such folder: name a clone of the factory's repository"),
        ("empty", "is not a git checkout"),
        ("other", "has no folder kernels/: name a clone"),
    ):
        assert why in init("--repository", str(tmp_path / folder), "-w", str(tmp_path / "w"))
        assert not (tmp_path / "w").exists()
    where = ["-w", str(tmp_path / "w"), "--repository", str(code_repository)]
    assert init(*where) == "" and init(*where) == ""
    assert "is a workspace already, of " in init("-w", str(tmp_path / "w"), "--repository", str(tmp_path / "other"))


@pytest.mark.parametrize(
    ("words", "made"),
    [
        ([], ("demo", 4096, 4096, 6_000_000)),
        (["--preset", "laptop"], ("laptop", 8192, 8192, 12_288_000)),
        (["--preset", "one-gpu", "--force"], ("one-gpu", 32768, 32768, 49_152_000)),
        (["--preset", "eight-gpus", "--force"], ("eight-gpus", 65536, 65536, 98_304_000)),
        (["--recipe", "tiny"], ("tiny", 512, 512, 6_000_000)),
        (["--recipe", "llama-100m"], ("llama-100m", 32000, 32000, 48_000_000)),
        (["--preset", "laptop", "--vocabulary", "6000"], ("laptop", 6000, 6000, 9_000_000)),
    ],
)
def test_recipe_vocabulary_and_policy_are_set_together(tmp_path: Path, words: list[str], made: tuple) -> None:
    where = ["-w", str(tmp_path / "w")]
    assert init(*words, *where) == "" and sizes(tmp_path / "w") == made
    assert init(*words, *where) == "", "safe to repeat"
    own = {str(path.relative_to(tmp_path / "w" / "policies")) for path in (tmp_path / "w" / "policies").rglob("*.yaml")}
    wanted = {"data.yaml"} if made[2] != 4096 else set()  # shipped files that fit are not copied: they may be improved
    assert own == wanted | ({"recipes/laptop.yaml"} if "--vocabulary" in words else set())


def test_shipped_comments_and_rules_stay_in_the_copy(tmp_path: Path) -> None:
    assert init("--preset", "laptop", "-w", str(tmp_path / "w")) == ""
    shipped = DataPolicy.load(making.code_root() / "policies" / "data.yaml")
    own = DataPolicy.load(tmp_path / "w" / "policies" / "data.yaml")
    assert own.model_copy(update={"tokenizer": shipped.tokenizer}) == shipped
    assert "# must be the recipe's" in (tmp_path / "w" / "policies" / "data.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--preset", "laptp"], "no preset 'laptp'; did you mean 'laptop'?"),
        (["--preset", "laptop", "--recipe", "tiny"], "name --preset or --recipe, not both"),
        (["--recipe", "dmeo"], "no recipe 'dmeo'; did you mean 'demo'?"),
        (["--preset", "one-gpu"], "preset one-gpu needs one GPU with 11.8 GB; this machine has no GPU and 8 GB of memory: '--preset laptop'"),
        (["--vocabulary", "100"], "--vocabulary: 100 is not between 300 and"),
        (["--tokenizer", "nowhere.json"], "--tokenizer: nowhere.json cannot be read"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_nothing_is_made(tmp_path: Path, words: list[str], said: str) -> None:
    refused = init(*words, "-w", str(tmp_path / "w"))
    assert said in refused and "\n" not in refused
    assert not (tmp_path / "w").exists()


def test_a_policy_that_a_person_put_there_is_kept_or_named(tmp_path: Path) -> None:
    own = tmp_path / "w" / "policies" / "data.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("tokenizer: {vocab_size: 5000}\n")
    said = init("--preset", "laptop", "-w", str(tmp_path / "w"))
    assert f"{own}: tokenizer.vocab_size is 5000, recipe laptop has model.vocab_size 8192" in said
    assert init("--preset", "laptop", "--vocabulary", "5000", "-w", str(tmp_path / "w")) == ""
    assert own.read_text() == "tokenizer: {vocab_size: 5000}\n"


def test_a_workspace_that_is_there_is_no_other(tmp_path: Path) -> None:
    where = ["-w", str(tmp_path / "w")]
    assert init("--recipe", "tiny", *where) == ""
    assert "is a workspace already, of recipe tiny: name a new folder for laptop" in init("--preset", "laptop", *where)
    assert "is a workspace already, of 512" in init("--vocabulary", "1024", *where)
    assert init(*where) == "" and sizes(tmp_path / "w")[0] == "tiny"


def test_a_given_tokenizer_sets_the_vocabulary(tmp_path: Path) -> None:
    given = train(iter([prose(i) for i in range(40)]), 700, tmp_path / "given")
    where = ["-w", str(tmp_path / "w")]
    words = ["--recipe", "tiny", "--tokenizer", str(given.folder)]
    assert init(*words, *where) == "" and sizes(tmp_path / "w")[1:3] == (768, 768), "padded to a multiple of 128"
    assert init(*words, *where) == "", "safe to repeat"
    other = train(iter([prose(i) for i in range(40, 80)]), 700, tmp_path / "other")
    assert "has its tokenizer already" in init("--tokenizer", str(other.folder / "tokenizer.json"), *where)
    said = init("--tokenizer", str(given.folder), "--vocabulary", "640", "-w", str(tmp_path / "v"))
    assert said == "--vocabulary 640: the tokenizer has 700 entries: leave it out, or name 700 to 768"
