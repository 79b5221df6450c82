"""``factory config show`` prints every value in force with its source, and ``set`` changes one. A policy file may leave out keys."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

from factory.cli.app import app
from factory.cli.config import NAMES, _schemas
from factory.cli.policy_sources import list_settings, read_field_docs
from factory.core.errors import FactoryError
from factory.core.policy_file import hash_policy
from factory.core.workspace import Workspace, WorkspaceConfig, find_checkout_root
from factory.ingest.rules.policy import DataPolicy
from tests.support.factory.command import command_here, factory
from tests.support.messages import refused
from trainer.contract.recipe import Recipe

LOADERS = {name: load for name, load in _schemas().items() if name not in ("anomalies", "recipe")}


def shipped(name: str) -> Path:
    return find_checkout_root() / "policies" / f"{name}.yaml"


def shown(*words: str) -> dict[str, dict[str, Any]]:
    result = CliRunner().invoke(app, ["config", "show", *words, "--json"])
    assert result.exit_code == 0, result.output
    return {name: {row["key"]: row for row in one["keys"]} for name, one in json.loads(result.stdout).items()}


@pytest.mark.parametrize("name", LOADERS)
def test_a_shipped_policy_has_the_hash_of_one_that_spells_out_every_key(name: str, tmp_path: Path) -> None:
    policy = LOADERS[name](shipped(name))
    spelled_out = tmp_path / "policy.yaml"
    spelled_out.write_text(yaml.safe_dump(policy.model_dump(mode="json"), sort_keys=False))
    again = LOADERS[name](spelled_out)
    assert hash_policy(again) == hash_policy(policy)
    sources = {value.source for value in list_settings(again, yaml.safe_load(spelled_out.read_text()), "shipped")}
    assert sources == {"shipped"}


@pytest.mark.parametrize("name", LOADERS)
def test_every_key_says_what_it_means(name: str) -> None:
    def check(schema: type[BaseModel]) -> None:
        about = read_field_docs(schema)
        for field, info in schema.model_fields.items():
            inner = info.annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                check(inner)
            elif schema.__name__ not in ("LicencePermissions", "ScopeRule"):
                assert len(about[field]) > 5, f"{schema.__name__}.{field}"

    check(type(LOADERS[name](shipped(name))))


def test_each_value_names_its_source(tmp_path: Path) -> None:
    workspace = Workspace.create(tmp_path / "w", WorkspaceConfig(recipe="tiny"))
    (workspace.root / "policies" / "gates").mkdir()
    (workspace.root / "policies" / "gates" / "patch.yaml").write_text("training: {pairs: 8, patience: {again: 2}}\n")
    found = shown("-w", str(workspace.root))
    assert set(found) == set(NAMES)
    source = lambda name, key: (found[name][key]["value"], found[name][key]["source"])
    assert source("gates/patch", "training.pairs") == (8, "workspace")
    assert source("gates/patch", "training.patience.again") == (2, "workspace")
    assert source("gates/patch", "training.steps") == (10, "default")
    assert source("gates/patch", "approval") == ("manual", "default")
    assert source("gates/release", "approval") == ("automatic", "shipped")
    assert source("data", "domains.code.max_line") == (1000, "shipped")
    assert source("data", "domains.code.min_chars") == (40, "default")
    assert source("factory", "recipe") == ("tiny", "workspace") and source("factory", "ranks") == (0, "default")
    assert source("recipe", "name") == ("tiny", "shipped") and source("recipe", "optimizer.eps")[1] == "default"
    assert source("kernels", "cpu.swiglu")[1] == "shipped"
    assert found["gates/patch"]["training.steps"]["about"] == "Steps of one timed run."
    assert found["recipe"]["model.context"]["about"] == "positions in a row"


def test_the_source_of_a_recipe_is_the_repository_until_the_workspace_has_a_copy(tmp_path: Path) -> None:
    workspace = Workspace.create(tmp_path / "w", WorkspaceConfig(recipe="tiny", repository="code"))
    policies = workspace.root / "code" / "policies"
    shutil.copytree(find_checkout_root() / "policies", policies)
    assert shown("recipe", "-w", str(workspace.root))["recipe"]["name"]["source"] == "repository"
    shutil.copytree(policies / "recipes", workspace.root / "policies" / "recipes")
    assert shown("recipe", "-w", str(workspace.root))["recipe"]["name"]["source"] == "workspace"
    assert shown("kernels", "-w", str(workspace.root))["kernels"]["cpu.swiglu"]["source"] == "repository"


def test_the_shipped_values_are_shown_without_a_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FACTORY_HOME", raising=False)
    assert shown("evals")["evals"]["documents_per_domain"]["source"] == "shipped"
    text = CliRunner().invoke(app, ["config", "show", "gates/release"]).stdout
    assert "target.alpha" in text and "0.05" in text and "promoted over a champion" in text
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_name_names_the_nearest() -> None:
    result = CliRunner().invoke(app, ["config", "show", "gates/pach"])
    assert "did you mean 'gates/patch'" in str(result.exception)


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_no_password_is_shown(tmp_path: Path, more: list[str]) -> None:
    workspace = Workspace.create(tmp_path / "workspace")
    (workspace.root / "factory.yaml").write_text(
        "ledger_url: postgresql://bob:s3cret@host/ledger\nmlflow_uri: postgresql://bob:s3cret@host/mlflow\n"
    )
    shown = factory("config", "show", "factory", "--workspace", str(workspace.root), *more)
    assert "s3cret" not in shown.stdout and shown.stdout.count("bob:***@host") == 2


def test_config_set_changes_one_key_in_the_workspaces_own_copy(workspace: Workspace) -> None:
    shipped = workspace.policy_path("data.yaml").read_text()
    done = command_here(
        "config", "set", "data", "licences.known", "{OFL-1.1: {train: true, release: true}}", home=workspace
    )
    own = workspace.root / "policies" / "data.yaml"
    assert done.exit_code == 0 and str(own) in done.stdout
    licence = DataPolicy.load(own).licences.find_licence("OFL-1.1")
    assert licence.train and licence.release
    kept = [line for line in own.read_text().splitlines() if "OFL-1.1" not in line]
    assert kept == shipped.splitlines(), "comments and all other keys stay"
    command_here("config", "set", "recipe", "optimizer.lr", "0.001", home=workspace)
    assert Recipe.load(workspace.recipe_path()).optimizer.lr == 0.001


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("data", "held_out.shares", "0.1"), "config.refused", "did you mean 'share'?"),
        (("data", "held_out.share", "much"), "config.refused", "held_out.share"),
        (("data", "held_out", "{"), "config.not_set", "held_out"),
        (("data", "held_out", "{}"), "config.not_set", "empty mapping"),
        (("data", "", "1"), "config.not_set", "key is empty"),
        (("recipe", "seed", "010"), "config.not_set", "write 10 for a number"),
        (("data", "domains.code.pii", "[email]"), "config.not_set", "cannot set a list"),
        (("date", "held_out.share", "0.1"), "config.no_policy", "did you mean 'data'?"),
    ],
)
def test_an_invalid_value_is_not_written(words: tuple[str, ...], code: str, said: str, workspace: Workspace) -> None:
    done = command_here("config", "set", *words, home=workspace)
    assert done.exit_code and isinstance(done.exception, FactoryError)
    with refused(code):
        raise done.exception
    assert said in str(done.exception)
    assert not (workspace.root / "policies" / "data.yaml").exists()
    assert not workspace.own_recipe_path().exists()


@pytest.mark.parametrize("name", ["a: b, {c}", "NO", "#1 \u201cours\u201d"])
def test_config_set_keeps_a_name_exactly_as_it_is_written(name: str, workspace: Workspace) -> None:
    value = f"{{{json.dumps(name)}: {{train: true, release: true}}}}"
    done = command_here("config", "set", "data", "licences.known", value, home=workspace)
    assert done.exit_code == 0, done.exception
    assert DataPolicy.load(workspace.policy_path("data.yaml")).licences.find_licence(name).release
