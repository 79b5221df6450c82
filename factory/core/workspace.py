"""A factory's folder: its layout, its configuration and its locks (DESIGN §3).

``Workspace.create`` makes a workspace, ``Workspace.open`` opens one. This module does not read the ledger.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from factory.core.errors import ConfigError, WorkspaceError, suggest_name
from factory.core.file_lock import LockedError, hold_file_lock
from kernels.contract.files import write_atomically
from kernels.contract.message import Message
from kernels.contract.strict_yaml import read_yaml

VERSION = 1
MODEL_LOOP = "model-loop"  # the lock that 'factory run' holds while it runs
PATIENCE = 180.0  # seconds to wait for a lock that other processes hold briefly: up to a minute on a busy machine
TRAINING_SANDBOX = ("auto", "required", "off")
FOLDERS_FOR_PEOPLE = ("inbox", "policies", "logs")  # a person may put files there before the factory exists
CONFIG_HEADING = Message(
    "workspace.config_heading",
    "# This factory's configuration. Every key is optional. An unknown key is an error.",
)
FOLDERS = (
    "inbox",
    "shards",
    "exports",
    "segments",
    "worktrees",
    "reports",
    "logs",
    "tokenizer",
    "quarantine",
    "policies",
)


@dataclass(frozen=True)
class WorkspaceConfig:
    """``factory.yaml``. Every key is optional."""

    version: int = VERSION
    """The version of the workspace's layout."""
    recipe: str = "demo"
    """The name of a file in ``policies/recipes/``, without ``.yaml``."""
    repository: str = ""
    """The git repository with the training code that agents patch, relative to the workspace; by default the factory's own."""
    import_from: str = ""
    """The folder or .gguf file whose model 'factory init --from' imports before anything is trained; '': the factory's models begin anew."""
    find_rate: bool = True
    """Whether the learning rate of an imported model is searched by a short run before its first training, as 'factory tune --rate' does."""
    ledger_url: str = ""
    """The ledger's SQLAlchemy address; by default an SQLite file of the workspace."""
    mlflow_uri: str = ""
    """MLflow's address; by default an SQLite file of the workspace."""
    ranks: int = 0
    """The number of ranks that train; 0: one for each GPU of this machine, or one without a GPU."""
    launcher: str = ""
    """The command that starts the ranks instead of torchrun on this machine, for several machines that share the workspace:
    ``srun --ntasks-per-node=1 torchrun --nnodes=4 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500``."""
    metrics_port: int = 0
    """The port on 127.0.0.1 where the daemon serves metrics for Prometheus; 0: none."""
    training_sandbox: str = "auto"
    """Whether training runs in the sandbox. auto: yes, if one is available; without one, or with a launcher, training runs outside until an
    agent's patch is merged. required: always. off: never, with a warning."""


def find_checkout_root() -> Path:
    """Return the checkout from which this package is imported."""
    return Path(__file__).resolve().parents[2]


class WorkspaceFolderDescriptor:
    """A descriptor. It returns the path of the workspace's folder that has the same name as the attribute."""

    def __set_name__(self, owner: type[Workspace], name: str) -> None:
        self.name = name

    def __get__(self, workspace: Workspace, owner: type[Workspace]) -> Path:
        return workspace.root / self.name


