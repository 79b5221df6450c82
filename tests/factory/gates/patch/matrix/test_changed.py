"""The search for unexecuted parts of a patch, instruction by instruction."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from factory.gates.patch.execution_recorder import RECORDER_FILE, ExecutedCode, ExecutionRecorder
from factory.gates.patch.matrix import unexecuted_code
from factory.gates.patch.matrix.unexecuted_code import find_unexecuted_parts


def run_watched(folder: Path, text: str, lines: set[int], call: str) -> ExecutedCode:
    """Run ``call`` against ``text``, as a run of the matrix would."""
    path = folder / "trainer" / "part.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    recorder = ExecutionRecorder(str(folder), {"trainer/part.py": sorted(lines)})
    names: dict[str, object] = {}
    recorder.watch.install()
    code, _ = recorder.watch.compile_watched(text, "trainer/part.py", lines, str(path))
    recorder.start()
    try:
        exec(code, names)
        eval(call, names)
    finally:
        recorder.stop()
    executed = ExecutedCode()
    executed.add_record(recorder.to_json())
    return executed


def parts(folder: Path, base: str, text: str, call: str) -> list[str]:
    """What of a change ``call`` does not execute, and conditions with one result."""
    base, text = dedent(base), dedent(text)
    executed = run_watched(folder, text, unexecuted_code.find_changed_lines(base, text), call)
    found = find_unexecuted_parts("trainer/part.py", base, text, executed)
    return [f"{part.line}: {part.source}" + f" was not {part.result}" * bool(part.result) for part in found]


BASE = """
    def rate(step):
        return 1.0
"""


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("def rate(step):\n    return 2.0\n", []),
        ("def rate(step):\n    return 0.5 if step > 100 else 1.0\n", ["2: 0.5"]),
        ("def rate(step):\n    return step > 100 and step // 2 or 1.0\n", ["2: step // 2"]),
        ("def rate(step):\n    if step > 100:\n        return 0.5\n    return 1.0\n", ["3: 0.5"]),
        ("def rate(step):\n    return 1.0\ndef other():\n    return 2\n", ["4: 2"]),
        ("def rate(step):\n    return max([1.0] + [s for s in range(step) if s > 100])\n", ["2: s"]),
        ("def rate(step):\n    assert step < 100, f'{step} is too late'\n    return 1.0\n", []),
        ("def rate(step):\n    assert step < 100\n    assert bool(step)\n    return 1.0\n", []),
        ("def rate(step):\n    if step > 100:\n        raise ValueError(f'{step} is too late')\n    return 1.0\n", []),
        ("def rate(step):\n    if step > 100:\n        raise ValueError(print('x'))\n    return 1.0\n", ["3: ValueError"]),
        ("def rate(step):\n    freeze = print\n    if step > 100:\n        raise freeze()\n    return 1.0\n", ["4: freeze"]),
        ("def rate(step):\n    return ((lambda x: x), (lambda x: x / 2))[step > 100](1.0)\n",
         ["2: x"]),
        ("def rate(step):\n    try:\n        return 1.0\n    finally:\n        step = 0\n", []),
        ("def rate(step):\n    try:\n        return 1.0\n    except ValueError:\n        return 0.0\n", ["4: ValueError", "5: 0.0"]),
        ("def rate(step):\n    with open('/dev/null'):\n        return 1.0\n", []),
        ("f = lambda x: x + 1\ndef rate(step):\n    return 1.0\n", ["1: x"]),
        ("def rate(step):\n    match step:\n        case 3:\n            return 1.0\n        case _:\n            return 2.0\n", ["6: 2.0"]),
    ],
)  # fmt: skip
def test_unexecuted_parts_are_named(tmp_path: Path, text: str, missing: list[str]) -> None:
    assert parts(tmp_path, BASE, text, "rate(3)") == missing


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("def rate(step):\n    return 1.0 + (step > 100)\n", ["2: step > 100 was not true"]),
        ("def rate(step):\n    return 1.0 * max(1, step)\n", ["2: max(1, step) was not 0"]),
        ("def rate(step):\n    if step < 100:\n        step = 1\n    return 1.0\n", ["2: step < 100 was not false"]),
        ("def rate(step):\n    if step > 100: step = 1\n    return 1.0\n", ["2: 1"]),
        ("def rate(step):\n    for n in range(3):\n        if n > 5:\n            continue\n    return 1.0\n", ["4: continue"]),
        ("def rate(step):\n    if step > 100 or rate.__name__ == 'x':\n        raise ValueError('a')\n    return 1.0\n", []),
        ("def rate(step):\n    match step:\n        case 3:\n            return 1.0\n",
         ["2: match step: case 3: return 1.0 was not unwatched"]),
    ],
)  # fmt: skip
def test_conditions_with_one_result_are_named(tmp_path: Path, text: str, missing: list[str]) -> None:
    assert parts(tmp_path, BASE, text, "rate(3)") == missing


OLD = """
def rate(step):
    if step > 100:
        raise ValueError("late")
    assert step < 200, "later"
    for n in range(3):
        if n > 5:
            break
    step = step * (step > 50)
    return 1.0
