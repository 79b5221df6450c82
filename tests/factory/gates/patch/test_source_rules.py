"""The findings in a patch's source with their lines, as a table, together with similar harmless code."""

from __future__ import annotations

import pytest

from factory.gates.patch.source_rules import find_source_problems
from factory.git.scope import FileChange
from kernels.contract.message import Message
from tests.support.gates.reasons import Expected, expect, tells

PYTHON = "import torch\n"
FOUND = {  # source, after PYTHON → the lines that are found, with a word of each finding
    "import json, os, math, sys\n": [(2, "imports os"), (2, "imports sys")],
    "from os.path import join\nfrom math import pi\n": [(2, "imports os")],
    "from torch import load, nn\nfrom torch import *\n": [(2, "torch.load"), (3, "all names")],
    "from torch.utils.cpp_extension import load\n": [(2, "torch.utils.cpp_extension.load")],
    "from .. import a\nfrom ..b import c\n": [(2, "'from ..'"), (3, "'from ..b'")],
    "import collections.abc\nfrom collections import _sys\n": [(3, "through collections._sys")],
    "import numpy.random\nimport numpy.ctypeslib\n": [(3, "numpy.ctypeslib")],
    "x = eval\ny = evaluate\n": [(2, "eval")],
    "def f(compile, id):\n    return compile(id), vars\n": [(3, "vars")],
    "id = 1\nprint(id, compile)\n": [(3, "compile")],
    "f(x=torch)\nf(torch.nn)\nf(torch.nn.Linear)\nf(torch.float32)\n": [(2, "the module torch")],
    "t = torch\nt.load\nt.relu\n": [(3, "torch.load")],
    "t = u = torch\nu.nn.functional.relu\nu.save\n": [(4, "torch.save")],
    "a, b = torch, 1\n": [(2, "uses the module torch")],
    "a[0] = torch\n": [(2, "uses the module torch")],
    "import torch.nn as n\nn.x = 1\n": [(3, "changes n.x")],
    "n = 1\nn = torch\nn.load\n": [(4, "torch.load")],
    "torch.x = 1\ndel torch.y\ntorch.z[0] = 1\ndel torch.w['a']\ntorch.v[0].u = 1\n": [(n, "changes torch") for n in (2, 3, 4, 5)],
    "x.y = 1\nx[0] = torch.z[0]\n": [],
    "x.__dict__\nx.__class__\nx.__class__.__name__\nx.os\nx._os\nx.oss\n": [(2, "__dict__"), (3, "__class__"), (5, "os"), (6, "_os")],
    "getattr(x, 'grad')\ngetattr(x, 'grad', 1)\nhasattr(torch, 'load')\nhasattr(x, name)\n": [(4, "torch.load")],
    "getattr(x, name)\ngetattr(x)\nread = getattr\n": [(n, "getattr") for n in (2, 3, 4)],
    "getattr(x, '__dict__')\ngetattr(x, '_os')\ngetattr(x, '__any__')\ngetattr(x, '__doc__')\ngetattr(x, '_any')\n": [
        (2, "__dict__"), (3, "_os"), (4, "__any__")],
    "setattr(torch, 'x', 1)\ndelattr(torch, 'x')\nsetattr(self, 'x', 1)\ngetattr(torch, 'x')\n": [(2, "torch.x"), (3, "torch.x")],
    "match x:\n    case A(fork=1, a=2, _os=3):\n        pass\n": [(3, "fork"), (3, "_os")],
    "try:\n    f()\nexcept:\n    pass\n": [(4, "every exception")],
    "try:\n    f()\nexcept (ValueError, a.Exception):\n    g()\n": [(4, "every exception")],
    "try:\n    f()\nexcept Exception:\n    g()\n    raise\n": [],
    "try:\n    f()\nexcept Exception:\n    raise\n    g()\n": [(4, "every exception")],
    "try:\n    f()\nexcept (ValueError, TypeError):\n    pass\n": [],
    "def fork():\n    pass\nasync def popen():\n    pass\ndef forks():\n    pass\n": [(2, "fork"), (4, "popen")],
    "class A(B, torch.Tensor): ...\nclass C(B, A): ...\nclass D: ...\nclass E(x.Parameter): ...\n": [(2, "tensor"), (5, "tensor")],
    "from torch import Tensor as T\nclass A(T): ...\n": [(3, "tensor")],
    "type(x)\ntype('A', (), {})\nx.type(1, 2)\ntype('A', ())\n": [(3, "class"), (5, "class")],
    "def f(x: 'eval(1)', y: 'int') -> 'open(2)':\n    z: \"list['exec(3)']\" = 0\n    return 'eval(4)'\n": [
        (2, "eval"), (2, "open"), (3, "exec")],
    "def f(x: 'not python ('):\n    return x\n": [],
    "def f(x: 'y = eval'):\n    return x\n": [],  # no expression: nobody evaluates it
    "from torch.hub import a\nfrom torch.nn.hub import b\nfrom torch import hubs\n": [(2, "uses torch.hub.a")],
    "import os.path as p, math\nimport math._os\n": [(2, "imports os"), (3, "through math._os")],
    "from numpy.random import seed\nimport numpy.random.seed.x\n": [(2, "numpy.random.seed"), (3, "numpy.random.seed.x")],
    "t = torch.nn\nt.hub\nu = t\nu.functional.relu\nf(u)\nx.u = torch\n": [(6, "uses the module torch.nn"), (7, "uses the module")],
    "setattr(torch.nn, 'x', 1)\nhasattr(y, 'os')\nf(torch, 'load')\n": [(2, "changes torch.nn.x"), (3, ".os"), (4, "uses the module")],
    "class A(torch.nn.Module): ...\nclass B(torch.nn.Buffer): ...\n": [(3, "tensor")],
    "try:\n    f()\nexcept BaseException:\n    pass\n": [(4, "every exception")],
    "try:\n    f()\nexcept a.b.Exception as e:\n    raise e\n": [],
    "from trainer.segment import os\nfrom trainer.a import _io as b\n": [(2, "through trainer.segment.os"), (3, "through trainer.a._io")],
    "import trainer.b.sys.c\nimport math.log\nimport json.decoder\n": [(2, "through trainer.b.sys.c")],
    "def f(x, y: int = 1):\n    return x + y\n": [],
}  # fmt: skip


