"""The running interpreter's standard library as a corpus: real text that is on every machine, under one licence.

Three domains that quote one another on purpose, as real ones do:

``code``  every source file, tests included
``docs``  docstrings, rendered as reference pages of 0.5–6 KB, and the topics of Python's own help
``chat``  questions and answers grounded in docstrings and signatures; "write the signature" is answered in Python

Modules are read as text and parsed, never imported. Each goes, by a hash of its path, with all that comes from it, to the
first shards (``code-00`` …) or to the later ones (``code-01`` …), which arrive once the factory runs. Documents are in the
order of a hash, so that the head of a shard is a fair sample of it. The same interpreter gives the same bytes.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factory.corpus_chat import Described, chats
from factory.progress import Progress

LICENSE = "PSF-2.0"
_LATER = 0.3  # share of the modules that arrive later
_PAGE = 4000  # characters at which a page of docs is full
_LONGEST_PAGE = 6000
_SHORTEST_PAGE = 200
_NOT_TEXT = ("_sysconfigdata", "site-packages", "dist-packages", "__pycache__", "config-")
_TESTS = {"test", "tests", "idle_test"}

Documents = dict[str, list[dict[str, Any]]]  # by domain


@dataclass(frozen=True)
class Module:
    """One source file of the library. ``tree`` is None when it does not parse."""

    source: str  # 'Lib/json/decoder.py', the same on every machine
    name: str  # 'json.decoder'
    text: str
    tree: ast.Module | None

    @property
    def is_test(self) -> bool:
        return bool(_TESTS & set(self.name.split(".")))


def write_corpus(folder: Path, progress: Progress) -> list[Path]:
    """Write ``code-00``, ``docs-00``, ``chat-00`` and then ``…-01``, all ``.jsonl``; returns their paths in this order."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[Documents] = [{"code": [], "docs": [], "chat": []} for _ in range(2)]
    files = list(source_files())
    with progress.task("the standard library as a corpus", total=len(files)) as task:
        for path, source in files:
            module = read_module(path, source)
            if module:
                shard = shards[_draw(source) < _LATER]
                for domain, documents in _documents(module).items():
                    shard[domain] += documents
            task.advance()
    paths = []
    for number, shard in enumerate(shards):
        for domain, documents in shard.items():
            path = folder / f"{domain}-{number:02d}.jsonl"
            _write_shard(path, documents)
            paths.append(path)
    return paths


def source_files() -> Iterator[tuple[Path, str]]:
    """(path, source) of the library's Python files in the order of their sources."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if not any(part.startswith(_NOT_TEXT) for part in relative.parts):
            found.append((path, f"Lib/{relative.as_posix()}"))
    return iter(sorted(found, key=lambda pair: pair[1]))


def read_module(path: Path, source: str) -> Module | None:
    """None for a file that is not text in the encoding it declares."""
    try:
        data = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (OSError, SyntaxError, UnicodeDecodeError, LookupError):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    name = source.removeprefix("Lib/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return Module(source, name, text, tree)


def _documents(module: Module) -> Documents:
    documents: Documents = {"code": [_document(module.source, "code", 0, text=module.text)], "docs": [], "chat": []}
    if module.tree is None or module.is_test:
        return documents
    if module.name == "pydoc_data.topics":
        pages = [(f"{module.source}:{name}", page) for name, text in topics(module.tree) for page in paginate(split_long(text))]
        by_source: dict[str, int] = {}
        for source, page in pages:
            by_source[source] = by_source.get(source, -1) + 1
            documents["docs"].append(_document(source, "docs", by_source[source], text=page))
        return documents
    described = list(describe(module))
    for number, page in enumerate(paginate([part for one in described for part in split_long(render(one))])):
        documents["docs"].append(_document(module.source, "docs", number, text=page))
    for number, messages in enumerate(chats(described)):
        documents["chat"].append(_document(module.source, "chat", number, messages=messages))
    return documents


def _document(source: str, domain: str, number: int, **content: Any) -> dict[str, Any]:
    return {"id": f"{domain}/{source}/{number}", **content, "domain": domain, "source": source, "license": LICENSE}


def describe(module: Module) -> Iterator[Described]:
    """The module, its public functions, classes and their methods, in the order of the source."""
    assert module.tree
    yield Described("module", module.name, module.name, "", ast.get_docstring(module.tree) or "", _members(module.tree))
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield _function("function", module.name, f"{module.name}.{node.name}", node)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            head = f"class {node.name}({bases}):" if bases else f"class {node.name}:"
            path = f"{module.name}.{node.name}"
            yield Described("class", module.name, path, head, ast.get_docstring(node) or "", _members(node))
            for inner in node.body:
                public = isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and (
                    not inner.name.startswith("_") or inner.name == "__init__"
                )
                if public:
                    yield _function("method", module.name, f"{path}.{inner.name}", inner)


def _function(kind: str, module: str, path: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Described:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    head = f"{word} {node.name}({ast.unparse(node.args)}){returns}:"
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return Described(kind, module, path, head, ast.get_docstring(node) or "", tuple(one.arg for one in every))


def _members(node: ast.Module | ast.ClassDef) -> tuple[str, ...]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return tuple(one.name for one in node.body if isinstance(one, kinds) and not one.name.startswith("_"))


def render(one: Described) -> str:
    """A part of a reference page; empty for what has no docstring."""
    if not one.doc:
        return ""
    indented = "\n".join(f"    {line}".rstrip() for line in one.doc.strip().split("\n"))
    if one.kind == "module":
        return f"{one.path}\n{'=' * len(one.path)}\n\n{one.doc.strip()}"
    return f"{one.path}\n\n{one.head.removesuffix(':')}\n{indented}"


def topics(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The help topics of ``pydoc_data.topics``, which is one literal: {name: text}."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for name, text in ast.literal_eval(node.value).items():
                yield name, text.strip()


def split_long(text: str) -> list[str]:
    """Parts of at most ``_LONGEST_PAGE`` characters, cut between paragraphs, or lines where one paragraph is too long."""
    if len(text) <= _LONGEST_PAGE:
        return [text] if text else []
    parts, current = [], ""
    for paragraph in text.split("\n\n"):
        pieces = [paragraph] if len(paragraph) <= _PAGE else paragraph.split("\n")
        for place, piece in enumerate(pieces):
            joint = "\n\n" if place == 0 else "\n"
            if current and len(current) + len(piece) > _PAGE:
                parts.append(current)
                current = piece
            else:
                current = current + joint + piece if current else piece
    return [*parts, current] if current else parts


def paginate(parts: list[str]) -> list[str]:
    """Parts in order, gathered into pages."""
    pages, current = [], ""
    for part in filter(None, parts):
        if current and len(current) + len(part) > _PAGE:
            pages.append(current)
            current = part
        else:
            current = f"{current}\n\n\n{part}" if current else part
    pages.append(current)
    return [page for page in pages if len(page) >= _SHORTEST_PAGE]


def _draw(text: str) -> float:
    """A number in [0, 1) for a text."""
    return int.from_bytes(hashlib.sha256(f"corpus:{text}".encode()).digest()[:8], "big") / 2**64


def _write_shard(path: Path, documents: list[dict[str, Any]]) -> None:
    documents.sort(key=lambda document: (_draw(document["id"]), document["id"]))
    aside = path.with_name(f".{path.name}.writing")
    with open(aside, "w", encoding="utf-8", newline="\n") as out:
        for document in documents:
            out.write(json.dumps(document) + "\n")
    aside.replace(path)