"""


@pytest.mark.parametrize(
    ("removed", "instead", "missing"),
    [
        ('    if step > 100:\n        raise ValueError("late")\n', "", ["4: ValueError"]),
        ('raise ValueError("late")', 'raise ValueError("too late")', []),
        ('    assert step < 200, "later"\n', "", ['5: assert step < 200, "later"']),
        ('"later"', '"too late"', []),
        ("        if n > 5:\n            break\n", "        n += 1\n", ["8: break"]),
        ("    step = step * (step > 50)\n", "", ["9: step > 50 was not true"]),
        ("    return 1.0\n", "    return 2.0\n", []),
    ],
)
def test_removed_lines_are_looked_up_in_the_runs_of_the_old_code(
    tmp_path: Path, removed: str, instead: str, missing: list[str]
) -> None:
    assert removed in OLD
    text = OLD.replace(removed, instead)
    executed = run_watched(tmp_path, OLD, unexecuted_code.find_changed_lines(text, OLD), "rate(3)")
    found = unexecuted_code.find_unexecuted_removals("trainer/part.py", OLD, text, executed)
    assert all(part.removed for part in found)
    assert [f"{part.line}: {part.source}" + f" was not {part.result}" * bool(part.result) for part in found] == missing


def test_unchanged_lines_need_no_execution(tmp_path: Path) -> None:
    base = "def rate(step):\n    return 0.5 if step > 100 else 1.0\n"
    assert parts(tmp_path, base, base + "\n\nTAIL = rate(1)\n", "rate(3)") == []


def test_a_line_that_moved_into_a_branch_must_be_executed(tmp_path: Path) -> None:
    """A line that moved into a branch is a changed line, though its words are the base's."""
    base = "def rate(step):\n    step = step * 2\n    return step\n"
    text = "def rate(step):\n    if step > 100:\n        step = step * 2\n    return step\n"
    assert parts(tmp_path, base, text, "rate(3)") == ["3: step"]


WORDS = """from trainer.contract.errors import RecipeError as Odd
from kernels.contract.files import write_atomically
import json as Plain
from math import Other
from typing import TYPE_CHECKING
"""


