"""The factory's version and the commit of its checkout."""

from __future__ import annotations

import importlib.metadata
import subprocess
import tomllib

from factory.core.workspace import find_checkout_root


def describe_version() -> str:
    """Return 'llm-factory 0.1.0 (1adb55012345)'; without the commit if the code is not a git checkout."""
    project = find_checkout_root() / "pyproject.toml"
    if project.exists():
        facts = tomllib.loads(project.read_text())["project"]
        name, number = facts["name"], facts["version"]
    else:
        name, number = "llm-factory", importlib.metadata.version("llm-factory")
    git = ["git", "-C", str(find_checkout_root()), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=False)
    except OSError:
        return f"{name} {number}"
    return f"{name} {number} ({done.stdout.strip()})" if done.returncode == 0 else f"{name} {number}"
