"""Defines the error that drops a row. Readers, shapes and documents raise it, so this module imports none of them."""

from __future__ import annotations

from typing import Any

from kernels.contract.message import CodedError, Message


class BadRow(CodedError):
    """The error of a row that is dropped. ``rule`` is the short name under which ingest counts the row. ``detail`` is one line for a person."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(Message.from_json(detail))
        self.rule = rule
        self.detail = detail

    def __reduce__(self) -> tuple[type[BadRow], tuple[str, str]]:
        return BadRow, (self.rule, self.detail)  # makes the error picklable, for worker processes


def make_not_an_object_error(row: Any) -> BadRow:
    """Return the error of a decoded row that is not a JSON object."""
    return BadRow(
        "bad_schema",
        Message("shapes.not_an_object", "the row is {kind}; an object is expected", kind=type(row).__name__),
    )