@pytest.mark.parametrize(
    ("code", "harmless"),
    [
        ("raise ValueError", True),
        ("raise ValueError()", True),
        ("raise ValueError('a', x, x.y, f'{x}: {x.y:>{x}}')", True),
        ("raise Odd('a') from x", True),
        ("raise", True),
        ("raise x.y", True),
        ("raise Odd(f'{x()}')", False),
        ("raise Odd(x[0])", False),
        ("raise Odd('a') from x()", False),
        ("raise Odd(words='a', x=x.y)", True),
        ("raise Odd(words=x())", False),
        ("raise Odd(**x)", False),
        ("raise Odd(*x)", False),
        ("raise Unknown('a')", False),
        ("raise write_atomically('a', x)", False),  # approved, but not an exception
        ("raise write_atomically(word='a', known=x)", False),
        ("raise Plain('a')", False),  # not imported from approved code
        ("raise Other('a')", False),
        ("raise x.Odd('a')", False),
        ("assert x, 'words'", True),
        ("assert x, f'{x.y}'", True),
        ("assert x, x()", False),
        ("if TYPE_CHECKING:\n        import os", True),
        ("if TYPE_CHECKING:\n        from a import b", True),
        ("if TYPE_CHECKING:\n        x()", False),
        ("if x:\n        import os", False),
        ("x()", False),
        *((f"raise {name}('a')\n    {bound}", False) for name, bound in [
            ("ValueError", "ValueError = x"), ("Odd", "def Odd(): pass"), ("Odd", "class Odd: pass"), ("Odd", "lambda Odd: 1"),
            ("Odd", "import Odd"), ("Odd", "from a import b as Odd"),
        ]),
    ],
)  # fmt: skip
def test_code_that_only_puts_words_together_need_not_be_executed(code: str, harmless: bool) -> None:
    tree = ast.parse(f"{WORDS}def f(x):\n    {code}\n")
    first, last = 7, 6 + len(code.splitlines())
    spans = [(begin[0], end[0]) for begin, end in unexecuted_code.find_exempt_spans(tree)]
    assert bool(spans) == harmless and all(first <= begin <= end <= last for begin, end in spans), spans


@pytest.mark.parametrize(
    ("base", "text", "lines"),
    [
        ("a\nb\nc\n", "a\nb\nc\n", set()),
        ("a\nb\nc\n", "a\nx\nc\n", {2}),
        ("a\nb\nc\n", "a\nc\n", set()),
        ("a\nb\n", "a\na\nb\n", {1}),
        ("", "a\nb\n", {1, 2}),
        ("a\nb\n", "b\na\n", {1}),
    ],
)
def test_changed_lines_are_found(base: str, text: str, lines: set[int]) -> None:
    assert unexecuted_code.find_changed_lines(base, text) == lines


COMPILED = """
    import torch

    @torch.compile(backend="eager")
    def double(x, large=False):
        if large:
            return x * 4
        return (x if x.shape[0] < 100 else x * 2) + x
"""


def test_traced_code_counts_as_executed(tmp_path: Path) -> None:
    """A process of its own: the recorder changes the compiler."""
    path = tmp_path / "trainer" / "part.py"
    path.parent.mkdir()
    path.write_text(dedent(COMPILED))
    script = (
        "import importlib.util, json, runpy, sys, torch\n"
        f"recorder = runpy.run_path({str(RECORDER_FILE)!r})['ExecutionRecorder']({str(tmp_path)!r}, {{'trainer/part.py': range(1, 99)}})\n"
        "recorder.watch_imports()\n"
        "recorder.watch_compiler()\n"
        "recorder.start()\n"
        "import importlib.util as imports\n"
        f"spec = imports.spec_from_file_location('part', {str(path)!r})\n"
        "part = imports.module_from_spec(spec)\n"
        "spec.loader.exec_module(part)\n"
        "double = part.double\n"
        "assert double(torch.ones(3)).tolist() == [2, 2, 2]\n"
        "recorder.stop()\n"
        "print(json.dumps(recorder.to_json()))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    executed = ExecutedCode()
    executed.add_record(json.loads(done.stdout))
    left = find_unexecuted_parts("trainer/part.py", "", path.read_text(), executed)
    assert [(part.line, part.source) for part in left] == [(7, "x"), (8, "x")]


def test_a_launched_kernel_counts_as_a_whole() -> None:
    text = "def kernel(x):\n    y = x + 1\n    return y\n"
    executed = ExecutedCode()
    assert [part.line for part in find_unexecuted_parts("kernels/part.py", "", text, executed)] == [1, 2, 3]
    executed.launched["kernels/part.py"] = {(1, 3)}
    assert find_unexecuted_parts("kernels/part.py", "", text, executed) == []
