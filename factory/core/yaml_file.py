"""How the factory reads any YAML file that a person writes."""

from __future__ import annotations

from pathlib import Path

from factory.core.errors import ConfigError
from kernels.contract.strict_yaml import read_yaml


def load_yaml(path: Path) -> object:
    """The parsed file. Raises: ConfigError when it cannot be read, or has a key twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return read_yaml(text, str(path), ConfigError)
