"""The description of a published benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

TESTED, SHOWN, LEFT_OUT = "tested", "shown", "left out"  # the uses of a record


class RecordForm(BaseModel):
    """The fields of a published record that are read. Records may have more fields, because versions of a benchmark differ in them."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    @classmethod
    def list_required_fields(cls) -> set[str]:
        """The required fields, by which a file is recognised."""
        return {name for name, about in cls.model_fields.items() if about.is_required()}

    def belongs_to_benchmark(self) -> bool:
        """Is it a record of this benchmark? Overridden if the names of the fields are not enough to tell."""
        return True

    def classify_record_use(self) -> str:
        """The use of the record: TESTED, SHOWN (an example) or LEFT_OUT (it belongs to another split in the same file)."""
        return TESTED

    def make_item(self, number: int, about: str) -> dict[str, Any]:
        """The record as an item of the factory (``factory.tasks.items``).

        ``number``: its place in the file, from 1. ``about``: the file's name without its split. Raises: ValueError saying what is wrong.
        """
        raise NotImplementedError

    def make_example(self, number: int, about: str) -> dict[str, Any]:
        """The record as an example with its answer."""
        return self.make_item(number, about)


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: its forms, and the keys of a task file that measure it as published."""

    name: str
    """The value of key ``published`` in a task file."""
    kind: str
    """The kind of its items: multiple_choice, maths or code."""
    forms: tuple[type[RecordForm], ...]
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the task file that differ from the defaults."""
    shown: int = 0
    """Examples before each question, if the file itself has examples."""
