"""Extracts the text that a person reads from HTML, web archives and notebooks.

``trafilatura`` (Barbaresi 2021) finds the main text of a page, without menus, footers and comments. ``warcio`` reads web archives (WARC, ISO
28500). A web archive gives a row for each HTML response of status 200, and for each conversion to plain text (WET). The row has the address as
``url`` and the date as ``created``. Other records are skipped and counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from factory.ingest.reading.rows import BadRow, RawRow, ShardProblem, make_row_too_long_error
from factory.ingest.reading.streams import (
    BROKEN,
    ByteStream,
    ReadableFile,
    decode_text,
    raise_if_machine_fault,
    read_all,
)
from kernels.contract.message import Message

_PAGES = ("text/html", "application/xhtml+xml")


def read_html(source: ReadableFile) -> Iterator[RawRow]:
    with source.open() as stream:
        text = extract_page_text(read_all(stream, source.limits))
    if text is None:
        yield BadRow("empty", Message("reading.no_main_text", "the page has no main text"))
    else:
        yield {"text": text, "source": source.name}


def extract_page_text(page: bytes) -> str | None:
    """Return the main text of a page, or None if it has none. The encoding is the one that the page names, else it is guessed from the bytes."""
    import trafilatura

    try:
        return trafilatura.extract(page, include_comments=False, deduplicate=False) or None
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError):  # trafilatura fails on broken pages
        return None


def read_warc(source: ReadableFile) -> Iterator[RawRow]:
    from warcio.archiveiterator import ArchiveIterator
    from warcio.exceptions import ArchiveLoadFailed

    count = 0
    with source.open() as stream:
        archive = _Ending(stream)
        try:
            for record in ArchiveIterator(archive):
                count += 1
                yield from _record(record, source)
                while record.raw_stream.read(1 << 20):
                    pass
                if getattr(record.raw_stream, "limit", 0) > 0:
                    raise _cut_off(count)
        except ArchiveLoadFailed as error:
            raise _broken(count, str(error).strip()[:200]) from error
        except BROKEN as error:
            raise_if_machine_fault(source.name, error)
            raise _broken(count, str(error)) from error
        if archive.last not in b"\r\n":
            raise _cut_off(count + 1)


def _cut_off(record: int) -> ShardProblem:
    return ShardProblem("reading.warc_cut_off", "the web archive is cut off in record {record}", record=record)


def _broken(records: int, error: str) -> ShardProblem:
    return ShardProblem(
        "reading.warc",
        "the web archive cannot be read after {records:,|record|records}: {error}",
        records=records,
        error=error,
    )


class _Ending:
    """A stream that checks its first bytes and remembers its last bytes. Both are needed because warcio skips a truncated header, and reads any text
    as a record."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream, self.last = stream, b""

    def read(self, size: int = -1) -> bytes:
        block = self.stream.read(size)
        if not self.last and block and not block.startswith(b"WARC/"):
            raise ShardProblem("reading.warc_start", "the file is not a web archive: it does not begin with WARC/")
        self.last = block[-1:] or self.last
        return block


def _record(record: Any, source: ReadableFile) -> Iterator[RawRow]:
    url = record.rec_headers.get_header("WARC-Target-URI") or ""
    kind = record.rec_type
    if kind == "conversion":
        page = _payload(record, source.limits.max_row_bytes)
        text = page if isinstance(page, BadRow) else page.decode("utf-8", "surrogateescape")
    elif kind == "response" and record.http_headers is not None:
        status = record.http_headers.get_statuscode()
        content = (record.http_headers.get_header("Content-Type") or "").partition(";")[0].strip().lower()
        if status != "200" or content not in _PAGES:
            other_status = Message("reading.page_status", "the page has the HTTP status {status}", status=status)
            other_content = Message(
                "reading.page_content", "the page has the content type {content}", content=content or "unnamed"
            )
            source.left_out("", other_status if status != "200" else other_content)
            return
        page = _payload(record, source.limits.max_row_bytes)
        nothing = Message("reading.record_without_text", "the page has no main text: {url}", url=url[:200])
        text = page if isinstance(page, BadRow) else extract_page_text(page) or BadRow("empty", nothing)
    else:
        return
    row = {"text": text, "url": url.strip("<>"), "created": record.rec_headers.get_header("WARC-Date") or ""}
    yield text if isinstance(text, BadRow) else {key: value for key, value in row.items() if value}


def _payload(record: Any, limit: int) -> bytes | BadRow:
    """Return the bytes of a page, with transfer and content encodings decoded."""
    stream, found, size = record.content_stream(), [], 0
    while piece := stream.read(1 << 16):
        found.append(piece)
        size += len(piece)
        if size > limit:
            return make_row_too_long_error(size, limit)
    return b"".join(found)


def read_notebook(source: ReadableFile) -> Iterator[RawRow]:
    """Read a Jupyter notebook as one document: Markdown as it is, code between fences, without outputs."""
    with source.open() as stream:
        data = decode_text(read_all(stream, source.limits))
    try:
        book = json.loads(data)
        cells = book["cells"] if "cells" in book else [cell for sheet in book["worksheets"] for cell in sheet["cells"]]
        kernel = book.get("metadata", {}).get("kernelspec", {})
        language = str(kernel.get("language") or "python")
        parts = [part for part in (_cell(cell, language) for cell in cells) if part]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ShardProblem(
            "reading.notebook",
            "the file is not a Jupyter notebook ({kind}: {error})",
            kind=type(error).__name__,
            error=str(error)[:100],
        ) from error
    empty = Message("reading.empty_notebook", "the notebook is empty")
    yield {"text": "\n\n".join(parts), "source": source.name} if parts else BadRow("empty", empty)


def _cell(cell: dict[str, Any], language: str) -> str:
    """
    >>> _cell({"cell_type": "code", "source": ["x = 1\\n", "x"], "outputs": [1]}, "python")
    '```python\\nx = 1\\nx\\n```'
    """
    written = cell.get("source", cell.get("input", ""))
    text = ("".join(written) if isinstance(written, list) else written).strip("\n")
    if not text.strip():
        return ""
    return f"```{language}\n{text}\n```" if cell["cell_type"] == "code" else text
