"""Messages in tests: what an error, a line or a verdict says is compared by code and data, not by its text.

    with refused("ingest.no_column", column="text"):
        ingest(...)
    assert codes(verdict.reasons) == ["release.not_better", "release.to_do"]
    assert the(lines, "status.disk").data["free"] == 5_000

``python -m tests.support.messages factory/ingest`` lists what a folder says without a code, and codes that break a rule.
"""

from __future__ import annotations

import ast
import re
import string
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kernels.contract.message import CodedError, Message

ROOT = Path(__file__).parents[2]
ROOMS = ("factory", "agents", "trainer", "models", "kernels")
CODE = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)+")
LONG_WORDS = 4  # a text of so many words, and so many characters, is prose
LONG_CHARACTERS = 24
NOT_MESSAGES = {
    "factory/bundles/documents/card.py": "the page of a model card: its text is part of the bundle's format",
    "factory/bundles/documents/croissant.py": "values of a JSON-LD file: part of the bundle's format",
    "factory/bundles/documents/spdx.py": "values of a JSON-LD file: part of the bundle's format",
    "factory/evals/probes/conversations.py": "texts and chats that engines are asked",
    "factory/tasks/program_texts.py": "Python programs and empty replies that prove tasks",
    "factory/tasks/published/choices.py": "a benchmark's prompt",
    "factory/tasks/published/programs.py": "benchmarks' prompts and programs",
    "factory/tasks/inside/": "it runs inside the sandbox: standard library only",
    "factory/set_up/": "it runs before anything is installed: standard library only",
    "factory/serving/metrics.py": "descriptions of metrics, which Prometheus reads",
    "factory/sandbox/launch.py": "it runs inside the sandbox: standard library only",
    "factory/corpus/": "text of a generated corpus",
    "factory/ingest/chat_template.py": "Jinja templates",
    "factory/ingest/reading/file_kinds.py": "tables of suffixes",
    "factory/ingest/rules/licence_names.py": "a table of licences' ids",
    "factory/ingest/shapes/tools_prompt.py": "a prompt for language models",
    "factory/ingest/tokenizing/tokenizer_probes.py": "test inputs of a tokenizer",
    "factory/presets/try_tokenizer.py": "test inputs of a tokenizer",
    "agents/core/pages/": "the skeleton of HTML pages",
    "agents/line_profiler/report/drawing.py": "drawings as SVG",
    "agents/kernel_engineer/evidence.py": "a prompt for a language model",
    "agents/kernel_engineer/prompts.py": "a prompt for a language model",
    "agents/line_profiler/machine.py": "names of facts in profile.json, for a language model",
    "agents/kernel_engineer/tools.py": "tools of a language model, and their answers to it",
    "agents/loop/prompts.py": "a prompt for a language model",
    "agents/loop/tools.py": "tools of a language model, and their answers to it",
    "agents/loss_doctor/causes.py": "names of causes, which the ledger keeps; mypy sees that each row of the table has a Message",
    "trainer/contract/plan/gpus.py": "names of data sheets",
    "agents/loss_doctor/prompts.py": "a prompt for a language model",
    "agents/recipe_scout/prompts.py": "a prompt for a language model",
    "factory/show/notifications/sending.py": "a process of its own that imports nothing of this project",
    "factory/show/pages/svg_charts.py": "drawings as SVG",
    "factory/status/metrics.py": "HELP lines of Prometheus' format",
    "factory/gates/patch/source_names.py": "lists of names that are looked for in source",
    "factory/gates/patch/matrix/cases.py": "a table of runs with their names",
}
SQL = re.compile(
    r"\s*(SELECT|INSERT|UPDATE|DELETE|CREATE|WHERE|PRAGMA|LEFT JOIN|JOIN|AND|OR|ORDER|ALTER|DROP|FROM|VACUUM|WITH|GROUP|SET TRANSACTION)\b|\(SELECT"
)
HELP = frozenset({"about", "help", "description", "epilog", "metavar", "short_help", "prompt", "usage"})
BUILTIN_ERRORS = frozenset(
    {
        "ValueError",
        "TypeError",
        "KeyError",
        "RuntimeError",
        "AssertionError",
        "NotImplementedError",
        "IndexError",
        "OSError",
    }
)  # what a bug causes, or what the caller turns into a coded error


# -- for tests ---------------------------------------------------------------------------------------------------------
def codes(said: Iterable[Any]) -> list[str]:
    """The codes of messages, in order; '' for text without one."""
    return [getattr(one, "code", "") or (one.get("code", "") if isinstance(one, dict) else "") for one in said]


def the(said: Iterable[Any], code: str) -> Any:
    """The only message with that code."""
    said = list(said)
    found = [one for one, its in zip(said, codes(said), strict=True) if its == code]
    assert len(found) == 1, f"{len(found)} messages with code {code!r} in {codes(said)}: {[str(one) for one in said]}"
    return found[0]


def tree(said: Any) -> list[Any]:
    """A message and all messages in its data, at any depth."""
    if isinstance(said, dict) and said.keys() >= {"code", "text"}:
        said = Message.from_json(said)
    if isinstance(said, list | tuple):
        return [part for one in said for part in tree(one)]
    return [said, *tree(list(said.data.values()))] if isinstance(said, Message) else []


