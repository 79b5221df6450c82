"""MLflow's pages for others: refused without a login, and with one a real server lets nobody else in."""

from __future__ import annotations

import httpx
import pytest

from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.tracking.login import is_loopback, login
from factory.tracking.mlflow_store import ui_command
from tests.support.factory.command import factory
from tests.support.mlflow_server import EXPERIMENTS, answering, free_port
from tests.support.plants.release_scene import with_store


def test_other_machines_need_a_login(workspace: Workspace) -> None:
    refused = factory("ui", "--host", "0.0.0.0", "-w", str(workspace.root), "--print")
    assert refused.returncode == 2 and "give --user NAME" in refused.stderr
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "example.org")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
    for name in ("../x", "a b", "a\nb", "x" * 61):
        with pytest.raises(InputError, match="--user"):
            login(workspace, name)


def test_the_password_is_made_once_and_is_nobody_elses(workspace: Workspace) -> None:
    first, password = login(workspace, "ada")
    again, _ = login(workspace, "ada")
    assert first == again and len(first["MLFLOW_AUTH_ADMIN_PASSWORD"]) >= 32
    assert password.stat().st_mode & 0o777 == 0o600 and password.parent.stat().st_mode & 0o777 == 0o700
    assert first["MLFLOW_AUTH_ADMIN_PASSWORD"] not in " ".join(ui_command(workspace, 5000, "0.0.0.0", first)[0])


@pytest.mark.slow("starts MLflow's server, which loads for half a minute on a busy machine")
def test_a_server_lets_in_who_has_the_password(workspace: Workspace) -> None:
    with_store(workspace)
    port = free_port()
    secrets, _ = login(workspace, "ada")
    command, environment = ui_command(workspace, port, "127.0.0.1", secrets)
    address = f"http://127.0.0.1:{port}"
    with answering(command, environment, address, workspace.root):
        without = httpx.get(address + EXPERIMENTS, timeout=30)
        wrong = httpx.get(address + EXPERIMENTS, auth=("ada", "password1234"), timeout=30)
        right = httpx.get(address + EXPERIMENTS, auth=("ada", secrets["MLFLOW_AUTH_ADMIN_PASSWORD"]), timeout=30)
        assert (without.status_code, wrong.status_code, right.status_code) == (401, 401, 200)
