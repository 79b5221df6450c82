"""The options that a C++ file of an op may add to the compiler's own: a fixed list, which no patch can change.

A file names its options in a comment of its own line, ``// compile with: -funroll-loops -fno-math-errno``. ``kernels.native`` passes them to the
compiler, and the patch gate refuses any other. An option that changes the floating-point state of the whole process is not in the list.
"""

from __future__ import annotations

import re

OPTIONS = (
    "-O2", "-O3", "-fassociative-math", "-ffp-contract=fast", "-fno-math-errno", "-fno-signed-zeros", "-fno-trapping-math", "-fno-tree-vectorize",
    "-fprefetch-loop-arrays", "-freciprocal-math", "-funroll-loops", "-fvect-cost-model=unlimited", "-mprefer-vector-width=256",
    "-mprefer-vector-width=512",
)  # fmt: skip
LINE = re.compile(r"^\s*// compile with:(.*)$", re.MULTILINE)


def list_compile_options(text: str) -> list[str]:
    """The options that a C++ file names, in order, allowed or not.

    >>> list_compile_options("// An op.\\n// compile with: -funroll-loops -O2\\nint x;\\n")
    ['-funroll-loops', '-O2']
    """
    return [option for line in LINE.findall(text) for option in line.split()]
