from __future__ import annotations

import functools
import subprocess

import pytest

from factory.sandbox.sandbox import MECHANISMS


@functools.cache
def _cannot(name: str) -> str:
    """Why this machine cannot have a sandbox of this kind. The system's own tool is asked, so that a fault of ours is no excuse."""
    if name == "bubblewrap":
        return MECHANISMS[name].refusal()
    done = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "true"], check=False)
    return "" if done.returncode == 0 else "this machine allows no user namespaces"


@pytest.fixture(params=MECHANISMS)
def each_sandbox(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs once with every mechanism that isolates here."""
    if why := _cannot(request.param):
        pytest.skip(why)
    monkeypatch.setenv("FACTORY_SANDBOX", request.param)
    return str(request.param)
