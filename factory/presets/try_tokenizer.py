"""Loads a tokenizer.json and encodes a few texts: ``python -I try_tokenizer.py FILE``. A hostile file can make the library abort the process.

A separate file, because a process of its own runs it, with little memory, before the factory loads the tokenizer.
"""

from __future__ import annotations

import resource
import sys

MEMORY = 6 << 30  # bytes of address space
TEXTS = ("", "a", "A b. C, d!  2024\n" * 64, "\u00e4 \u6f22 \U0001f642 <|endoftext|>", "\x00\ufeff")


def main(path: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    import tokenizers

    inner = tokenizers.Tokenizer.from_file(path)
    for text in TEXTS:
        inner.decode(inner.encode(text).ids)


if __name__ == "__main__":
    main(sys.argv[1])