@dataclass(frozen=True)
class Workspace:
    root: Path
    config: WorkspaceConfig

    inbox = WorkspaceFolderDescriptor()
    quarantine = WorkspaceFolderDescriptor()
    shards = WorkspaceFolderDescriptor()
    tokenizer = WorkspaceFolderDescriptor()
    segments = WorkspaceFolderDescriptor()
    exports = WorkspaceFolderDescriptor()
    worktrees = WorkspaceFolderDescriptor()
    reports = WorkspaceFolderDescriptor()
    logs = WorkspaceFolderDescriptor()

    @property
    def repository(self) -> Path:
        return self.root / self.config.repository if self.config.repository else find_checkout_root()

    @property
    def ledger_url(self) -> str:
        return self.config.ledger_url or f"sqlite:///{self.root / 'ledger.db'}"

    @property
    def mlflow_uri(self) -> str:
        return self.config.mlflow_uri or f"sqlite:///{self.root / 'mlflow.db'}"

    @property
    def mlflow_artifacts(self) -> Path:
        return self.root / "mlartifacts"

    def policy_path(self, name: str) -> Path:
        """Return the path of a policy file, for example ``data.yaml``: the workspace's own copy if it exists, else the checkout's file."""
        own = self.root / "policies" / name
        path = own if own.exists() else find_checkout_root() / "policies" / name
        if not path.exists():
            raise ConfigError(
                "workspace.no_policy",
                "Policy {policy!r} does not exist. The factory looked for {own} and for {shipped}",
                policy=name,
                own=own,
                shipped=path,
            )
        return path

    def own_recipe_path(self) -> Path:
        """Return the path of the workspace's own copy of the recipe, which may not exist. Proposals do not change this copy."""
        return self.root / "policies" / "recipes" / f"{self.config.recipe}.yaml"

    def recipe_path(self) -> Path:
        """Return the path of the recipe that ``factory.yaml`` names.

        The workspace's own copy comes first, then the trained repository's (approved proposals change it), then the checkout's.
        Raises: ConfigError that names the nearest recipe when no recipe has that name.
        """
        name = f"recipes/{self.config.recipe}.yaml"
        live = self.repository / "policies" / name
        if live.is_file() and not self.own_recipe_path().exists():
            return live
        try:
            return self.policy_path(name)
        except ConfigError:
            known = {
                p.stem for d in (self.root, find_checkout_root()) for p in (d / "policies" / "recipes").glob("*.yaml")
            }
            where = self.root / "factory.yaml"
            raise ConfigError(
                "workspace.no_recipe",
                "{file}: the recipe {recipe!r} does not exist{hint}",
                file=where,
                recipe=self.config.recipe,
                hint=suggest_name(self.config.recipe, known),
            ) from None

    # -- making and finding -----------------------------------------------------------------------------------------
    @classmethod
    def create(
        cls, root: Path, config: WorkspaceConfig | None = None, policies: Mapping[str, str] | None = None
    ) -> Workspace:
        """Create a workspace: its folders, its own copies of ``policies`` (path in ``policies/`` → text) and, last, ``factory.yaml``.

        If the workspace exists already, it is opened and nothing is overwritten. Raises: WorkspaceError for a folder with other contents.
        """
        root = root.expanduser().resolve()
        _refuse_odd_name(root)
        if (root / "factory.yaml").exists():
            return cls.open(root)
        if root.exists() and not root.is_dir():
            raise WorkspaceError("workspace.is_a_file", "{folder} is a file. Choose a folder", folder=root)
        if left := list_factory_files(root):
            raise WorkspaceError(
                "workspace.left_work",
                "{folder} has data of an earlier factory ({found}), but no factory.yaml. To restore the earlier factory, run "
                "'factory restore --workspace {folder}'. For a new factory, choose an empty folder",
                folder=root,
                found=left,
            )
        if root.exists() and any(path.name not in (".demo", "cache", *FOLDERS) for path in root.iterdir()):
            raise WorkspaceError(
                "workspace.not_empty",
                "{folder} is not empty and is not a workspace. Choose an empty folder",
                folder=root,
            )
        config = config or WorkspaceConfig()
        try:
            for folder in FOLDERS:
                (root / folder).mkdir(parents=True, exist_ok=True)
            for name, text in (policies or {}).items():
                (root / "policies" / name).parent.mkdir(exist_ok=True)
                write_atomically(root / "policies" / name, text)
            _write_config(root / "factory.yaml", config)
        except OSError as error:
            raise WorkspaceError(
                "workspace.not_made", "The workspace {folder} cannot be created: {why}", folder=root, why=error.strerror
            ) from error
        return cls(root, config)

    @classmethod
    def open(cls, root: Path) -> Workspace:
        """Open a workspace.

        Raises: WorkspaceError when the workspace does not exist or has another version; ConfigError for an invalid ``factory.yaml``.
        """
        root = root.expanduser().resolve()
        _refuse_odd_name(root)
        path = root / "factory.yaml"
        if not os.access(root, os.R_OK | os.X_OK) and root.exists():
            raise WorkspaceError(
                "workspace.no_permission", "{folder} cannot be read: this user has no permission", folder=root
            )
        if not path.exists():
            if left := list_factory_files(root):
                raise WorkspaceError(
                    "workspace.no_config",
                    "{file} is missing, but the folder has data of a factory ({found}). Restore the file from the newest "
                    "backup with 'factory restore --workspace {folder}'",
                    file=path,
                    folder=root,
                    found=left,
                )
            raise WorkspaceError(
                "workspace.missing",
                "{folder} is not a workspace. Run 'factory init --workspace {folder}', or set FACTORY_HOME to a workspace",
                folder=root,
            )
        config = _read_config(path)
        if config.version != VERSION:
            raise WorkspaceError(
                "workspace.other_version",
                "{folder} is a workspace of version {version}, and this factory reads version {known}. Use the "
                "factory that made the workspace",
                folder=root,
                version=config.version,
                known=VERSION,
            )
        return cls(root, config)

    @contextmanager
    def hold_lock(self, name: str, patience: float = 0.0) -> Iterator[None]:
        """Hold ``<name>.lock`` during the block (``hold_file_lock``).

        Raises: WorkspaceError that names the other process when it does not release the lock within ``patience`` seconds.
        """
        with ExitStack() as held:
            try:
                held.enter_context(hold_file_lock(self.root / f"{name}.lock", patience))
            except LockedError as holder:
                remedy = (
                    Message(
                        "workspace.wait_for_model_loop",
                        "Wait until this process ends. If the process is 'factory run', stop it (Ctrl-C, or 'systemctl stop "
                        "factory'), run this command, then start 'factory run' again",
                    )
                    if name == MODEL_LOOP
                    else Message("workspace.wait_for_lock", "Wait until this process ends, or stop it")
                )
                raise WorkspaceError(
                    "workspace.in_use",
                    "{folder} is in use: process {process} holds {lock}.lock. {remedy}",
                    folder=self.root,
                    process=str(holder),
                    lock=name,
                    remedy=remedy,
                ) from None
            yield


