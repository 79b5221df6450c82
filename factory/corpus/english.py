"""Makes a corpus of general English from what the installed Python packages say about themselves: paragraphs that people wrote, under open licences.

It has the paragraphs of prose of each package's description (Core metadata, packaging.python.org), without code, tables, links and headings. Only
packages whose metadata name a licence of ``LICENCES`` are read.

A separate file, because it reads packages, not the standard library, and has rules of its own about what is prose.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from factory.corpus.shards import Documents, draw_share, make_document, write_shard

DOMAIN, UNTRAINED = "english", "untrained-english"
UNTRAINED_SHARE = 0.35  # of the packages, whose text no training reads
LICENCES = {
    "mit": "MIT", "mit license": "MIT", "apache-2.0": "Apache-2.0", "apache 2.0": "Apache-2.0", "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0", "apache 2.0 license": "Apache-2.0", "bsd-3-clause": "BSD-3-Clause", "psf-2.0": "PSF-2.0",
}  # fmt: skip
SHORTEST = 80  # characters of a paragraph
PAGE = 1_000  # characters after which a document ends
LETTERS = 0.75  # least share of letters and spaces in a paragraph


def write_english_shards(trained: Path, untrained: Path) -> dict[str, int]:
    """Write the corpus as two JSONL shards of the domains ``DOMAIN`` and ``UNTRAINED``; returns the number of documents of each.

    A hash of a package's name decides, so that the documents of a package are in one domain. The same packages give the same bytes.
    """
    documents: Documents = {DOMAIN: [], UNTRAINED: []}
    for name, licence, text in read_descriptions():
        domain = UNTRAINED if draw_share(name) < UNTRAINED_SHARE else DOMAIN
        for number, page in enumerate(_join_paragraphs(keep_prose(text))):
            documents[domain].append(make_document(name, domain, number, licence, text=page))
    write_shard(trained, documents[DOMAIN])
    write_shard(untrained, documents[UNTRAINED])
    return {domain: len(found) for domain, found in documents.items()}


def read_descriptions() -> Iterator[tuple[str, str, str]]:
    """Yield (name, licence, description) of each installed package that names a licence of ``LICENCES``, sorted by name."""
    found = {}
    for package in importlib.metadata.distributions():
        facts = package.metadata.json
        named = str(facts.get("license_expression") or facts.get("license") or "").strip().lower()
        if named in LICENCES and "name" in facts:
            found[str(facts["name"]).lower()] = (LICENCES[named], str(facts.get("description", "")))
    return ((name, *found[name]) for name in sorted(found))


def keep_prose(text: str) -> Iterator[str]:
    """Yield the paragraphs of prose in a description, without line breaks and marks of Markdown.

    >>> title, code = "# Title", "    x = 1"
    >>> prose = "This library reads files of `rows`, and it writes them again in\\nthe same order, see [docs](a.html)."
    >>> list(keep_prose("\\n\\n".join([title, prose, code])))
    ['This library reads files of rows, and it writes them again in the same order, see docs.']
    """
    for paragraph in re.split(r"\n\s*\n", text.replace("\r\n", "\n")):
        if paragraph.startswith((" ", "\t", "#", "|", "```", ">>>", "..", "<", "!")):
            continue
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
        plain = re.sub(r"`+_?|\*\*|<[^>]*>|https?://\S+", "", plain).strip()
        letters = sum(letter.isalpha() or letter == " " for letter in plain)
        if len(plain) >= SHORTEST and letters >= LETTERS * len(plain) and plain[-1] in ".!?:":
            yield plain


def _join_paragraphs(paragraphs: Iterable[str]) -> Iterator[str]:
    """Yield documents of whole paragraphs, in order."""
    page = ""
    for paragraph in paragraphs:
        page = f"{page}\n\n{paragraph}" if page else paragraph
        if len(page) >= PAGE:
            yield page
            page = ""
    if page:
        yield page
