"""MLflow's pages for other machines need a login, and a real server lets only that user in."""

from __future__ import annotations

import httpx
import pytest

from factory.core.errors import InputError
from factory.core.listening_socket import is_loopback
from factory.core.workspace import Workspace
from factory.show.mlflow.login import create_mlflow_login
from factory.show.mlflow.store import make_mlflow_ui_command
from tests.support.factory.command import factory
from tests.support.messages import refused
from tests.support.mlflow_server import EXPERIMENTS, answering, free_port
from tests.support.plants.release_scene import with_store


def test_a_server_for_other_machines_needs_a_login(workspace: Workspace) -> None:
    done = factory("ui", "--host", "0.0.0.0", "-w", str(workspace.root), "--print")
    assert done.returncode == 2 and "error[look.login_needed]" in done.stderr
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "example.org")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
    for name in ("../x", "a b", "a\nb", "x" * 61):
        with refused("login.bad_user", InputError):
            create_mlflow_login(workspace, name)


def test_the_password_is_made_once_and_only_its_owner_can_read_it(workspace: Workspace) -> None:
    first, password = create_mlflow_login(workspace, "ada")
    again, _ = create_mlflow_login(workspace, "ada")
    assert first == again and len(first["MLFLOW_AUTH_ADMIN_PASSWORD"]) >= 32
    assert password.stat().st_mode & 0o777 == 0o600 and password.parent.stat().st_mode & 0o777 == 0o700
    assert first["MLFLOW_AUTH_ADMIN_PASSWORD"] not in " ".join(
        make_mlflow_ui_command(workspace, 5000, "0.0.0.0", first)[0]
    )


@pytest.mark.slow("starts MLflow's server, which loads for half a minute on a busy machine")
def test_the_server_accepts_only_requests_with_the_password(workspace: Workspace) -> None:
    with_store(workspace)
    port = free_port()
    secrets, _ = create_mlflow_login(workspace, "ada")
    command, environment = make_mlflow_ui_command(workspace, port, "127.0.0.1", secrets)
    address = f"http://127.0.0.1:{port}"
    assert not [word for word in command if "allowed" in word], "MLflow's own defaults, which are for loopback"
    with answering(command, environment, address, workspace.root):
        without = httpx.get(address + EXPERIMENTS, timeout=30)
        wrong = httpx.get(address + EXPERIMENTS, auth=("ada", "password1234"), timeout=30)
        right = httpx.get(address + EXPERIMENTS, auth=("ada", secrets["MLFLOW_AUTH_ADMIN_PASSWORD"]), timeout=30)
        assert (without.status_code, wrong.status_code, right.status_code) == (401, 401, 200)
        ada = ("ada", secrets["MLFLOW_AUTH_ADMIN_PASSWORD"])
        for host, status in ((f"localhost:{port}", 200), (f"gpu-box:{port}", 403), (f"evil.example:{port}", 403)):
            assert approve(address, ada, host, f"http://{host}") == status, host


@pytest.mark.long("starts MLflow's server, which loads for half a minute on a busy machine")
def test_the_server_answers_under_its_own_names_and_no_other(workspace: Workspace) -> None:
    with_store(workspace)
    port = free_port()
    secrets, _ = create_mlflow_login(workspace, "ada")
    ada = ("ada", secrets["MLFLOW_AUTH_ADMIN_PASSWORD"])
    names = ["gpu-box", "192.168.1.5", "8.8.8.8", "fd00::5", "https://mlflow.example.org"]
    command, environment = make_mlflow_ui_command(workspace, port, "0.0.0.0", secrets, names)
    address = f"http://127.0.0.1:{port}"
    box = f"gpu-box:{port}"
    cases = {
        (box, f"http://{box}", ada): 200,
        (box, "", ada): 200,
        (f"192.168.1.5:{port}", f"http://192.168.1.5:{port}", ada): 200,
        (f"8.8.8.8:{port}", f"http://8.8.8.8:{port}", ada): 200,
        (f"[fd00::5]:{port}", f"http://[fd00::5]:{port}", ada): 200,
        ("mlflow.example.org", "https://mlflow.example.org", ada): 200,
        (f"127.0.0.1:{port}", "https://mlflow.example.org", ada): 200,  # a proxy that sets its own Host
        (f"127.0.0.1:{port}", f"http://127.0.0.1:{port}", ada): 200,
        ("localhost:1234", "http://localhost:1234", ada): 200,  # a tunnel
        ("[::1]:1234", "http://[::1]:1234", ada): 200,
        (box, f"http://{box}", None): 401,
        (box, "http://evil.example", ada): 403,
        (box, "null", ada): 403,
        (f"evil.example:{port}", "", ada): 403,
        (f"10.0.0.5:{port}", f"http://10.0.0.5:{port}", ada): 403,
        ("", "", ada): 403,
    }
    with answering(command, environment, address, workspace.root):
        found = {case: approve(address, case[2], case[0], case[1]) for case in cases}
    assert found == cases


def approve(server: str, login: tuple[str, str] | None, host: str, origin: str) -> int:
    """The status that a tag gets which a person's browser sends from there."""
    headers = {"Host": host} | ({"Origin": origin} if origin else {})
    body = {"experiment_id": "0", "key": "approval", "value": "approved"}
    path = "/ajax-api/2.0/mlflow/experiments/set-experiment-tag"
    return httpx.post(server + path, json=body, headers=headers, auth=login, timeout=60).status_code
