"""Loads a tokenizer.json and encodes odd texts: ``python -I try_tokenizer.py FILE``. A hostile file can make the library abort the process.

A separate file, because a process of its own runs it, with little memory, before the factory loads the tokenizer. It shows what a tokenizer does on
texts of every kind, and not that it has a fault for no text. Ingest therefore survives a fault too (``factory.ingest.worker``).
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator

MEMORY = 6 << 30  # bytes of address space
LONG = 1 << 13  # characters of a run
LINE = 1 << 20  # characters of the longest line
SURROGATES = range(0xD800, 0xE000)


def list_texts() -> Iterator[str]:
    """Yield texts that are short, empty, long runs, and of all planes of Unicode, together some two megabytes."""
    yield from (
        "",
        " ",
        "\n",
        "\r\n",
        "\n" * 999,
        "a",
        "A b. C, d!  2024\n" * 64,
        "\x00\ufeff",
        "\ufffd\uffff",
        "\u0301" * 300,
    )
    yield "\u00e4 \u6f22 \U0001f642 <|endoftext|> <s></s> [INST] [MASK] <unk> <pad> [UNK] \u2581 \u0120"
    for run in (
        "a",
        "b",
        "ab",
        " ",
        "\t",
        "\n",
        " \n",
        "0",
        ".",
        "'",
        "-",
        "_",
        "\u00e4",
        "\u6f22",
        "\U0001f642",
        "\u0301",
        "\x00",
        "\u200b",
    ):
        long = run * (LONG // len(run))
        yield from (long, f"{long}b", f"{long}!", f"x {long}\n", run * 40 + "!")
    for plane in range(17):
        found = [chr(at) for at in range(plane << 16, (plane + 1) << 16, 29) if at not in SURROGATES]
        yield from ("".join(found), "".join(f"{letter}\u0301 a" for letter in found[::9]))
    words = "The quick brown fox's 12 jumps, over x_1 = f(y) lazily. "
    yield words * (LINE // 8 // len(words))
    yield "".join(chr(33 + (number * number) % 94) for number in range(LINE // 8))
    yield "a" * LINE


def main(path: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    import tokenizers

    inner = tokenizers.Tokenizer.from_file(path)
    for text in list_texts():
        inner.decode(inner.encode(text).ids)


if __name__ == "__main__":
    main(sys.argv[1])
