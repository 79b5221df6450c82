"""The command ``factory config``: prints every setting in force and its source, and changes a key in the workspace's own copy of a policy."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factory.cli.app import DEFAULT, JsonOption, WorkspaceOption, app, print_json
from factory.core.errors import ConfigError, InputError, suggest_name
from factory.core.workspace import Workspace, WorkspaceConfig, find_checkout_root, load_yaml
from kernels.contract.message import Message

if TYPE_CHECKING:
    from pydantic import BaseModel

    from factory.cli.policy_sources import PolicySetting

NAMES = (
    "factory", "data", "evals", "agents", "anomalies", "gates/audit", "gates/certificate", "gates/patch", "gates/recipe",
    "gates/release", "kernels", "notifications", "recipe", "retention", "retries", "tasks",
)  # fmt: skip
PASSWORD = re.compile(r"(://[^:/@]*:)[^@]*@")

commands = typer.Typer(
    help="Settings in force (factory.yaml, policies, recipe): print them, change one.", no_args_is_help=True
)
app.add_typer(commands, name="config")


@commands.command()
def show(
    name: Annotated[str | None, typer.Argument(help=f"One of {', '.join(NAMES)} (default: all).")] = None,
    where: WorkspaceOption = DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """Print every key with its value, its source and its meaning.

    The source is the default, the shipped file, the workspace's own copy, or the repository of the training code.
    """
    if name is not None and name not in NAMES:
        raise InputError(
            "config.no_configuration",
            "No configuration is named {name!r}{nearest}",
            name=name,
            nearest=suggest_name(name, NAMES),
        )
    if where == DEFAULT and not where.exists():
        workspace = Workspace(
            where.resolve(), WorkspaceConfig()
        )  # before 'factory init' the shipped files are in force
    else:
        workspace = Workspace.open(where)
    found = {one: read_settings(workspace, one) for one in ([name] if name else NAMES)}
    if as_json:
        print_json(
            {one: {"file": str(path), "keys": [asdict(v) for v in values]} for one, (path, values) in found.items()}
        )
        return
    for one, (path, values) in found.items():
        _print(one, path, values)


@commands.command("set")
def set_key(
    name: Annotated[str, typer.Argument(help="A policy's name, as 'factory config show' prints it, or 'recipe'.")],
    key: Annotated[
        str, typer.Argument(help="The key, with dots between its sections, such as licences.missing or held_out.share.")
    ],
    value: Annotated[
        str,
        typer.Argument(
            help="The value, as YAML, such as 0.05 or true. Of a mapping, such as '{train: true}', each key is set."
        ),
    ],
    where: WorkspaceOption = DEFAULT,
) -> None:
    """Change one key in the workspace's own copy of a policy.

    If the workspace has no copy, one is made from the file in force. Comments are kept. An invalid value is not written.
    """
    workspace = Workspace.open(where)
    if name not in _schemas():
        raise InputError(
            "config.no_policy",
            "No policy is named {name!r}{nearest}",
            name=name,
            nearest=suggest_name(name, _schemas()),
        )
    path = write_key(workspace, name, key, value)
    print(f"{path}: {key}: {value}")


def write_key(workspace: Workspace, name: str, key: str, value: str) -> Path:
    """Write a key into the workspace's own copy of a policy, and return the copy's path.

    Raises: InputError for invalid YAML; ConfigError for a value that the schema refuses.
    """
    import yaml

    from agents.core.yaml_edit import set_yaml_value
    from kernels.contract.files import write_atomically
    from kernels.contract.strict_yaml import read_yaml
    from trainer.contract.errors import TrainerError

    source = workspace.recipe_path() if name == "recipe" else workspace.policy_path(f"{name}.yaml")
    own = workspace.own_recipe_path() if name == "recipe" else workspace.root / "policies" / f"{name}.yaml"
    text = source.read_text("utf-8") if source.exists() else ""
    try:
        if not all(key.split(".")):
            raise ValueError("the key is empty or has an empty part; 'factory config show' prints the keys")
        given = read_yaml(value, "the value", ValueError)
        for place, one in _leaves(key.split("."), given):
            text = set_yaml_value(text, place, one)
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(
            "config.not_set",
            "{key} of {name} was not changed: {reason}",
            name=name,
            key=key,
            reason=" ".join(str(error).split())[:200],
        ) from None
    with tempfile.TemporaryDirectory() as folder:
        tried = Path(folder) / own.name
        tried.write_text(text, "utf-8")
        try:
            _schemas()[name](tried)
        except (ConfigError, TrainerError) as error:
            raise ConfigError(
                "config.refused",
                "{name} was not changed: {reason}",
                name=name,
                reason=str(error).replace(str(tried), str(own)),
            ) from None
    own.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(own, text)
    return own


def _leaves(place: list[str], value: object) -> Iterator[tuple[list[str], Any]]:
    """Yield (path, value) of each single value in a nested mapping. Raises: ValueError for a list, because its items have no keys."""
    if value == {}:
        raise ValueError("an empty mapping sets nothing")
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves([*place, str(key)], inner)
    elif isinstance(value, list):
        raise ValueError("this command cannot set a list; change the list in the file")
    else:
        yield place, value


def read_settings(workspace: Workspace, name: str) -> tuple[Path, list[PolicySetting]]:
    """Return the file in force, and every key with its value. Raises: ConfigError for an invalid file."""
    from factory.cli.policy_sources import list_settings
    from trainer.contract.errors import TrainerError

    if name == "factory":
        return workspace.root / "factory.yaml", _configuration(workspace)
    if name == "kernels":
        path = workspace.repository / "policies" / "kernels.yaml"
        return path, _kernels(workspace, path)
    path = workspace.recipe_path() if name == "recipe" else workspace.policy_path(f"{name}.yaml")
    try:
        return path, list(list_settings(_schemas()[name](path), load_yaml(path), _source(workspace, path)))
    except TrainerError as error:
        raise ConfigError(error.message) from None


def _schemas() -> dict[str, Callable[[Path], BaseModel]]:
    """Return, by name, the function that loads each policy, and that of the recipe."""
    from factory.audit.policy import AuditPolicy
    from factory.evals.policy import EvalPolicy
    from factory.gates.patch.policy import PatchPolicy
    from factory.gates.recipe.policy import RecipePolicy
    from factory.gates.release.anomaly_policy import AnomalyPolicy
    from factory.gates.release.policy import ReleasePolicy
    from factory.git.scope import AgentsPolicy
    from factory.ingest.rules.policy import DataPolicy
    from factory.retention.policy import RetentionPolicy
    from factory.retrying.policy import RetryPolicy
    from factory.show.notifications.receivers import NotificationPolicy
    from factory.tasks.policy import TasksPolicy
    from factory.training.certificate import CertificatePolicy
    from trainer.contract.recipe import Recipe

    return {
        "data": DataPolicy.load,
        "evals": EvalPolicy.load,
        "agents": AgentsPolicy.load,
        "anomalies": AnomalyPolicy.load,
        "gates/audit": AuditPolicy.load,
        "gates/certificate": CertificatePolicy.load,
        "gates/patch": PatchPolicy.load,
        "gates/recipe": RecipePolicy.load,
        "gates/release": ReleasePolicy.load,
        "notifications": NotificationPolicy.load,
        "recipe": Recipe.load,
        "retention": RetentionPolicy.load,
        "retries": RetryPolicy.load,
        "tasks": TasksPolicy.load,
    }


def _source(workspace: Workspace, path: Path) -> str:
    """Return the origin of a file: 'workspace' for the workspace's own copy, 'shipped', or 'repository' for that of the training code."""
    if path.is_relative_to(workspace.root / "policies"):
        return "workspace"
    return "shipped" if path.is_relative_to(find_checkout_root() / "policies") else "repository"


