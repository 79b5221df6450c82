"""Strict YAML: what is said stands where it is said (no anchors, merges, tags), a doubled key is an error, ``3e-4`` is a number."""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads ``3e-4`` as the number it is (YAML 1.1 wants ``3.0e-4``) and refuses doubled keys.

    It refuses anchors too, of which a few lines can stand for more values than a machine can hold.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor or getattr(event, "tag", None):
            what = "anchors, aliases and tags ('&', '*', '!') are not allowed: write the value out"
            raise yaml.constructor.ConstructorError(None, None, what, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                what = "'<<' is not allowed: write the keys out"
                raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} appears twice", key.start_mark)
            seen.add(key.value)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        if len(found) < len(seen):  # 1 and 0x1, yes and true
            raise yaml.constructor.ConstructorError(
                None, None, "a key appears twice, written in two ways", node.start_mark
            )
        return found


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(text: str, where: str, error: type[Exception]) -> object:
    """Raises: ``error`` naming the line that cannot be read."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as broken:  # a date that is none, a list as a key
        raise error(f"{where}: cannot be read as YAML: {' '.join(str(broken).split())}") from None
