"""Makes untrusted text (files, logs, a model's output) harmless: cuts it to a limit, replaces control characters, and marks it as data.

Text for a model stands between two lines that carry the hash of the text, so that no text can contain its own end.
"""

from __future__ import annotations

import hashlib
import unicodedata

from kernels.contract.message import Message

# Control, format (bidirectional overrides, zero widths), private, surrogate, unassigned characters; line and paragraph separators.
INVISIBLE = ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp")


def replace_invisible_characters(text: str) -> str:
    """The text with every invisible character except tab and newline replaced by ``�``."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in "\t\n" or unicodedata.category(c) not in INVISIBLE else "\ufffd" for c in text)


def shorten_text(text: str, limit: int) -> str:
    """The text as ``replace_invisible_characters`` returns it, cut to ``limit`` characters. A note says how many characters are left out."""
    cut = replace_invisible_characters(text[:limit])
    if len(text) <= limit:
        return cut
    return Message(
        "agents.shortened", "{text}\n[{more} more characters are left out]", text=cut, more=len(text) - limit
    )


def fold_to_one_line(text: str, limit: int) -> str:
    """The text on one line of at most ``limit`` characters, so that it cannot add lines to a log or a commit message."""
    words = " ".join(shorten_text(text[: 4 * limit], 4 * limit).split())
    return words if len(words) <= limit else words[: limit - 1] + "…"


def quote_as_data(what: str, text: str, limit: int = 16_000) -> str:
    """``text`` as data for a model: cut to a limit, between marks that the text cannot contain. ``what`` names the data."""
    bounded = shorten_text(text, limit)
    mark = hashlib.sha256(bounded.encode("utf-8", "replace")).hexdigest()[:16]
    return f"<data {mark}: {fold_to_one_line(what, 200)}>\n{bounded}\n</data {mark}>"
