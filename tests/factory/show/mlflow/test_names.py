"""The host names of MLflow's pages, as MLflow's own server checks them."""

from __future__ import annotations

import socket

import psutil
import pytest
from mlflow.server.security_utils import is_allowed_host_header, should_block_cors_request

from factory.cli import look
from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.show.mlflow.host_names import (
    HostName,
    choose_server_names,
    list_names_of_this_machine,
    make_mlflow_server_options,
)
from factory.show.mlflow.runs import CANDIDATES
from factory.show.mlflow.store import open_client
from tests.support.factory.command import factory
from tests.support.messages import refused
from tests.support.plants.release_scene import with_store

PORT = 5000


def lets_in(names: list[HostName], host: str, origin: str) -> bool:
    """Does MLflow take a change from a page of ``origin``, sent to ``host``?"""
    _, hosts, _, origins = make_mlflow_server_options(names, PORT)
    return is_allowed_host_header(hosts.split(","), host) and not should_block_cors_request(
        origin, "POST", origins.split(",")
    )


@pytest.mark.parametrize(
    ("name", "host", "origin", "address"),
    [
        ("gpu-box", "gpu-box:5000", "http://gpu-box:5000", "http://gpu-box:5000"),
        ("GPU-Box", "gpu-box", "https://gpu-box", "http://gpu-box:5000"),
        ("gpu-box:8080", "gpu-box:8080", "http://gpu-box:8080", "http://gpu-box:8080"),
        ("gpu-box:443", "gpu-box", "https://gpu-box", "https://gpu-box"),
        ("10.0.0.5", "10.0.0.5:5000", "http://10.0.0.5:5000", "http://10.0.0.5:5000"),
        ("fd00::5", "[fd00::5]:5000", "http://[fd00::5]:5000", "http://[fd00::5]:5000"),
        ("[fd00::5]:81", "[fd00::5]:81", "https://[fd00::5]:81", "http://[fd00::5]:81"),
        (
            "https://mlflow.example.org/",
            "mlflow.example.org",
            "https://mlflow.example.org",
            "https://mlflow.example.org",
        ),
        ("https://a.org:8443", "a.org:8443", "https://a.org:8443", "https://a.org:8443"),
        ("http://a.org", "a.org:80", "http://a.org", "http://a.org"),
    ],
)
def test_the_server_accepts_requests_under_a_given_name(name: str, host: str, origin: str, address: str) -> None:
    names = [HostName.parse(name), HostName.parse("another")]
    assert lets_in(names, host, origin) and names[0].make_mlflow_url(PORT) == address
    for own in ("localhost", "localhost:5000", "127.0.0.1:1234", "[::1]:5000"):
        assert lets_in(names, own, f"http://{own}")
    assert not lets_in(names, f"evil.{host}", origin) and not lets_in(names, host, "http://evil.example")
    assert not lets_in(names, "192.168.1.5:5000", "http://192.168.1.5:5000")


@pytest.mark.parametrize(
    "name",
    ["", "*", "*.example.org", "a,b", "http://a/b", "ada@a", "ftp://a", "a:0", "a:99999", "a:", "a b", "[::zz]", "fe80::1%eth0", "a?", "-a"],
)  # fmt: skip
def test_an_invalid_host_name_is_refused(name: str) -> None:
    with refused("host_names.no_host", InputError):
        HostName.parse(name)


def test_the_default_names_are_those_of_this_machine_unless_the_server_is_on_loopback() -> None:
    assert all(
        make_mlflow_server_options(choose_server_names(host), PORT) == [] for host in ("127.0.0.1", "localhost", "::1")
    )
    addresses = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]
    outside = [a for a in addresses if a.count(".") == 3 and not a.startswith("127.")]
    for host in ("0.0.0.0", "::"):
        assert set(list_names_of_this_machine(host)) >= {
            socket.gethostname().lower(),
            *outside,
        } and host not in list_names_of_this_machine(host)
        assert not {"127.0.0.1", "::1"} & set(list_names_of_this_machine(host))
    assert (
        list_names_of_this_machine("10.1.2.3")[0] == "10.1.2.3"
        and list_names_of_this_machine("gpu-box.lan")[0] == "gpu-box.lan"
    )


def test_a_name_that_others_can_reach_needs_a_login_too(workspace: Workspace) -> None:
    where = ("-w", str(workspace.root), "--print")
    done = factory("ui", "--name", "https://mlflow.example.org", *where)
    assert done.returncode == 2 and "error[look.login_needed]" in done.stderr
    with_store(workspace)
    taken = factory("ui", "--name", "https://mlflow.example.org", "--name", "gpu-box", "--user", "ada", *where)
    assert taken.returncode == 0, taken.stderr
    assert "mlflow.example.org:443,gpu-box,gpu-box:5000" in taken.stdout


@pytest.mark.parametrize(
    ("host", "names", "server"),
    [
        ("127.0.0.1", None, "http://127.0.0.1:5000"),
        ("::1", None, "http://[::1]:5000"),
        ("0.0.0.0", ["gpu-box", "10.0.0.5"], "http://gpu-box:5000"),
        ("0.0.0.0", ["https://mlflow.example.org"], "https://mlflow.example.org"),
        ("0.0.0.0", None, f"http://{socket.gethostname().lower()}:5000"),
    ],
)
def test_printed_links_have_a_host_name_that_people_can_open(
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    host: str,
    names: list[str] | None,
    server: str,
) -> None:
    with_store(workspace)
    page = open_client(workspace).create_experiment(CANDIDATES)
    monkeypatch.setattr(look.os, "execvpe", lambda *words: None)
    look.ui(workspace.root, port=PORT, host=host, name=names, user="ada")
    said = capsys.readouterr().out
    assert f"MLflow UI is at {server}. Ctrl-C" in said and f" {server}/#/experiments/{page}?" in said
