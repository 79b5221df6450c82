"""A login for MLflow's pages that other machines can reach: MLflow's own basic-auth app, with a password that is made once."""

from __future__ import annotations

import importlib.util
import os
import secrets
from pathlib import Path

from factory.core.errors import ConfigError, InputError
from factory.core.workspace import Workspace

FOLDER = "mlflow-login"
PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


def create_mlflow_login(workspace: Workspace, user: str) -> tuple[dict[str, str], Path]:
    """(environment of MLflow's server, file with the password). Both are made at the first call, and only this user of the machine can read them.

    Raises: InputError for an invalid name; ConfigError when a package is missing.
    """
    if not user or set(user) - PLAIN or len(user) > 60:
        raise InputError(
            "login.bad_user",
            "--user {user!r} is not a valid name. Use letters, digits, '-', '_' and '.', at most 60 characters.",
            user=user,
        )
    if importlib.util.find_spec("flask_wtf") is None:
        raise ConfigError(
            "login.no_package",
            "MLflow's login needs a package that is not installed. To install it: pip install 'mlflow[auth]'",
        )
    folder = workspace.root / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    password = _kept(folder / f"{user}.password")
    users = folder / f"{user}.db"
    lines = (
        "[mlflow]",
        "default_permission = NO_PERMISSIONS",
        f"database_uri = sqlite:///{users}",
        f"admin_username = {user}",
    )
    settings = folder / f"{user}.ini"
    settings.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return {
        "MLFLOW_AUTH_CONFIG_PATH": str(settings),
        "MLFLOW_AUTH_ADMIN_USERNAME": user,
        "MLFLOW_AUTH_ADMIN_PASSWORD": password.read_text().strip(),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": _kept(folder / "key").read_text().strip(),
    }, password


def _kept(path: Path) -> Path:
    """Return ``path``, a file with a random secret. The file is made if it is missing, or if a kill left it empty."""
    if not path.exists() or not path.read_text().strip():
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(24) + "\n")
    return path
