"""Compiles the C++ of an op at its first use, for the processor of this machine, and caches the libraries.

torch.compile has a loader for C++ too, but it imports torch's compiler and probes the processor in each process. That takes three to five seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.contract.compile_options import OPTIONS, list_compile_options
from kernels.contract.message import Message
from kernels.contract.op import KernelError, Shape

HEADERS = Path(__file__).parent
SOURCES = HEADERS.parent  # <op>/<op>.cpp, <op>/<file>.cpp
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}  # dtype → suffix of the names of C++ functions
OUT_OF_MEMORY, FAILED = -1, -2  # in_parallel.h
FLAGS = ("-O3", "-DNDEBUG", "-std=c++20", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared", "-w")
LIBRARIES = ("-ltorch", "-ltorch_cpu", "-lc10", "-lgomp")


def define_cpu_op(name: str) -> Callable[[Callable[..., Any]], torch.library.CustomOpDef]:
    """Like ``torch.library.custom_op``, for a function of CPU tensors that changes none of them.

    The dispatcher calls the function directly. torch's wrapper would import the compiler at the first call, which takes a second in a trainer that
    compiles nothing.
    """

    def define(function: Callable[..., Any]) -> torch.library.CustomOpDef:
        made = torch.library.custom_op(name, function, mutates_args=())
        torch.library.impl(name, "cpu", function)
        return made

    return define


@functools.cache
def load_library(name: str) -> ctypes.CDLL:
    """The shared library of ``<name>/<name>.cpp``, or of ``<op>/<file>.cpp`` for the name ``<op>/<file>``. The file may name more options of the
    compiler (``kernels.contract.compile_options``). Calls of the library's functions release Python's global lock.

    Raises: KernelError if there is no C++ compiler, if it fails, if an option is not allowed, or if the library cannot be loaded.
    """
    op, _, file = name.partition("/")
    text = (SOURCES / op / f"{file or op}.cpp").read_text(encoding="utf-8")
    headers = [*sorted((SOURCES / op).glob("*.h")), *sorted(HEADERS.glob("*.h"))]
    for header in headers:  # headers are inserted into the text, so that the key depends on them
        text = text.replace(f'#include "{header.name}"', header.read_text(encoding="utf-8").replace("#pragma once", ""))
    options = list_compile_options(text)
    if unknown := [option for option in options if option not in OPTIONS]:
        raise KernelError(
            "kernels.compile_option",
            "{file} may not pass the option {option!r} to the C++ compiler. Allowed are: {allowed}.",
            file=f"{name}.cpp",
            option=unknown[0],
            allowed=list(OPTIONS),
        )
    compiler_arguments = [*list_compiler_arguments(), *options]
    key = hashlib.sha256(
        "\0".join((text, *compiler_arguments, torch.__version__, read_processor_features())).encode()
    ).hexdigest()
    target = find_cache_folder() / f"{name.replace('/', '.')}-{key[:32]}.so"
    if not target.exists():
        with _alone(target.parent):
            if not target.exists():
                compile_library(target, text, compiler_arguments)
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise KernelError(
            "kernels.unloadable",
            "the compiled library {file} cannot be loaded: {problem}",
            file=str(target),
            problem=str(error),
        ) from error


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Within this context the other ranks on this machine wait. If the folder cannot be locked, each rank compiles."""
    lock = None
    try:
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        if lock is not None:
            os.close(lock)


def list_compiler_arguments() -> list[str]:
    """The arguments of the compiler, except input and output. They select the vector instructions that torch itself uses on this machine."""
    torch_folder = Path(torch.__file__).parent
    vectors = torch.backends.cpu.get_cpu_capability()
    vectors = vectors if vectors in ("AVX2", "AVX512") else "DEFAULT"
    narrow = ("-mno-avx512f",) if vectors == "AVX2" else ()
    defined = (f"-DCPU_CAPABILITY={vectors}", f"-DCPU_CAPABILITY_{vectors}", "-DC10_USING_CUSTOM_GENERATED_MACROS")
    included = (f"-I{torch_folder / 'include'}", f"-I{torch_folder / 'include/torch/csrc/api/include'}")
    return [*FLAGS, *narrow, *defined, *included, f"-L{torch_folder / 'lib'}", *LIBRARIES]


def read_processor_features() -> str:
    """The lines of /proc/cpuinfo on which the result of ``-march=native`` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}))


def find_cache_folder() -> Path:
    """The folder of compiled libraries. It is in TORCHINDUCTOR_CACHE_DIR if that is set, else in the user's cache. It is a temporary folder if that
    place cannot be written."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(given).expanduser() / "factory-kernels"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    return _own_folder()


@functools.cache
def _own_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="factory-kernels-"))


def compile_library(target: Path, text: str, compiler_arguments: list[str]) -> None:
    """Compile ``text`` in a temporary folder and rename the library to ``target``, so that two processes may compile at once. Raises: KernelError."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise KernelError(
            "kernels.no_compiler",
            "No C++ compiler is installed. Install g++ with your system's package manager, "
            "or choose other implementations in kernels.yaml.",
        )
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".compiling-") as folder:
        source, made = Path(folder) / "source.cpp", Path(folder) / "made.so"
        source.write_text(text, encoding="utf-8")
        try:
            done = subprocess.run(
                [compiler, str(source), "-o", str(made), *compiler_arguments],
                capture_output=True,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise KernelError(
                "kernels.no_start",
                "{compiler} could not be started: {problem}",
                compiler=compiler,
                problem=error.strerror,
            ) from error
        if done.returncode:
            raise KernelError(
                "kernels.not_compiled",
                "{compiler} could not compile {file}: {output}",
                compiler=compiler,
                file=target.name,
                output=done.stderr.strip()[-2000:],
            )
        os.replace(made, target)


def call_cpp_function(name: str, function: str, *arguments: Tensor | int | float) -> int:
    """Call a function of the library ``load_library(name)``. Tensors are passed as addresses, numbers as int64 or float. The number of threads is
    passed last.

    Returns its result. Raises: MemoryError or RuntimeError if the result is one of the error codes.
    """
    passed = [
        ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else ctypes.c_float(x) if isinstance(x, float) else x
        for x in (*arguments, torch.get_num_threads())
    ]
    found = getattr(load_library(name), function)
    found.restype = ctypes.c_int64
    code = int(found(*(ctypes.c_int64(x) if isinstance(x, int) else x for x in passed)))
    if code == OUT_OF_MEMORY:
        raise MemoryError(
            Message(
                "kernels.no_memory",
                "the C++ function {function} has too little memory for its scratch space",
                function=function,
            )
        )
    if code == FAILED:
        raise RuntimeError(f"{function}: the CPU refused the product")
    return code


def make_fallback_for_other_dtypes(fallback_name: str) -> Callable[[Shape, torch.dtype], str]:
    """A function for ``Implementation.fallback``. The C++ computes in the dtypes of ``NAMES``. ``fallback_name`` computes in all others."""

    def say(shape: Shape, dtype: torch.dtype) -> str:
        if dtype in NAMES:
            return ""
        why = Message("kernels.cpp_dtype", "the C++ kernel computes in fp32 and bf16, not in {dtype}", dtype=str(dtype))
        return f"{fallback_name}: {why}"

    return say


def view_as_rows(x_XD: Tensor) -> Tensor:
    """x as [N, D] with a dense last dimension. It is a view if a constant stride leads from row to row, else a copy."""
    x_ND = x_XD.reshape(x_XD.shape[:-1].numel(), x_XD.shape[-1])
    return x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()
