"""Every function of the trainer, the kernels and the line profiler with a part that only a GPU runs is in the table of docs/GPU.md.

No line of such a part runs in these tests, so the table says of each what covers it instead. A part is found by what decides that it
runs: ``torch.cuda``, ``.is_cuda``, a comparison with ``"cuda"`` or ``"cpu"``, ``devices=("cuda",)`` of an implementation, ``needs_triton``
or ``make_triton_implementation``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

WHERE = ("trainer", "models", "kernels", "agents/line_profiler")
DEVICES = {"cuda", "cpu"}
TABLE = ROOT / "docs" / "GPU.md"
TITLE = "## Code that only a GPU runs, and what covers it"
COVERS = (
    "interpreter",
    "ahead of time",
    "fake tensors",
    "pytest -m gpu",
    "benchmarks.gpu",
    "tests",
    "read",
)  # what a row of the table may name first; 'tests': with stand-ins for what torch.cuda would answer; 'read': by eye alone


def parts(source: str, module: str) -> set[str]:
    """'module:function', 'module:Class.method' or 'module:NAME' of each definition at the top of a file that has such a part."""
    found = set()
    for name, node in definitions(ast.parse(source)):
        if any(decides(one) for one in ast.walk(node)):
            found.add(f"{module}:{name}")
    return found


def definitions(tree: ast.Module | ast.ClassDef, within: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from definitions(node, f"{within}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{within}{node.name}", node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield f"{within}{ast.unparse(target)}", node
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            yield f"{within}(module)", node


def decides(node: ast.AST) -> bool:
    """True if something here depends on whether there is a GPU, or on the device of a tensor."""
    if isinstance(node, ast.Attribute):
        of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr == "cuda"
        return of_torch or node.attr in ("is_cuda", "needs_triton")
    if isinstance(node, ast.Compare):
        return any(isinstance(side, ast.Constant) and side.value in DEVICES for side in (node.left, *node.comparators))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "make_triton_implementation":
        return True
    if isinstance(node, ast.keyword):
        cuda_alone = node.arg == "devices" and isinstance(node.value, ast.Tuple) and "cuda" in ast.unparse(node.value)
        return cuda_alone and "cpu" not in ast.unparse(node.value) or node.arg == "needs_triton"
    return False


def rows(text: str) -> dict[str, str]:
    """The rows of the table: part → how it is covered."""
    table = text.partition(TITLE)[2].partition("\n#")[0]
    found = re.findall(r"^\| `([^`]+)` \| (.+?) \|$", table, re.MULTILINE)
    assert len({name for name, _ in found}) == len(found), "docs/GPU.md names a function twice"
    return dict(found)


def in_code() -> set[str]:
    found = set()
    for folder in WHERE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found |= parts(path.read_text(encoding="utf-8"), module)
    return found


def test_the_table_has_every_part_that_only_a_gpu_runs_and_no_other() -> None:
    written, found = rows(TABLE.read_text(encoding="utf-8")), in_code()
    if gone := ", ".join(sorted(written.keys() - found)):
        pytest.fail(
            f"docs/GPU.md, '{TITLE}': nothing in these depends on a GPU any more, take them out: {gone}", pytrace=False
        )
    if missing := "\n".join(f"| `{name}` | read |" for name in sorted(found - written.keys())):
        pytest.fail(
            f"docs/GPU.md, '{TITLE}': these rows are missing; say in the second column what covers each ({', '.join(COVERS)}):\n{missing}",
            pytrace=False,
        )


def test_each_row_says_what_covers_it() -> None:
    wrong = [name for name, how in rows(TABLE.read_text(encoding="utf-8")).items() if not how.startswith(COVERS)]
    assert not wrong, f"docs/GPU.md: the second column begins with one of {', '.join(COVERS)}: {', '.join(wrong)}"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def f(x):\n    return x.is_cuda", {"m:f"}),
        ("def f(x):\n    if x.device.type == 'cuda':\n        x.sync()", {"m:f"}),
        ("def f(x):\n    return 1 if x.type != 'cpu' else 2", {"m:f"}),
        ("def f():\n    torch.cuda.synchronize()", {"m:f"}),
        ("class A:\n    def g(self):\n        def h():\n            return torch.cuda.is_available()", {"m:A.g"}),
        ("FAST = Implementation('fast', f, '', devices=('cuda',))", {"m:FAST"}),
        ("ANY = Implementation('any', f, '', devices=('cpu', 'cuda'))", set()),
        ("T = Implementation('triton', f, '', needs_triton=True)", {"m:T"}),
        ("T = make_triton_implementation('kernels.op.triton', 'op')", {"m:T"}),
        ("if torch.cuda.is_available():\n    x = 1", {"m:(module)"}),
        ("def f():\n    'runs on \"cuda\"'\n    return name('cuda'), other.cuda", set()),
    ],
)
def test_parts_finds_code_that_only_a_gpu_runs(text: str, names: set[str]) -> None:
    assert parts(text, "m") == names


def test_the_failure_prints_a_missing_row_ready_to_paste(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, *others = sorted(in_code())
    table = tmp_path / "GPU.md"
    table.write_text(
        f"{TITLE}\n| part | covered by |\n|---|---|\n" + "".join(f"| `{name}` | read |\n" for name in others)
    )
    monkeypatch.setitem(globals(), "TABLE", table)
    with pytest.raises(pytest.fail.Exception, match=rf"\n\| `{re.escape(first)}` \| read \|$"):
        test_the_table_has_every_part_that_only_a_gpu_runs_and_no_other()
    table.write_text(table.read_text() + f"| `{first}` | read |\n| `kernels.gone:f` | read |\n")
    with pytest.raises(pytest.fail.Exception, match="take them out: kernels.gone:f"):
        test_the_table_has_every_part_that_only_a_gpu_runs_and_no_other()
