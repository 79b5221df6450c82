"""HTML, web archives and notebooks: the text that a person reads there.

The text of a page is what ``trafilatura`` takes for its main text (Barbaresi 2021): menus, footers and comments are left out. A web archive
(WARC, ISO 28500) gives a row for each response of status 200 whose content is HTML, and for each conversion to plain text (WET), with the
address as ``url`` and the date as ``created``; it is read by ``warcio``. Other records are passed over and counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from factory.ingest.reading.rows import BadRow, RawRow, ShardProblem, too_long
from factory.ingest.reading.streams import BROKEN, ByteStream, Readable, as_text, refuse_unread, whole

_PAGES = ("text/html", "application/xhtml+xml")


def read_html(source: Readable) -> Iterator[RawRow]:
    with source.open() as stream:
        text = page_text(whole(stream, source.limits))
    if text is None:
        yield BadRow("empty", "no main text was found in this page")
    else:
        yield {"text": text, "source": source.name}


def page_text(page: bytes) -> str | None:
    """The main text of a page; None: there is none. Its encoding is the one that it names, or that its bytes look like."""
    import trafilatura

    try:
        return trafilatura.extract(page, include_comments=False, deduplicate=False) or None
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError):  # of pages that are hardly any
        return None


def read_warc(source: Readable) -> Iterator[RawRow]:
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
                    raise ShardProblem(f"the web archive is cut off in record {count}")
        except ArchiveLoadFailed as error:
            raise ShardProblem(f"not a web archive after {count} records: {str(error).strip()[:200]}") from error
        except BROKEN as error:
            refuse_unread(source.name, error)
            raise ShardProblem(f"not a web archive after {count} records: {error}") from error
        if archive.last not in b"\r\n":
            raise ShardProblem(f"the web archive is cut off in record {count + 1}")


class _Ending:
    """A stream that knows its first bytes and its last: warcio passes over a header that is cut off, and reads any text as a record."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream, self.last = stream, b""

    def read(self, size: int = -1) -> bytes:
        block = self.stream.read(size)
        if not self.last and block and not block.startswith(b"WARC/"):
            raise ShardProblem("not a web archive: it does not begin with WARC/")
        self.last = block[-1:] or self.last
        return block


def _record(record: Any, source: Readable) -> Iterator[RawRow]:
    url = record.rec_headers.get_header("WARC-Target-URI") or ""
    kind = record.rec_type
    if kind == "conversion":
        page = _payload(record, source.limits.max_row_bytes)
        text = page if isinstance(page, BadRow) else page.decode("utf-8", "surrogateescape")
    elif kind == "response" and record.http_headers is not None:
        status = record.http_headers.get_statuscode()
        content = (record.http_headers.get_header("Content-Type") or "").partition(";")[0].strip().lower()
        if status != "200" or content not in _PAGES:
            source.left_out("", f"pages of status {status}" if status != "200" else f"content {content or 'unnamed'}")
            return
        page = _payload(record, source.limits.max_row_bytes)
        text = page if isinstance(page, BadRow) else page_text(page) or BadRow("empty", f"no main text: {url[:200]}")
    else:
        return
    row = {"text": text, "url": url.strip("<>"), "created": record.rec_headers.get_header("WARC-Date") or ""}
    yield text if isinstance(text, BadRow) else {key: value for key, value in row.items() if value}


def _payload(record: Any, limit: int) -> bytes | BadRow:
    """What the page is, without transfer and content encodings."""
    stream, found, size = record.content_stream(), [], 0
    while piece := stream.read(1 << 16):
        found.append(piece)
        size += len(piece)
        if size > limit:
            return too_long(size, limit)
    return b"".join(found)


def read_notebook(source: Readable) -> Iterator[RawRow]:
    """A Jupyter notebook is one document: Markdown as it is, code between fences. Outputs are left out: they are what a program printed."""
    with source.open() as stream:
        data = as_text(whole(stream, source.limits))
    try:
        book = json.loads(data)
        cells = book["cells"] if "cells" in book else [cell for sheet in book["worksheets"] for cell in sheet["cells"]]
        kernel = book.get("metadata", {}).get("kernelspec", {})
        language = str(kernel.get("language") or "python")
        parts = [part for part in (_cell(cell, language) for cell in cells) if part]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ShardProblem(f"not a notebook: {type(error).__name__}: {str(error)[:100]}") from error
    yield {"text": "\n\n".join(parts), "source": source.name} if parts else BadRow("empty", "the notebook is empty")


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
