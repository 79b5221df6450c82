"""Failures of the library 'tokenizers' as errors of this factory.

The library is written in Rust. If a tokenizer's patterns and a text do not suit each other, it panics. Python then gets an error that is not an
``Exception`` and would end a daemon. A split pattern that backtracks too often does so: Oniguruma gives up after ten million steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from factory.core.errors import InputError


class TokenizerFailedError(InputError):
    """The error of a text that the tokenizer's library cannot encode or decode."""


@contextmanager
def library_faults() -> Iterator[None]:
    """Raise ``TokenizerFailedError`` for a panic or a plain Exception of the library inside the block, or inside the decorated function."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise TokenizerFailedError(
            "ingest.tokenizer_failed", "the tokenizer's library fails: {error}", error=str(error)[:200]
        ) from error
