"""Checks the C++ and CUDA C++ of a patch for code that an op does not need. Nothing is compiled here: only the sandbox compiles a candidate's code.

As for Python, the checks find honest mistakes, and the sandbox is the wall. A file may include headers for arithmetic, and headers of ``kernels/``.
It may not newly name files, processes, clocks, the loader, assembler or Python, and it keeps no state between calls. What the base has already is
no problem. Compiler options are those of ``kernels.contract.compile_options``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from kernels.contract.compile_options import OPTIONS, list_compile_options
from kernels.contract.message import Message

NATIVE_SUFFIXES = (".cpp", ".h", ".cu", ".cuh")
STANDARD_HEADERS = (
    "algorithm,array,atomic,bit,cfloat,climits,cmath,complex,concepts,cstddef,cstdint,cstring,functional,initializer_list,iterator,"
    "limits,memory,new,numeric,optional,span,tuple,type_traits,utility,vector,arm_neon.h,immintrin.h,omp.h"
)
TORCH_HEADERS = (
    "ATen/Parallel.h,ATen/OpMathType.h,ATen/core/ATen_fwd.h,ATen/native/CPUBlas.h,c10/macros/Macros.h,c10/util/BFloat16.h,"
    "c10/util/Half.h"
)
CUDA_HEADERS = "cooperative_groups.h,cuda_bf16.h,cuda_fp16.h,cuda_fp8.h,cuda_runtime.h,mma.h"
HEADERS = frozenset(f"{STANDARD_HEADERS},{TORCH_HEADERS},{CUDA_HEADERS}".split(","))
HEADER_FOLDER = "ATen/cpu/vec/"
DIRECTIVES = {"include", "define", "undef", "if", "ifdef", "ifndef", "elif", "else", "endif", "pragma", "error"}
PRAGMAS = {"once", "omp", "unroll"}
PROCESSES = (
    "system,popen,fork,vfork,clone,posix_spawn,posix_spawnp,execl,execle,execlp,execv,execve,execvp,execvpe,kill,raise,sigaction,"
    "exit,_exit,quick_exit,abort,atexit,at_quick_exit,setjmp,longjmp,pthread_create,ptrace,getpid"
)
FILES = (
    "fopen,freopen,fdopen,open,openat,creat,ifstream,ofstream,fstream,filesystem,unlink,rename,mmap,mprotect,munmap,socket,connect,"
    "getenv,secure_getenv,setenv,putenv,environ,syscall"
)
CLOCKS = "clock,clock_gettime,gettimeofday,chrono,__rdtsc,_rdtsc,__rdtscp,clock64,globaltimer,rand,srand,random_device"
LOADER = (
    "asm,__asm,__asm__,dlopen,dlsym,dlmopen,dladdr,constructor,destructor,ifunc,weak,alias,thread_local,__builtin_return_address,"
    "__builtin_frame_address,_Pragma,__has_include,__has_embed"
)
FORBIDDEN = frozenset(f"{PROCESSES},{FILES},{CLOCKS},{LOADER}".split(","))
IN_STD = re.compile(r"\bstd\s*::\s*(thread|jthread|async|time|signal)\b")
HIDDEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"([^()\s\\]{0,16})\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9A-Za-z_])\'(?:\\.|[^\'\\\n])+\'',
    re.DOTALL,
)
WORD = re.compile(r"[A-Za-z_]\w*")
DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(\w*)[^\n]*$", re.MULTILINE)
ODD_SPELLING = re.compile(r"%:|\?\?=|<%|<:|\\u[0-9A-Fa-f]{4}|\\U[0-9A-Fa-f]{8}")
MUTABLE_STATIC = re.compile(
    r"\bstatic\b(?!\s+(?:const|constexpr|constinit\s+const|inline\s+const)\b)([^;={(]*)([;={(])"
)


def find_native_problems(text: str, base: str) -> Iterator[Message]:
    """Yield the problems of a C++ file. ``base``: the file before the patch, or ''."""
    before = Counter(what for _, what in _reaches(base))
    for line, what in _reaches(text):
        if before[what] > 0:
            before[what] -= 1
        else:
            yield Message(
                "patch.native_line", "line {line}: {problem}, which a patch may not do", line=line, problem=what
            )
    if not set(list_compile_options(text)) <= set(OPTIONS):
        yield Message(
            "patch.compile_option",
            "a line 'compile with:' may name only these options: {allowed}",
            allowed=list(OPTIONS),
        )


def _reaches(text: str) -> Iterator[tuple[int, Message]]:
    """Yield (line, problem) for everything that a patch may not add. The same problem has the same message at every line of a file."""
    joined = _join_lines(text)
    line_at = lambda place: joined.count("\n", 0, place) + 1
    hidden = HIDDEN.sub(_blank, joined)
    for found in ODD_SPELLING.finditer(hidden):
        yield (
            line_at(found.start()),
            Message("patch.native_spelling", "the code spells a character as {name}", name=found[0]),
        )
    for found in DIRECTIVE.finditer(hidden):
        rest = joined[found.end(1) : found.end()].strip()  # the name of a header is hidden as a text
        if problem := _find_directive_problem(found[1], rest):
            yield line_at(found.start()), problem
    uses = [
        (found.start(), found[0])
        for found in WORD.finditer(hidden)
        if found[0] in FORBIDDEN or found[0].startswith(("Py_", "PyObject", "PyEval"))
    ]
    uses += [(found.start(), f"std::{found[1]}") for found in IN_STD.finditer(hidden)]
    for place, name in uses:
        yield line_at(place), Message("patch.native_uses", "the code uses {name}", name=name)
    for found in MUTABLE_STATIC.finditer(hidden):
        if found[2] != "(":
            yield (
                line_at(found.start()),
                Message("patch.native_state", "the code keeps a static variable between calls"),
            )


def _find_directive_problem(name: str, rest: str) -> Message | None:
    if name == "include":
        given = re.match(r'(?:<([^<>\s]+)>|"([^"\s]+)")', rest)
        system, own = given.groups() if given else ("", "")
        if own and re.fullmatch(r"\w+\.(h|cuh)", own):
            return None
        if system and (system in HEADERS or system.startswith(HEADER_FOLDER) and ".." not in system):
            return None
        return Message("patch.native_includes", "the code includes {name}", name=(system or own or rest.strip())[:80])
    if name and (
        name not in DIRECTIVES or name == "pragma" and rest.split(maxsplit=1)[:1] and rest.split()[0] not in PRAGMAS
    ):
        return Message(
            "patch.native_directive", "the code has the directive #{name}", name=f"{name} {rest.strip()}"[:80]
        )
    return None


def _join_lines(text: str) -> str:
    r"""Join lines that end with a backslash, as the compiler does. The newlines follow after the joined line, so that later lines keep their numbers.

    >>> _join_lines("a\\\nb\nc")
    'ab\n\nc'
    """
    return re.sub(r"(?:[^\n]*\\\n)+[^\n]*\n?", lambda found: _joined(found[0]), text)


def _joined(lines: str) -> str:
    return lines.replace("\\\n", "").rstrip("\n") + "\n" * lines.count("\n")


def _blank(found: re.Match[str]) -> str:
    """Spaces in place of a comment or a text, with its newlines."""
    return re.sub(r"[^\n]", " ", found[0])