def _configuration(workspace: Workspace) -> list[PolicySetting]:
    from factory.cli.policy_sources import DEFAULT as UNSET
    from factory.cli.policy_sources import PolicySetting, read_field_docs

    path = workspace.root / "factory.yaml"
    given = load_yaml(path) if path.exists() else None
    about = read_field_docs(WorkspaceConfig)
    chosen = {
        key: PASSWORD.sub(r"\1***@", str(getattr(workspace, key))) for key in ("repository", "ledger_url", "mlflow_uri")
    }
    return [
        PolicySetting(
            key, chosen.get(key, value), "workspace" if isinstance(given, dict) and key in given else UNSET, about[key]
        )
        for key, value in vars(workspace.config).items()
    ]


def _kernels(workspace: Workspace, path: Path) -> list[PolicySetting]:
    """Return the implementation chosen for each op and kind of device in the live commit. ``auto`` is resolved when a segment is planned."""
    from factory.cli.policy_sources import PolicySetting
    from factory.computing.tuned_kernels import open_live_kernels_file
    from kernels.contract.registry import KernelError, load_choice

    source = _source(workspace, path)
    with open_live_kernels_file(workspace) as (live, text):
        if not path.exists() or text != path.read_text("utf-8"):
            source = f"{source}, as committed"
        try:
            load_choice(live)
        except KernelError as error:
            said = str(error).replace(str(live), str(path))
            raise ConfigError(Message.from_parts(error.code, said, error.data)) from None
        raw = load_yaml(live)
    assert isinstance(raw, dict)
    found = [(f"{kind}.{op}", one) for kind, ops in raw.items() if isinstance(ops, dict) for op, one in ops.items()]
    found += [(key, value) for key, value in raw.items() if not isinstance(value, dict)]
    return [PolicySetting(key, value, source, "") for key, value in found]


def _print(name: str, path: Path, values: list[PolicySetting]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from factory.core.console import make_table_console

    console = make_table_console()
    table = Table(title=f"{name}: {path}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("key", no_wrap=True)
    table.add_column("value", max_width=40, overflow="fold")
    table.add_column("from", no_wrap=True)
    table.add_column("meaning", ratio=1, style="dim")
    for one in values:
        shown = ", ".join(map(str, one.value)) if isinstance(one.value, list) else str(one.value)
        table.add_row(one.key, Text(shown), one.source, Text(one.about))
    console.print(table)