def list_factory_files(root: Path) -> list[str]:
    """Return the names of the files and folders in ``root`` that belong to a factory. Empty folders, which ``create`` makes, do not count."""
    listed = [
        "ledger.db",
        "mlflow.db",
        "backups",
        "checkpoints",
        *(name for name in FOLDERS if name not in FOLDERS_FOR_PEOPLE),
    ]
    there = [name for name in listed if (root / name).exists()]
    return [name for name in there if not (root / name).is_dir() or any((root / name).iterdir())]


def _refuse_odd_name(root: Path) -> None:
    """Refuse a path with '?' or '%', because a database's address with that path would name another file. Raises: WorkspaceError."""
    shown = os.fsencode(root).decode("utf-8", "backslashreplace")
    if shown != str(root) or "?" in shown or "%" in shown:
        raise WorkspaceError(
            "workspace.odd_path",
            "{folder}: the path of a workspace must be valid UTF-8 and must not contain '?' or '%'. Rename the folder",
            folder=shown,
        )


def _write_config(path: Path, config: WorkspaceConfig) -> None:
    lines = [f"{CONFIG_HEADING}\n"]
    lines += [f"{key}: {value}\n" for key, value in vars(config).items() if value is False or value not in ("", 0)]
    path.write_text("".join(lines))


def load_yaml(path: Path) -> object:
    """Read and parse a YAML file that a person writes. Raises: ConfigError when the file is unreadable or has a key twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "workspace.unreadable_yaml", "{file} cannot be read: {why}", file=path, why=str(error)
        ) from error
    return read_yaml(text, str(path), ConfigError)


def _read_config(path: Path) -> WorkspaceConfig:
    data = load_yaml(path) or {}
    if not isinstance(data, dict):
        raise ConfigError("workspace.config_not_keys", "{file}: each line must be 'key: value'", file=path)
    known = {name: type(getattr(WorkspaceConfig, name)) for name in WorkspaceConfig.__dataclass_fields__}
    for key, value in data.items():
        if key not in known:
            raise ConfigError(
                "workspace.unknown_key",
                "{file}: unknown key {key!r}{hint}",
                file=path,
                key=key,
                hint=suggest_name(str(key), known),
            )
        if not isinstance(value, known[key]):
            raise ConfigError(
                "workspace.wrong_type",
                "{file}: {key} must be of type {expected}, not {value!r}",
                file=path,
                key=key,
                expected=known[key].__name__,
                value=value,
            )
    if (chosen := data.get("training_sandbox", "auto")) not in TRAINING_SANDBOX:
        raise ConfigError(
            "workspace.unknown_sandbox",
            "{file}: training_sandbox cannot be {value!r}{hint}",
            file=path,
            value=chosen,
            hint=suggest_name(chosen, TRAINING_SANDBOX),
        )
    if isinstance(ranks := data.get("ranks", 0), bool) or ranks < 0:
        raise ConfigError(
            "workspace.bad_ranks", "{file}: ranks must be 0 or a positive number, not {value!r}", file=path, value=ranks
        )
    if isinstance(port := data.get("metrics_port", 0), bool) or not 0 <= port <= 65535:
        raise ConfigError(
            "workspace.bad_port",
            "{file}: metrics_port must be a port (1 to 65535), or 0 for none, not {value!r}",
            file=path,
            value=port,
        )
    return WorkspaceConfig(**data)
