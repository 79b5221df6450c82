"""Writes the library's modules as JSONL shards of three domains: the first shards, and the later shards that arrive while the factory runs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from factory.core.progress import Progress
from factory.corpus.chat import make_chats
from factory.corpus.pages import (
    describe_module,
    join_into_pages,
    read_help_topics,
    render_reference_entry,
    split_long_text,
)
from factory.corpus.standard_library import LibraryModule, list_source_files, read_module
from kernels.contract.files import write_atomically

LICENSE = "PSF-2.0"
_LATER = 0.3  # share of the modules that arrive later

Documents = dict[str, list[dict[str, Any]]]  # by domain


def write_corpus(folder: Path, progress: Progress, module_share: float = 1.0) -> list[Path]:
    """Write shards with a share of the library's modules: ``code-00``, ``docs-00``, ``chat-00``, then ``code-01`` and so on, all ``.jsonl``.

    Returns their paths in this order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[Documents] = [{"code": [], "docs": [], "chat": []} for _ in range(2)]
    files = list(list_source_files())
    with progress.task("the standard library as a corpus", total=len(files)) as task:
        for path, source in files:
            module = (
                read_module(path, source) if module_share >= 1 or draw_share(f"share:{source}") < module_share else None
            )
            if module:
                shard = shards[draw_share(source) < _LATER]
                for domain, documents in _documents(module).items():
                    shard[domain] += documents
            task.advance()
    paths = []
    for number, shard in enumerate(shards):
        for domain, documents in shard.items():
            path = folder / f"{domain}-{number:02d}.jsonl"
            write_shard(path, documents)
            paths.append(path)
    return paths


def _documents(module: LibraryModule) -> Documents:
    documents: Documents = {
        "code": [make_document(module.source, "code", 0, text=module.text)],
        "docs": [],
        "chat": [],
    }
    if module.tree is None:
        return documents
    if module.name == "pydoc_data.topics":
        pages = [
            (f"{module.source}:{name}", page)
            for name, text in read_help_topics(module.tree)
            for page in join_into_pages(split_long_text(text))
        ]
        by_source: dict[str, int] = {}
        for source, page in pages:
            by_source[source] = by_source.get(source, -1) + 1
            documents["docs"].append(make_document(source, "docs", by_source[source], text=page))
        return documents
    described = list(describe_module(module))
    for number, page in enumerate(
        join_into_pages([part for one in described for part in split_long_text(render_reference_entry(one))])
    ):
        documents["docs"].append(make_document(module.source, "docs", number, text=page))
    for number, messages in enumerate(make_chats(described)):
        documents["chat"].append(make_document(module.source, "chat", number, messages=messages))
    return documents


def make_document(source: str, domain: str, number: int, licence: str = LICENSE, **content: Any) -> dict[str, Any]:
    """Return a document as a row of a shard. ``content``: its text, or its messages."""
    return {"id": f"{domain}/{source}/{number}", **content, "domain": domain, "source": source, "license": licence}


def draw_share(text: str) -> float:
    """Return a number in [0, 1) for a text."""
    return int.from_bytes(hashlib.sha256(f"corpus:{text}".encode()).digest()[:8], "big") / 2**64


def write_shard(path: Path, documents: list[dict[str, Any]]) -> None:
    """Write documents as a JSONL shard, in an order that a hash of their names gives."""
    documents.sort(key=lambda document: (draw_share(document["id"]), document["id"]))
    write_atomically(path, "".join(json.dumps(document) + "\n" for document in documents))
