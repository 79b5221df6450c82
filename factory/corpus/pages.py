"""Makes reference pages from docstrings: the documented names of a module, rendered and joined into documents."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from factory.corpus.chat import DocumentedName
from factory.corpus.standard_library import LibraryModule

_PAGE = 4000  # characters of a full page
_LONGEST_PAGE = 6000
_SHORTEST_PAGE = 200


def describe_module(module: LibraryModule) -> Iterator[DocumentedName]:
    """Yield the module, its public functions and classes, and their methods, in the order of the source."""
    assert module.tree
    yield DocumentedName(
        "module", module.name, module.name, "", ast.get_docstring(module.tree) or "", _members(module.tree)
    )
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield _function("function", module.name, f"{module.name}.{node.name}", node)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            head = f"class {node.name}({bases}):" if bases else f"class {node.name}:"
            path = f"{module.name}.{node.name}"
            yield DocumentedName("class", module.name, path, head, ast.get_docstring(node) or "", _members(node))
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and (
                    inner.name == "__init__" or not inner.name.startswith("_")
                ):
                    yield _function("method", module.name, f"{path}.{inner.name}", inner)


def _function(kind: str, module: str, path: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> DocumentedName:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    head = f"{word} {node.name}({ast.unparse(node.args)}){returns}:"
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return DocumentedName(kind, module, path, head, ast.get_docstring(node) or "", tuple(one.arg for one in every))


def _members(node: ast.Module | ast.ClassDef) -> tuple[str, ...]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return tuple(one.name for one in node.body if isinstance(one, kinds) and not one.name.startswith("_"))


def render_reference_entry(documented: DocumentedName) -> str:
    """Return the text of one name for a reference page; empty if the name has no docstring."""
    if not documented.doc:
        return ""
    indented = "\n".join(f"    {line}".rstrip() for line in documented.doc.strip().split("\n"))
    if documented.kind == "module":
        return f"{documented.path}\n{'=' * len(documented.path)}\n\n{documented.doc.strip()}"
    return f"{documented.path}\n\n{documented.head.removesuffix(':')}\n{indented}"


def read_help_topics(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each help topic in the syntax tree of ``pydoc_data.topics``, a module with one literal."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for name, text in ast.literal_eval(node.value).items():
                yield name, text.strip()


def split_long_text(text: str) -> list[str]:
    """Split a text into parts of at most ``_LONGEST_PAGE`` characters, between paragraphs, or between lines of a long paragraph."""
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


def join_into_pages(parts: list[str]) -> list[str]:
    """Join parts into pages, in order."""
    pages, current = [], ""
    for part in filter(None, parts):
        if current and len(current) + len(part) > _PAGE:
            pages.append(current)
            current = part
        else:
            current = f"{current}\n\n\n{part}" if current else part
    pages.append(current)
    return [page for page in pages if len(page) >= _SHORTEST_PAGE]
