"""One factory's folder: where each thing lies, and the files that say what it is (DESIGN §3).

``Workspace.create`` makes one, ``Workspace.open`` finds one. Nothing here reads the ledger.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from factory.core.errors import ConfigError, WorkspaceError, nearest
from factory.core.file_lock import LockedError, file_lock
from kernels.contract.files import write_atomically
from kernels.contract.strict_yaml import read_yaml

VERSION = 1
MODEL_LOOP = "model-loop"  # the lock that 'factory run' holds as long as it runs
PATIENCE = 180.0  # seconds for which a lock is waited for that another process holds for a moment; a minute on a crowded machine
TRAINING_SANDBOX = ("auto", "required", "off")
GIVEN = ("inbox", "policies", "logs")  # a person may put something there before there is a factory
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
class Config:
    """``factory.yaml``. Every key is optional."""

    version: int = VERSION
    """Of the workspace's layout."""
    recipe: str = "demo"
    """Name of a file in ``policies/recipes/``."""
    repository: str = ""
    """The git repository whose code is trained with and patched, relative to the workspace; the factory's own by default."""
    ledger_url: str = ""
    """SQLAlchemy address; an SQLite file of the workspace by default."""
    mlflow_uri: str = ""
    """MLflow's address; an SQLite file of the workspace by default."""
    ranks: int = 0
    """How many ranks train; 0: one for each GPU of this machine, one without any."""
    launcher: str = ""
    """What starts the ranks in place of torchrun on this machine, for several machines that share the workspace:
    ``srun --ntasks-per-node=1 torchrun --nnodes=4 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500``."""
    metrics_port: int = 0
    """Where the daemon shows its numbers to Prometheus, on 127.0.0.1; 0: nowhere."""
    training_sandbox: str = "auto"
    """Whether training runs in the sandbox. auto: where one can be made; elsewhere, or by a launcher, only until a patch that an agent wrote
    is merged. required: or not at all. off: never, with a warning."""


def code_root() -> Path:
    """The checkout this package is imported from."""
    return Path(__file__).resolve().parents[2]


class Folder:
    """A folder of a workspace, of the attribute's name."""

    def __set_name__(self, owner: type[Workspace], name: str) -> None:
        self.name = name

    def __get__(self, workspace: Workspace, owner: type[Workspace]) -> Path:
        return workspace.root / self.name


@dataclass(frozen=True)
class Workspace:
    root: Path
    config: Config

    inbox = Folder()
    quarantine = Folder()
    shards = Folder()
    tokenizer = Folder()
    segments = Folder()
    exports = Folder()
    worktrees = Folder()
    reports = Folder()
    logs = Folder()

    @property
    def repository(self) -> Path:
        return self.root / self.config.repository if self.config.repository else code_root()

    @property
    def ledger_url(self) -> str:
        return self.config.ledger_url or f"sqlite:///{self.root / 'ledger.db'}"

    @property
    def mlflow_uri(self) -> str:
        return self.config.mlflow_uri or f"sqlite:///{self.root / 'mlflow.db'}"

    @property
    def mlflow_artifacts(self) -> Path:
        return self.root / "mlartifacts"

    def policy(self, name: str) -> Path:
        """A policy file: the workspace's own copy when there is one, else the checkout's (``name`` like ``data.yaml``)."""
        own = self.root / "policies" / name
        path = own if own.exists() else code_root() / "policies" / name
        if not path.exists():
            raise ConfigError(f"no policy {name!r}: looked for {own} and {path}")
        return path

    def own_recipe(self) -> Path:
        """Where the workspace's own copy of the recipe lies, if it has one: no proposal changes that."""
        return self.root / "policies" / "recipes" / f"{self.config.recipe}.yaml"

    def recipe_path(self) -> Path:
        """The recipe that ``factory.yaml`` names: the workspace's own copy, else the trained code's, which approved proposals
        change, else the checkout's.

        Raises: ConfigError that names the nearest recipe when there is none of that name.
        """
        name = f"recipes/{self.config.recipe}.yaml"
        live = self.repository / "policies" / name
        if live.is_file() and not self.own_recipe().exists():
            return live
        try:
            return self.policy(name)
        except ConfigError:
            known = {p.stem for d in (self.root, code_root()) for p in (d / "policies" / "recipes").glob("*.yaml")}
            where = self.root / "factory.yaml"
            raise ConfigError(
                f"{where}: recipe: no recipe {self.config.recipe!r}{nearest(self.config.recipe, known)}"
            ) from None

    # -- making and finding -----------------------------------------------------------------------------------------
    @classmethod
    def create(cls, root: Path, config: Config | None = None, policies: Mapping[str, str] | None = None) -> Workspace:
        """Make the folders, its own copies of policies (place in ``policies/`` → text) and, last, ``factory.yaml``; a workspace that is already
        there is opened, never overwritten."""
        root = root.expanduser().resolve()
        _refuse_odd_name(root)
        if (root / "factory.yaml").exists():
            return cls.open(root)
        if root.exists() and not root.is_dir():
            raise WorkspaceError(f"{root} is a file: name a folder")
        if left := work_in(root):
            raise WorkspaceError(
                f"{root} has no factory.yaml, but holds a factory's {', '.join(left)}: 'factory restore --workspace {root}' puts it "
                "back; for a new factory name an empty folder"
            )
        if root.exists() and any(path.name not in (".demo", *FOLDERS) for path in root.iterdir()):
            raise WorkspaceError(f"{root} is not empty and is not a workspace: name an empty folder")
        config = config or Config()
        try:
            for folder in FOLDERS:
                (root / folder).mkdir(parents=True, exist_ok=True)
            for name, text in (policies or {}).items():
                (root / "policies" / name).parent.mkdir(exist_ok=True)
                write_atomically(root / "policies" / name, text)
            _write_config(root / "factory.yaml", config)
        except OSError as error:
            raise WorkspaceError(f"{root} cannot be made: {error.strerror}") from error
        return cls(root, config)

    @classmethod
    def open(cls, root: Path) -> Workspace:
        """Raises: WorkspaceError when there is none, or of another version; ConfigError for a bad factory.yaml."""
        root = root.expanduser().resolve()
        _refuse_odd_name(root)
        path = root / "factory.yaml"
        if not os.access(root, os.R_OK | os.X_OK) and root.exists():
            raise WorkspaceError(f"{root} cannot be read: this user has no permission")
        if not path.exists():
            if left := work_in(root):
                raise WorkspaceError(
                    f"{path} is gone, but {root} holds a factory's {', '.join(left)}: 'factory restore --workspace {root}' puts it "
                    "back from the newest backup"
                )
            raise WorkspaceError(f"no workspace at {root}: run 'factory init --workspace {root}', or set FACTORY_HOME")
        config = _read_config(path)
        if config.version != VERSION:
            raise WorkspaceError(
                f"{root} is a workspace of version {config.version}; this factory reads version {VERSION}: "
                f"use the {'newer ' if config.version > VERSION else ''}factory that made it"
            )
        return cls(root, config)

    @contextmanager
    def lock(self, name: str, patience: float = 0.0) -> Iterator[None]:
        """Hold ``<name>.lock`` for this process (``file_lock``).

        Raises: WorkspaceError that names the other process and says what to do when one holds it for longer than ``patience`` seconds.
        """
        with ExitStack() as held:
            try:
                held.enter_context(file_lock(self.root / f"{name}.lock", patience))
            except LockedError as holder:
                does = (
                    "wait for it. If it is 'factory run', stop it (Ctrl-C, or 'systemctl stop factory'), run this command, then start it again"
                    if name == MODEL_LOOP
                    else "wait for it, or stop it first"
                )
                raise WorkspaceError(f"{self.root} is in use: process {holder} holds {name}.lock; {does}") from None
            yield


