"""Why a row is dropped. Below all that reads rows: readers, shapes and documents raise it."""

from __future__ import annotations


class BadRow(Exception):
    """The row is dropped: ``rule`` is the short name that is counted, ``detail`` one line for a person."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail

    def __reduce__(self) -> tuple[type[BadRow], tuple[str, str]]:
        return BadRow, (self.rule, self.detail)  # so that it can be pickled for worker processes
