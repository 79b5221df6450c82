"""Finds, decodes and parses the standard library's source files. The files are never imported."""

from __future__ import annotations

import ast
import io
import os
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NOT_TEXT = ("_sysconfigdata", "site-packages", "dist-packages", "__pycache__", "config-")
_TESTS = {"test", "tests", "idle_test"}


@dataclass(frozen=True)
class LibraryModule:
    """One source file of the library. ``tree`` is None for tests, whose docstrings explain nothing, and for files that do not parse."""

    source: str  # 'Lib/json/decoder.py', the same on every machine
    name: str  # 'json.decoder'
    text: str
    tree: ast.Module | None


def list_source_files() -> Iterator[tuple[Path, str]]:
    """Return (path, source) of the library's Python files, sorted by ``source``, which is the path inside the library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(_NOT_TEXT)]
        for name in files:
            if name.endswith(".py") and not name.startswith(_NOT_TEXT):
                path = Path(folder, name)
                found.append((path, f"Lib/{path.relative_to(root).as_posix()}"))
    return iter(sorted(found, key=lambda pair: pair[1]))


def read_module(path: Path, source: str) -> LibraryModule | None:
    """Return the module of a source file; None if the file is not text in the encoding that the file declares."""
    try:
        data = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (OSError, SyntaxError, UnicodeDecodeError, LookupError):
        return None
    name = source.removeprefix("Lib/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    is_test = bool(_TESTS & set(name.split(".")))
    return LibraryModule(source, name, text, None if is_test else _parse(text))


def _parse(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
