"""The same three documents in every kind of file that is read, as the program of each kind writes it."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

TEXTS = [
    "The first document stands here, and it is about the weather of last week.\nIt rained on Monday, and on Tuesday too; then the sun came out "
    "for an hour.\nNobody had asked for it, and everybody went outside: the cafés were full until late in the evening, and the streets as well.",
    'The second one says "quoted words" and ☃, and then goes on with the story of a ship.\nThe ship left the harbour in spring with '
    "nine sailors on board, a cargo of salt and a cat.\nIt came back in autumn, with ten sailors, no salt and two cats; nobody knew the tenth.",
    "The third document is the last of them; it ends with a dot, as most sentences do.\nA sentence that ends otherwise asks something, or shouts, or "
    "was cut off by a program that counted badly.\nSuch programs were common once, and they still are, which is why tests of this kind are written.",
]
ROWS = [{"id": str(number), "text": text} for number, text in enumerate(TEXTS)]

Writer = Callable[[], bytes]


def json_lines(rows: Iterable[dict[str, Any]] = ROWS) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def json_array(indent: int | None = None) -> bytes:
    return json.dumps(ROWS, indent=indent, ensure_ascii=False).encode()


def objects_over_lines() -> bytes:
    return "\n".join(json.dumps(row, indent=2) for row in ROWS).encode()


def table(delimiter: str = ",", head: bytes = b"") -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, ["id", "text"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return head + out.getvalue().encode()


def arrow_table() -> pa.Table:
    return pa.table({name: [row[name] for row in ROWS] for name in ("id", "text")})


def parquet() -> bytes:
    out = pa.BufferOutputStream()
    pq.write_table(arrow_table(), out)
    return out.getvalue().to_pybytes()


def arrow_file() -> bytes:
    out = pa.BufferOutputStream()
    with pa.ipc.new_file(out, arrow_table().schema) as writer:
        writer.write_table(arrow_table())
    return out.getvalue().to_pybytes()


def arrow_stream() -> bytes:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, arrow_table().schema) as writer:
        writer.write_table(arrow_table())
    return out.getvalue().to_pybytes()


def feather() -> bytes:
    out = pa.BufferOutputStream()
    pyarrow.feather.write_feather(arrow_table(), out, compression="lz4")
    return out.getvalue().to_pybytes()


def compress(data: bytes, suffix: str) -> bytes:
    if suffix in ("gz", "bz2", "xz", "lzma"):
        return {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "lzma": _alone}[suffix](data)
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, {"zst": "zstd", "zstd": "zstd", "lz4": "lz4"}[suffix]) as stream:
        stream.write(data)
    return out.getvalue().to_pybytes()


def _alone(data: bytes) -> bytes:
    return lzma.compress(data, format=lzma.FORMAT_ALONE)


def zipped(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return out.getvalue()


def tarred(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def one_each(suffix: str, written: Iterable[bytes] | None = None) -> dict[str, bytes]:
    """A document a file."""
    return {f"part/{n}.{suffix}": data for n, data in enumerate(written or [text.encode() for text in TEXTS])}


def page(text: str) -> bytes:
    menu = "".join(f"<li><a href='/{name}'>{name}</a></li>" for name in ("Home", "About", "Login"))
    lines = "".join(f"<p>{line}</p>" for line in text.split("\n"))
    return (
        f"<html><head><meta charset='utf-8'><title>A page</title></head><body><nav><ul>{menu}</ul></nav>"
        f"<main><article>{lines}</article></main><footer>Copyright by nobody. All rights reserved.</footer></body></html>"
    ).encode()


def web_archive(compressed: bool = False) -> bytes:
    out = io.BytesIO()
    writer = WARCWriter(out, gzip=compressed)
    writer.write_record(writer.create_warcinfo_record("a.warc", {"software": "a test"}))
    for number, text in enumerate(TEXTS):
        url = f"https://example.org/{number}.html"
        kinds = [
            ("200 OK", "text/html; charset=utf-8", page(text)),
            ("404 Not Found", "text/html", b"<p>no such page</p>"),
        ]
        kinds += [("200 OK", "image/png", b"\x89PNG")]
        for status, kind, body in kinds:
            headers = StatusAndHeaders(status, [("Content-Type", kind)], protocol="HTTP/1.1")
            writer.write_record(writer.create_warc_record(url, "response", io.BytesIO(body), http_headers=headers))
    return out.getvalue()


def plain_texts_of_pages() -> bytes:
    out = io.BytesIO()
    writer = WARCWriter(out, gzip=False)
    for number, text in enumerate(TEXTS):
        data = io.BytesIO(text.encode())
        writer.write_record(
            writer.create_warc_record(
                f"https://example.org/{number}", "conversion", data, warc_content_type="text/plain"
            )
        )
    return out.getvalue()


def notebook(text: str) -> bytes:
    cells = [
        {"cell_type": "markdown", "source": text.splitlines(keepends=True), "metadata": {}},
        {"cell_type": "code", "source": "", "outputs": [{"text": "printed"}], "metadata": {}},
    ]
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}).encode()


def dataset(folder: Path, splits: Iterable[str] = ()) -> Path:
    """As ``save_to_disk`` of Hugging Face's ``datasets`` writes one: with splits, a dictionary of them."""
    if named := list(splits):
        folder.mkdir()
        (folder / "dataset_dict.json").write_text(json.dumps({"splits": named}))
        for split in named:
            dataset(folder / split)
        return folder
    folder.mkdir()
    names = []
    for number, row in enumerate(ROWS):
        names.append(f"data-{number:05d}-of-00003.arrow")
        one = pa.table({name: [value] for name, value in row.items()})
        with pa.OSFile(str(folder / names[-1]), "wb") as out, pa.ipc.new_stream(out, one.schema) as writer:
            writer.write_table(one)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