def says(said: Any, expected: str | tuple[str, dict[str, Any]]) -> bool:
    """Does a message hold ``expected``: a short text, or (a code, at least this data) of the message or of one in its data?"""
    if isinstance(expected, str):
        return expected in str(said)
    code, data = expected
    return any(one.code == code and one.data.items() >= data.items() for one in tree(said))


@contextmanager
def refused(code: str, error: type[Exception] = CodedError, /, **data: Any) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The block raises an error with this code, and at least this data."""
    with pytest.raises(error) as found:
        yield found
    said = found.value
    assert getattr(said, "code", "") == code, f"{getattr(said, 'code', '')!r}, not {code!r}: {said}"
    shown = {name: said.data.get(name) for name in data}  # type: ignore[attr-defined]
    assert shown == data, f"{code}: {shown}, not {data}: {said}"


# -- what is said in the source ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Site:
    """A place that makes a message. ``data``: the names given; None: not known before it runs (``**data``)."""

    file: str
    line: int
    code: str
    template: str
    data: frozenset[str] | None

    @property
    def names(self) -> set[str]:
        return {name for _, name, _, _ in string.Formatter().parse(self.template) if name is not None}

    def wrong(self) -> list[str]:
        where = f"{self.file}:{self.line}: {self.code}"
        found = (
            []
            if CODE.fullmatch(self.code)
            else [f"{where}: a code is lower-case words with dots between: 'ingest.no_column'"]
        )
        if self.code.partition(".")[0] not in {*Path(self.file).parent.parts, Path(self.file).stem}:
            found.append(f"{where}: the code begins with the name of the file or of a folder above it")
        if not self.template.strip():
            found.append(f"{where}: a code without a text")
        try:
            names = self.names
        except ValueError as error:
            return [*found, f"{where}: {error}"]
        odd = sorted(name for name in names if not name.isidentifier())
        if odd:
            found.append(f"{where}: a template has plain names, not {odd}")
        if self.data is not None and (missing := names - self.data - set(odd)):
            found.append(f"{where}: no data for {sorted(missing)}")
        return found


@dataclass(frozen=True)
class Prose:
    """Text of several words that is not a message's template."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: a text without a code: {self.text[:110]!r}"


def files(*below: str) -> list[Path]:
    """The Python files below folders of the repository; of all packages when none is named."""
    found = [ROOT / one for one in below or ROOMS]
    return sorted(file for one in found for file in ([one] if one.is_file() else one.rglob("*.py")))


def sites_and_prose(paths: Iterable[Path]) -> tuple[list[Site], list[Prose]]:
    """Every message made in these files, and every other text of several words."""
    found = [read_source(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]
    return [site for sites, _ in found for site in sites], [text for _, texts in found for text in texts]


def read_source(name: str, source: str) -> tuple[list[Site], list[Prose]]:
    """The messages and the other texts of one file, which ``name`` places in the repository."""
    reader = _Reader(name)
    reader.visit(ast.parse(source))
    return reader.sites, [] if any(name.startswith(exempt) for exempt in NOT_MESSAGES) else reader.prose


class _Reader(ast.NodeVisitor):
    def __init__(self, file: str) -> None:
        self.file, self.sites, self.prose = file, list[Site](), list[Prose]()

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        first, second = ([*node.args, None, None])[:2]
        code, template = _constant(first), _constant(second)
        if (code is not None and CODE.fullmatch(code) and template is not None) or (
            called == "Message" and code is not None
        ):
            names = {word.arg for word in node.keywords}
            data = None if None in names else frozenset(name for name in names if name)
            self.sites.append(Site(self.file, node.lineno, code or "", template or "", data))
            for word in node.keywords:
                self.visit(word.value)
            return
        if called in BUILTIN_ERRORS or called == "select_fields":  # names of columns
            return
        for child in (node.func, *node.args, *(word.value for word in node.keywords if word.arg not in HELP)):
            if not (called == "Option" and isinstance(child, ast.Constant)):
                self.visit(child)

    def visit_Assert(self, node: ast.Assert) -> None:
        self.visit(node.test)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # else a docstring
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._text(node, "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values))
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.visit(part.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._text(node, node.value)

    def _text(self, node: ast.expr, text: str) -> None:
        words = re.findall(r"[A-Za-z]{2,}", text)
        if (
            len(text) >= LONG_CHARACTERS
            and len(words) >= LONG_WORDS
            and text.count(" ") >= LONG_WORDS - 1
            and not SQL.match(text)
        ):
            self.prose.append(Prose(self.file, node.lineno, text))


def _constant(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def wrong(sites: Iterable[Site]) -> list[str]:
    """Messages that break a rule: those of each alone, and codes with two texts."""
    found, places = list[str](), defaultdict[str, list[Site]](list)
    for site in sites:
        found += site.wrong()
        places[site.code].append(site)
    for code, known in places.items():
        if len(known) > 1:
            found.append(
                f"{code}: said at {len(known)} places ({', '.join(f'{one.file}:{one.line}' for one in known)}): make one function of it"
            )
    return found


if __name__ == "__main__":
    shown, rest = sites_and_prose(files(*sys.argv[1:]))
    print(*wrong(shown), *rest, sep="\n")
    print(f"{len(shown)} messages, {len(rest)} texts without a code")
