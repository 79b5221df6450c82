"""What a description of a published benchmark is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

TESTED, SHOWN, LEFT_OUT = "tested", "shown", "left out"  # what a record is for


class Form(BaseModel):
    """The fields of one record as published, those that are read. Others may stand beside them: releases of a benchmark differ in them."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    @classmethod
    def fields(cls) -> set[str]:
        """By which it is recognised."""
        return {name for name, about in cls.model_fields.items() if about.is_required()}

    def fits(self) -> bool:
        """Is it a record of this benchmark? Where the names of the fields do not say so alone."""
        return True

    def use(self) -> str:
        """What the record is for: TESTED, SHOWN (an example) or LEFT_OUT (of another split that lies in the same file)."""
        return TESTED

    def item(self, number: int, about: str) -> dict[str, Any]:
        """The record as an item of ours (``factory.tasks.items``). ``number``: its place, from 1. ``about``: the file's name without its split.

        Raises: ValueError saying why it is none.
        """
        raise NotImplementedError

    def example(self, number: int, about: str) -> dict[str, Any]:
        """The record as it is shown with its answer."""
        return self.item(number, about)


@dataclass(frozen=True)
class Benchmark:
    """One benchmark."""

    name: str
    """As ``published:`` of a task file names it."""
    kind: str
    """Of the items: multiple_choice, maths or code."""
    forms: tuple[type[Form], ...]
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Of the task file, where they are not the defaults of its kind."""
    shown: int = 0
    """Examples before each question, where the file itself holds some."""