def found(path: str, text: str, base: str | None = None) -> list[Message]:
    return find_source_problems(FileChange(path, text.encode()), None if base is None else base.encode())


@pytest.mark.parametrize("source", FOUND)
def test_findings_are_named_with_their_line(source: str) -> None:
    told = [problem.partition(", which")[0] for problem in found("kernels/a.py", PYTHON + source)]
    assert sorted(problem.split(":")[1] for problem in told) == sorted(f" line {line}" for line, _ in FOUND[source])
    assert all(any(f"line {line}: " in one and word in one for one in told) for line, word in FOUND[source]), told


def test_kernels_may_not_catch_runtime_errors_but_the_trainer_may() -> None:
    text = "try:\n    f()\nexcept RuntimeError:\n    pass\n"
    assert (
        len(found("kernels/a.py", text)) == 1
        and found("trainer/a.py", text) == found("trainer/kernels/a.py", text) == []
    )


@pytest.mark.parametrize(
    ("base", "count"),
    [
        (None, 2),
        ("", 2),
        ("import os\n", 1),  # each that was there excuses one, wherever it is
        ("x = 1\nimport os\nx = 2\nimport os\n", 0),
        ("import os\n" * 3, 0),
        ("import sys\n", 2),
        ("import os\nx = = 1\n", 2),
    ],
)
def test_only_new_findings_count(base: str | None, count: int) -> None:
    assert len(found("kernels/a.py", "import os\nimport os\n", base)) == count


def test_a_deleted_file_has_no_problem_and_a_file_that_is_not_python_has_one() -> None:
    assert find_source_problems(FileChange("kernels/a.py", None), b"import os\n") == []
    (problem,) = found("kernels/a.py", "import os\nx = = 1\n")
    assert tells([problem], expect("patch.not_python"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: {c: 2, d: 3}\nc: [1, {d: 1}, {d: 2}]\n", None),
        ("a: 1\nb: &x 2\n", expect("patch.yaml_tag", line=2)),
        ("a: 1\n\nb: *x\n", expect("patch.yaml_tag", line=3)),
        ("a: !x 1\n", expect("patch.yaml_tag", line=1)),
        ("a: {b: 1, c: 2, b: 3}\n", expect("patch.key_twice", key="b")),
        ("a: [1, {c: 1, c: 2}]\n", expect("patch.key_twice", key="c")),
        ("- 1\n", expect("patch.no_keys")),
        ("", expect("patch.no_keys")),
        ("a: [\n", expect("patch.not_yaml")),
    ],
)
def test_a_policy_is_plain_yaml(text: str, expected: Expected | None) -> None:
    told = found("policies/kernels.yaml", text)
    assert len(told) == bool(expected) and (expected is None or tells(told, expected)), told


