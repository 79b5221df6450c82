"""``factory init`` makes a workspace whose recipe, vocabulary, tokenizer and data policy fit together, or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from factory.cli.app import app
from factory.core.errors import FactoryError, InputError
from factory.core.workspace import Workspace
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.tokenizer import train_tokenizer
from factory.presets import new_workspace
from factory.presets.presets import Hardware
from tests.support.factory.made_up_text import prose
from tests.support.git import git
from tests.support.messages import refused
from trainer.contract.recipe import Recipe


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same wherever the test runs: a laptop."""
    monkeypatch.setattr(Hardware, "of_this_machine", classmethod(lambda cls: cls((), 8e9, 1)))


def init(*words: str) -> None:
    """Run the command. Raises: FactoryError."""
    done = CliRunner().invoke(app, ["init", "--no-tune", *words])
    if done.exit_code:
        assert isinstance(done.exception, FactoryError), done.exception
        raise done.exception


def sizes(root: Path) -> tuple[str, int, int, int]:
    """(recipe, its vocabulary, the data policy's, bytes of the sample)."""
    workspace = Workspace.open(root)
    policy = DataPolicy.load(workspace.policy_path("data.yaml")).tokenizer
    recipe = Recipe.load(workspace.recipe_path())
    return workspace.config.recipe, recipe.model.vocab_size, policy.vocab_size, policy.sample_bytes


def test_the_printed_export_lets_later_commands_find_the_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = lambda *words: CliRunner().invoke(app, ["init", "--no-tune", *words]).stdout
    assert "FACTORY_HOME" not in said()
    line = next(line for line in said("-w", "my factory").splitlines() if "FACTORY_HOME" in line)
    assert line.endswith(f" export FACTORY_HOME='{tmp_path / 'my factory'}'")
    monkeypatch.setenv("FACTORY_HOME", str(tmp_path / "my factory"))
    assert "FACTORY_HOME" not in said()


def test_a_repository_without_the_training_code_is_refused(tmp_path: Path, code_repository: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.py").write_text("x = 1")
    for words in (["init", "--quiet"], ["add", "a.py"], ["commit", "--quiet", "--message=a"]):
        git(tmp_path / "other", *words)
    for folder, code, data in (
        ("nowhere", "presets.no_repository", {"folder": tmp_path / "nowhere"}),
        ("empty", "presets.bad_repository", {}),
        ("other", "presets.other_code", {"folder": "kernels"}),
    ):
        with refused(code, InputError, **data):
            init("--repository", str(tmp_path / folder), "-w", str(tmp_path / "w"))
        assert not (tmp_path / "w").exists()
    where = ["-w", str(tmp_path / "w"), "--repository", str(code_repository)]
    init(*where)
    init(*where)
    with refused("presets.other_repository", repository=code_repository.resolve()):
        init("-w", str(tmp_path / "w"), "--repository", str(tmp_path / "other"))


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
    init(*words, *where)
    assert sizes(tmp_path / "w") == made
    init(*words, *where)  # safe to repeat
    own = {str(path.relative_to(tmp_path / "w" / "policies")) for path in (tmp_path / "w" / "policies").rglob("*.yaml")}
    wanted = (
        {"data.yaml"} if made[2] != 4096 else set()
    )  # a shipped file that fits is not copied, so that updates reach it
    assert own == wanted | ({"recipes/laptop.yaml"} if "--vocabulary" in words else set())


def test_copies_of_shipped_policies_keep_their_comments_and_rules(tmp_path: Path) -> None:
    init("--preset", "laptop", "-w", str(tmp_path / "w"))
    shipped = DataPolicy.load(new_workspace.find_checkout_root() / "policies" / "data.yaml")
    own = DataPolicy.load(tmp_path / "w" / "policies" / "data.yaml")
    assert own.model_copy(update={"tokenizer": shipped.tokenizer}) == shipped
    assert "# must be the recipe's" in (tmp_path / "w" / "policies" / "data.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "code", "data"),
    [
        (["--preset", "laptp"], "no_preset", {"preset": "laptp", "nearest": "; did you mean 'laptop'?"}),
        (["--preset", "laptop", "--recipe", "tiny"], "preset_and_recipe", {"preset": "laptop"}),
        (["--recipe", "dmeo"], "no_recipe", {"name": "dmeo", "nearest": "; did you mean 'demo'?"}),
        (["--preset", "one-gpu"], "too_large", {"kind": "preset", "name": "one-gpu"}),
        (["--vocabulary", "100"], "vocabulary_range", {"size": 100, "least": 300}),
        (["--tokenizer", "nowhere.json"], "unreadable_tokenizer", {"file": Path("nowhere.json")}),
    ],
)
def test_options_that_do_not_fit_are_refused_and_nothing_is_made(
    tmp_path: Path, words: list[str], code: str, data: dict[str, Any]
) -> None:
    with refused(f"presets.{code}", **data) as found:
        init(*words, "-w", str(tmp_path / "w"))
    assert "\n" not in str(found.value)
    assert not (tmp_path / "w").exists()


def test_a_model_that_is_too_large_is_refused_with_a_preset_that_fits(tmp_path: Path) -> None:
    with refused("presets.too_large") as found:
        init("--preset", "one-gpu", "-w", str(tmp_path / "w"))
    reason, way = found.value.data["reason"], found.value.data["way"]
    assert reason.code == "presets.needs_gpus" and reason.data["size"] == pytest.approx(11.8, abs=0.05)
    assert (way.code, way.data["preset"]) == ("presets.smaller", "laptop")


def test_init_keeps_a_persons_own_policy_or_refuses_and_names_it(tmp_path: Path) -> None:
    own = tmp_path / "w" / "policies" / "data.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("tokenizer: {vocab_size: 5000}\n")
    with refused("presets.data_vocabulary", file=own, size=5000, recipe="laptop", wanted=8192):
        init("--preset", "laptop", "-w", str(tmp_path / "w"))
    init("--preset", "laptop", "--vocabulary", "5000", "-w", str(tmp_path / "w"))
    assert own.read_text() == "tokenizer: {vocab_size: 5000}\n"


def test_an_existing_workspace_does_not_change(tmp_path: Path) -> None:
    where = ["-w", str(tmp_path / "w")]
    init("--recipe", "tiny", *where)
    with refused("presets.other_recipe", recipe="tiny", wanted="laptop"):
        init("--preset", "laptop", *where)
    with refused("presets.other_vocabulary", wanted=1024, size=512):
        init("--vocabulary", "1024", *where)
    init(*where)
    assert sizes(tmp_path / "w")[0] == "tiny"


def test_a_given_tokenizer_sets_the_vocabulary(tmp_path: Path) -> None:
    given = train_tokenizer(iter([prose(i) for i in range(40)]), 700, tmp_path / "given")
    where = ["-w", str(tmp_path / "w")]
    words = ["--recipe", "tiny", "--tokenizer", str(given.folder)]
    init(*words, *where)
    assert sizes(tmp_path / "w")[1:3] == (768, 768), "padded to a multiple of 128"
    init(*words, *where)  # safe to repeat
    other = train_tokenizer(iter([prose(i) for i in range(40, 80)]), 700, tmp_path / "other")
    with refused("presets.other_tokenizer", workspace=tmp_path / "w"):
        init("--tokenizer", str(other.folder / "tokenizer.json"), *where)
    with refused("presets.vocabulary_misfit", wanted=640, entries=700, most=768):
        init("--tokenizer", str(given.folder), "--vocabulary", "640", "-w", str(tmp_path / "v"))
