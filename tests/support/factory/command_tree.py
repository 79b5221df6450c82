"""The commands of ``factory`` with their options, as typer registers them."""

from __future__ import annotations

from functools import cache
from typing import Any

import click
import typer

from factory.cli import root


@cache
def commands() -> dict[tuple[str, ...], set[str]]:
    """Every command of ``factory`` with its options."""
    found: dict[tuple[str, ...], set[str]] = {}

    def walk(command: Any, words: tuple[str, ...]) -> None:
        options = {
            name
            for one in command.params
            if isinstance(one, click.Option) or hasattr(one, "opts")
            for name in (*one.opts, *one.secondary_opts)
        }
        found[words] = options | {"--help", "-h"}
        for name, below in getattr(command, "commands", {}).items():
            walk(below, (*words, name))

    walk(typer.main.get_command(root), ())
    return found
