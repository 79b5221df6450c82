"""Reads YAML strictly. Anchors, merges and tags are errors, and so is a key that appears twice. Values are read as they are written.

Plain values are read as in YAML 1.2 (its core schema, yaml.org/spec/1.2.2, section 10.3). PyYAML reads YAML 1.1, in which 12:30 is 750, 010 is 8,
``off`` is false and 2026-11-26 is a date. A number with a leading zero is refused, because the two versions read it differently. ``1_000`` and
``0b1`` are numbers.
"""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import yaml

from kernels.contract.message import Message


class _Loader(yaml.SafeLoader):
    """A SafeLoader that reads plain values as ``_PLAIN`` says, and refuses duplicate keys.

    It also refuses anchors: a few lines with anchors can stand for more values than fit in memory.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as PyYAML has it: none of YAML 1.1's

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor or getattr(event, "tag", None):
            what = Message(
                "kernels.yaml_anchor",
                "anchors, aliases and tags ('&', '*', '!') are not allowed (write the value itself)",
            )
            raise yaml.constructor.ConstructorError(None, None, what, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, value in node.value:
            if value.tag == _LEADING_ZERO:
                self._refuse_leading_zero(value, f"key {key.value!r}: ")
            if key.tag == "tag:yaml.org,2002:merge":
                what = Message("kernels.yaml_merge", "'<<' is not allowed (write the keys themselves)")
                raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
            if key.value in seen:
                what = Message("kernels.yaml_double_key", "key {key!r} appears twice", key=key.value)
                raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
            seen.add(key.value)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        if len(found) < len(seen):  # 1 and 0x1, yes and true
            what = Message("kernels.yaml_two_spellings", "the same key appears in two spellings (such as 1 and 0x1)")
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)
        return found

    def _refuse_leading_zero(self, node: Any, where: str = "") -> Any:
        bare = re.sub(r"(?<![0-9])0+(?=[0-9])", "", node.value)
        what = Message(
            "kernels.yaml_leading_zero",
            "{where}YAML 1.1 and YAML 1.2 read {value} as different numbers (write {bare} for a number, or '{value}' "
            "in quotes for text)",
            where=where,
            value=node.value,
            bare=bare,
        )
        raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)


_LEADING_ZERO = "leading-zero"
_STANDARD = "tag:yaml.org,2002:"
_PLAIN = [  # (tag, the plain values that have this tag, their possible first characters)
    (_STANDARD + "bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    (_STANDARD + "null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (_STANDARD + "int", r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)", "-+0123456789"),
    (_LEADING_ZERO, r"[-+]?0[0-9_]+", "-+0"),
    (
        _STANDARD + "float",
        r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    (_STANDARD + "merge", r"<<", "<"),
]
for _tag, _pattern, _first in _PLAIN:
    _Loader.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list(_first))
_Loader.add_constructor(_LEADING_ZERO, _Loader._refuse_leading_zero)


@functools.lru_cache(64)
def _parsed(text: str) -> object:
    """The parsed text. It is cached, because a policy is read for each ingested file and parsing takes milliseconds. Callers must copy it."""
    return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader


def read_yaml(text: str, where: str, error: type[Exception]) -> object:
    """Parse YAML text. Raises: ``error`` that names ``where`` and the line that cannot be read."""
    try:
        return copy.deepcopy(_parsed(text))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as broken:  # an impossible date, a list as a key
        said = Message(
            "kernels.not_yaml",
            "{where} cannot be read as YAML: {problem}",
            where=where,
            problem=" ".join(str(broken).split()),
            reason=getattr(broken, "problem", None),
        )
        raise error(said) from None