_LINES = ("jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow")


def _of(suffix: str) -> bytes:
    return {
        "jsonl": json_lines, "ndjson": json_lines, "json": json_array, "csv": table, "tsv": lambda: table("\t"),
        "parquet": parquet, "arrow": arrow_file,
    }[suffix]()  # fmt: skip


KINDS: dict[str, Writer] = {
    **{f"a.{suffix}": lambda suffix=suffix: _of(suffix) for suffix in _LINES},
    "lines.json": json_lines,
    "pretty.json": lambda: json_array(2),
    "objects.json": objects_over_lines,
    "bom.csv": lambda: table(head=b"\xef\xbb\xbf"),
    "semicolons.csv": lambda: table(";"),
    "a.tab": lambda: table("\t"),
    "stream.arrow": arrow_stream,
    "a.ipc": arrow_file,
    "a.feather": feather,
    **{
        f"a.{suffix}.{packed}": lambda suffix=suffix, packed=packed: compress(_of(suffix), packed)
        for suffix, packed in [
            *(("jsonl", packed) for packed in ("gz", "bz2", "xz", "lzma", "zst", "zstd", "lz4")),
            *(("json", packed) for packed in ("gz", "bz2", "xz", "zst")),
            *(("csv", packed) for packed in ("gz", "bz2", "xz", "zst")),
            *((suffix, "gz") for suffix in ("tsv", "parquet", "arrow")),
        ]
    },
    **{f"lines.{suffix}.zip": lambda suffix=suffix: zipped({f"in/a.{suffix}": _of(suffix)}) for suffix in _LINES},
    "gzipped.zip": lambda: zipped({"a.jsonl.gz": compress(json_lines(), "gz")}),
    "texts.zip": lambda: zipped(one_each("txt")),
    "code.zip": lambda: zipped(one_each("rs")),
    "pages.zip": lambda: zipped(one_each("html", map(page, TEXTS))),
    "notebooks.zip": lambda: zipped(one_each("ipynb", map(notebook, TEXTS))),
    **{
        f"texts.tar.{packed}": lambda packed=packed: compress(tarred(one_each("md")), packed)
        for packed in ("gz", "bz2", "xz", "zst")
    },
    "texts.tar": lambda: tarred(one_each("txt")),
    "texts.tgz": lambda: compress(tarred(one_each("txt")), "gz"),
    "code.tar": lambda: tarred(one_each("go")),
    "parquet.tar": lambda: tarred({"a.parquet": parquet()}),
    "array.tar": lambda: tarred({"a.json": json_array()}),
    "lines.tar.gz": lambda: compress(tarred({"a.jsonl": json_lines()}), "gz"),
    "a.warc": web_archive,
    "a.warc.gz": lambda: web_archive(True),
    "a.warc.wet": plain_texts_of_pages,
    "a.warc.wet.gz": lambda: compress(plain_texts_of_pages(), "gz"),
}
# A document a file: they are read alone.
SINGLE: dict[str, Callable[[str], bytes]] = {
    **{
        f"a.{suffix}": str.encode
        for suffix in ("txt", "md", "rst", "tex", "py", "c", "cpp", "rs", "go", "java", "ts", "sql", "kt")
    },
    "Makefile": str.encode,
    "Dockerfile": str.encode,
    "a.txt.gz": lambda text: compress(text.encode(), "gz"),
    "a.html": page,
    "a.htm": page,
    "a.ipynb": notebook,
}
REFUSED = {
    "a.pdf": "pdftotext", "a.docx": "pandoc", "a.odt": "pandoc", "a.epub": "pandoc", "a.xlsx": "the sheet as CSV", "a.png": "an image",
    "a.jpg": "an image", "a.mp3": "transcribe", "a.mp4": "transcribe", "a.pkl": "JSON lines", "a.pt": "JSON lines", "a.npy": "JSON lines",
    "a.sqlite": "export", "a.7z": "only zip and tar", "a.rar": "only zip and tar", "a.avro": "Parquet", "a.orc": "Parquet",
    "a.mbox": "JSON lines", "a.unheard": "supported types are JSON", "noname": "supported types are JSON",
}  # fmt: skip
