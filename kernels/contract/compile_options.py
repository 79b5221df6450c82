"""The options that a C++ file of an op may add to the compiler's own: a fixed list, which no patch can change.

A file names its options in a comment of its own line, ``// compile with: -funroll-loops -fno-math-errno``. ``kernels.native`` passes them to the
compiler, and the patch gate refuses any other. An option that changes the floating-point state of the whole process (``-ffast-math``) is not here.
"""

from __future__ import annotations

import re

from kernels.contract.op import KernelError

OPTIONS = (
    "-O2", "-O3", "-fassociative-math", "-ffp-contract=fast", "-fno-math-errno", "-fno-signed-zeros", "-fno-trapping-math", "-fno-tree-vectorize",
    "-fprefetch-loop-arrays", "-freciprocal-math", "-funroll-loops", "-fvect-cost-model=unlimited", "-mprefer-vector-width=256",
    "-mprefer-vector-width=512",
)  # fmt: skip
LINE = re.compile(r"^\s*// compile with:(.*)$", re.MULTILINE)


def read_compile_options(text: str) -> list[str]:
    """The options that a C++ file names, in order. Raises: KernelError for an option that is not allowed.

    >>> read_compile_options("// An op.\\n// compile with: -funroll-loops -O2\\nint x;\\n")
    ['-funroll-loops', '-O2']
    """
    found = [option for line in LINE.findall(text) for option in line.split()]
    if unknown := [option for option in found if option not in OPTIONS]:
        raise KernelError(
            "kernels.compile_option",
            "the option {option!r} may not be passed to the C++ compiler. Allowed are: {allowed}.",
            option=unknown[0],
            allowed=list(OPTIONS),
        )
    return found
