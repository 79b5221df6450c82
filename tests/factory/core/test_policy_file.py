"""The same rules hold for every YAML file that a person writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from factory.cli.config import _schemas
from factory.core.errors import ConfigError
from factory.core.workspace import Workspace, find_checkout_root
from factory.evals.policy import EvalPolicy
from kernels.contract.op import KernelError
from kernels.contract.registry import load_choice

POLICIES: dict[str, Callable[[Path], object]] = {
    "kernels.yaml": load_choice,
    **{f"{name}.yaml": load for name, load in _schemas().items() if name != "recipe"},
}


def test_every_shipped_policy_is_tested_here() -> None:
    folder = find_checkout_root() / "policies"
    shipped = {str(path.relative_to(folder)) for path in folder.rglob("*.yaml")}
    assert {name for name in shipped if not name.startswith("recipes/")} == set(POLICIES)


@pytest.mark.parametrize("name", POLICIES)
def test_a_duplicate_key_is_refused(name: str, tmp_path: Path) -> None:
    """YAML takes the last of two values: a first 'approval: manual' would be ignored."""
    text = (find_checkout_root() / "policies" / name).read_text()
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    POLICIES[name](path)
    first = next(line for line in text.splitlines() if line[:1].isalpha()).partition(":")[0]
    path.write_text(f"{text}\n{first}: 1\n")
    with pytest.raises((ConfigError, KernelError), match=f"key '{first}' appears twice"):
        POLICIES[name](path)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "kernels.yaml"])
def test_an_unknown_key_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text((find_checkout_root() / "policies" / name).read_text() + "\nno_such_key: 1\n")
    with pytest.raises(ConfigError, match="unknown key 'no_such_key'"):
        POLICIES[name](path)


def test_a_number_with_an_exponent_is_a_number(tmp_path: Path) -> None:
    """YAML 1.1 would read 2e-2 as text."""
    path = tmp_path / "evals.yaml"
    path.write_text("window_overlap: 2e-2\n")
    assert EvalPolicy.load(path).window_overlap == 0.02


def test_a_duplicate_key_of_the_configuration_is_refused(tmp_path: Path) -> None:
    Workspace.create(tmp_path / "w")
    path = tmp_path / "w" / "factory.yaml"
    path.write_text("recipe: tiny\nrecipe: demo\n")
    with pytest.raises(ConfigError, match="key 'recipe' appears twice"):
        Workspace.open(tmp_path / "w")
