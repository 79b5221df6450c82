"""Docstrings are true: each example is executed and its output compared, and a name in double backticks exists."""

from __future__ import annotations

import ast
import builtins
import doctest
import importlib
import keyword
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("agents", "factory", "kernels", "models", "trainer")
    for path in (ROOT / folder).rglob("*.py")
    if "    >>> " in path.read_text("utf-8")
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_give_what_the_docstring_shows(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0 and found.failed == 0


def test_the_modules_of_training_data_have_worked_examples() -> None:
    """These modules change the form of data: a chat's mask, packing, the data order, a batch with its loss weights."""
    changing_form = {f"trainer.contract.data.{name}" for name in ("token_shard", "packing", "data_order")}
    assert changing_form | {"trainer.batch"} <= set(WITH_EXAMPLES)


FOLDERS = ("agents", "factory", "kernels", "models", "trainer", "benchmarks")
# Names of other projects and of published files, which the code itself does not use.
FOREIGN = frozenset(
    {
        "DatasetDict", "Glm4Moe", "Repo", "Rowan", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "__del__", "_addmm_dtype_out_cuda", "_sys",
        "Easy", "Test", "ai2_arc", "allenai", "anatomy_test", "hellaswag_val", "cais", "completion_only_loss", "dataset_info", "hermes", "load_model",
        "openai_humaneval", "sanitized",
        "tensorwise", "_000",
    }
)  # fmt: skip


def docstrings_of(tree: ast.AST) -> Iterator[tuple[str, ast.Constant]]:
    """Each docstring with the name of what it describes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield getattr(node, "name", "module"), first.value


def words_of(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", text))


@cache
def known_words() -> frozenset[str]:
    """Every word of the code outside docstrings and comments, of the policies, of templates and C++, and of file names."""
    known = {*dir(builtins), *keyword.kwlist, *FOREIGN}
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        docstrings = {id(constant) for _, constant in docstrings_of(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                known |= words_of(node.value)
            for field in ("id", "attr", "name", "arg", "asname", "module"):
                if isinstance(word := getattr(node, field, None), str):
                    known |= words_of(word)
    for folder in (*FOLDERS, "policies", "tests"):
        for path in (ROOT / folder).rglob("*"):
            known |= words_of(path.stem)
            if path.suffix in (".yaml", ".jinja", ".jinja2", ".cpp"):
                known |= words_of(path.read_text("utf-8"))
    return frozenset(known)


def unknown_names(docstring: str) -> Iterable[str]:
    """The names in double backticks that occur nowhere in the code. A command, a formula and text with spaces are not names.

    >>> list(unknown_names("``known_words`` reads ``lost_name.py``; ``factory run`` is a command."))
    ['lost_name.py']
    """
    for span in re.findall(r"``([\w./-]+(?:\(.*?\))?)``", docstring):
        if any(len(word) > 3 and word not in known_words() for word in words_of(span)):
            yield span


def test_docstrings_name_only_what_exists() -> None:
    """A rename that misses a docstring leaves a name that no code has."""
    wrong = [
        f"{path.relative_to(ROOT)}, {name}: {span}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name, constant in docstrings_of(ast.parse(path.read_text("utf-8")))
        for span in unknown_names(str(constant.value))
    ]
    assert wrong == []


def test_a_name_that_no_code_has_is_reported() -> None:
    assert list(unknown_names("``find_lost_words`` calls ``read_tokens()`` of ``no_such_module.py``")) == [
        "find_lost_words", "read_tokens()", "no_such_module.py",
    ]  # fmt: skip
    assert (
        list(unknown_names("``ast.Module``, ``policies/recipes/tiny.yaml``, ``factory run --once``, ``a / b``")) == []
    )


def test_a_package_lists_only_modules_and_folders_that_exist() -> None:
    """A line of a package's docstring that begins with a name and two spaces describes a module or folder of the package."""
    wrong = []
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py")):
        for line in (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").splitlines():
            listed = re.match(r" {0,6}`{0,2}([a-z_/]+)`{0,2} {2,}\S", line)
            there = listed and any((path.parent / f"{listed[1]}{end}").exists() for end in ("", ".py"))
            if listed and not there and path.parent.name != "corpus":  # the corpus lists its domains
                wrong.append(f"{path.relative_to(ROOT)}: {listed[1]}")
    assert wrong == []