NATIVE_FOUND: dict[str, list[tuple[int, str]]] = {  # C++ → the lines that are found, with a name of each finding
    '#include <cmath>\n#include <ATen/cpu/vec/vec.h>\n#include "numbers.h"\n#include <cuda_bf16.h>\n#include "own.cuh"\n': [],
    '#include <cstdio>\n#include "../x.h"\n#include MACRO\n#include </etc/passwd>\n#include <ATen/cpu/vec/../../x.h>\n': [
        (1, "cstdio"), (2, "../x.h"), (3, "MACRO"), (4, "/etc/passwd"), (5, "ATen/cpu/vec/../../x.h")],
    "// system, fork\n/* dlopen\nasm */ int x; // #include <cstdio>\nconst char *a = \"system\", *b = R\"(asm)\";\n": [],
    'int f() {\n  return system("x");\n}\n': [(2, "system")],
    "int f() {\n  sys\\\ntem();\n}\nvoid g() { asm(\"nop\"); }\n": [(2, "system"), (5, "asm")],
    "int a = std::thread::hardware_concurrency();\nint thread = 1, time = 2;\nauto b = std :: time(0);\n": [(1, "std::thread"), (3, "std::time")],
    "PyObject* p;\nPyRun x;\nPy_Initialize();\n": [(1, "PyObject"), (3, "Py_Initialize")],
    "#pragma once\n#pragma omp parallel for\n#pragma GCC optimize(\"fast-math\")\n# pragma unroll 4\n#line 3\n#embed <x>\n": [
        (3, 'pragma GCC optimize("fast-math")'), (5, "line 3"), (6, "embed <x>")],
    "%:include <cstdio>\nint \\u0061b;\n": [(1, "%:"), (2, "\\u0061")],
    "static int f(int a) { return a; }\nstatic const int K = 1;\nstatic constexpr float C[] = {1};\nstatic inline int g() { return 1; }\n": [],
    "int f() {\n  static int calls;\n  static float seen[4] = {};\n  return ++calls;\n}\n": [(2, "state"), (3, "state")],
    "__attribute__((constructor)) void f() {}\nthread_local int x;\n": [(1, "constructor"), (2, "thread_local")],
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), NATIVE_FOUND.items())
@pytest.mark.parametrize("suffix", ["cpp", "h", "cu", "cuh"])
def test_cpp_is_checked_line_by_line(text: str, expected: list[tuple[int, str]], suffix: str) -> None:
    found = [
        one.data["problem"] for one in find_source_problems(FileChange(f"kernels/a/a.{suffix}", text.encode()), None)
    ]
    assert all(one.code == "patch.native_line" for one in found)
    assert [(one.data["line"], one.data["problem"].data.get("name", "state")) for one in found] == sorted(expected)


def test_cpp_may_keep_what_the_base_has() -> None:
    base = b'#include <cstdio>\nint f() { return system("x"); }\n'
    assert find_source_problems(FileChange("kernels/a/a.cpp", base + b"int x;\n"), base) == []
    (one,) = find_source_problems(FileChange("kernels/a/a.cpp", base + b"int y = system(0);\n"), base)
    assert one.data["problem"].data["line"] == 3  # the base has one use, and the file has two


@pytest.mark.parametrize("option", ["-ffast-math", "-I/tmp", "-O2 -fplugin=x", "@file"])
def test_cpp_may_name_only_options_of_the_list(option: str) -> None:
    (one,) = find_source_problems(FileChange("kernels/a/a.cpp", f"// compile with: {option}\n".encode()), None)
    assert (
        one.data["problem"].code == "patch.compile_option" and "-funroll-loops" in one.data["problem"].data["allowed"]
    )
    allowed = " ".join(one.data["problem"].data["allowed"])
    assert find_source_problems(FileChange("kernels/a/a.cpp", f"// compile with: {allowed}\n".encode()), None) == []