def work_in(root: Path) -> list[str]:
    """What of a factory's work lies in a folder, by name; nothing in one that ``create`` has just made, or did not finish."""
    listed = ["ledger.db", "mlflow.db", "backups", "checkpoints", *(name for name in FOLDERS if name not in GIVEN)]
    there = [name for name in listed if (root / name).exists()]
    return [name for name in there if not (root / name).is_dir() or any((root / name).iterdir())]


def _refuse_odd_name(root: Path) -> None:
    """The databases' addresses hold the path: there '?' and '%' would name another file. Raises: WorkspaceError."""
    shown = os.fsencode(root).decode("utf-8", "backslashreplace")
    if shown != str(root) or "?" in shown or "%" in shown:
        raise WorkspaceError(
            f"{shown}: the path of a workspace may hold no '?' and no '%', and is UTF-8: rename the folder"
        )


def _write_config(path: Path, config: Config) -> None:
    lines = ["# This factory's configuration. Every key is optional; an unknown key is an error.\n"]
    lines += [f"{key}: {value}\n" for key, value in vars(config).items() if value not in ("", 0)]
    path.write_text("".join(lines))


def load_yaml(path: Path) -> object:
    """A YAML file that a person writes, parsed. Raises: ConfigError when it cannot be read, or has a key twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return read_yaml(text, str(path), ConfigError)


def _read_config(path: Path) -> Config:
    data = load_yaml(path) or {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected 'key: value' lines")
    known = {name: type(getattr(Config, name)) for name in Config.__dataclass_fields__}
    for key, value in data.items():
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r}{nearest(str(key), known)}")
        if not isinstance(value, known[key]):
            raise ConfigError(f"{path}: {key}: expected {known[key].__name__}, got {value!r}")
    if (chosen := data.get("training_sandbox", "auto")) not in TRAINING_SANDBOX:
        raise ConfigError(f"{path}: training_sandbox: there is no {chosen!r}{nearest(chosen, TRAINING_SANDBOX)}")
    if isinstance(ranks := data.get("ranks", 0), bool) or ranks < 0:
        raise ConfigError(f"{path}: ranks: expected a number of ranks, got {ranks!r}")
    if isinstance(port := data.get("metrics_port", 0), bool) or not 0 <= port <= 65535:
        raise ConfigError(f"{path}: metrics_port: expected a port, 1 to 65535, or 0 for none; got {port!r}")
    return Config(**data)
