"""Compares formulas with math-verify in the sandbox: ``python -I maths.py FOLDER CPU_SECONDS``. Imports nothing of the factory.

FOLDER/pairs.json is a list of [right formula, model's formula] in TeX without decimals. FOLDER/equal.json gets "yes", "no" or "cpu" for each pair.
Each pair is compared in its own process, so a pair that hangs or attacks its process does not affect the others.

math-verify rounds, compares numbers to 15 digits and ignores case. Formulas that it calls equal must therefore also agree at random points to 100
digits, and equations must be the same up to a factor.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import resource
import sys
from typing import Any

DIGITS = 120
AGREE = 100
POINTS = 3


def main(folder: str, cpu_seconds: str) -> None:
    from math_verify import parse

    logging.disable(logging.CRITICAL)
    parse("$x+1$", parsing_timeout=None)  # loads the library once, before the forks
    with open(os.path.join(folder, "pairs.json"), encoding="utf-8") as file:
        pairs = json.load(file)
    found = [compare_in_child_process(gold, said, int(cpu_seconds)) for gold, said in pairs]
    with open(os.path.join(folder, "equal.json"), "w", encoding="utf-8") as file:
        json.dump(found, file)


def compare_in_child_process(gold: str, said: str, cpu_seconds: int) -> str:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
            os.write(write, b"1" if are_equal(gold, said) else b"0")
        except BaseException:  # noqa: BLE001 - any exception means: not equal
            os.write(write, b"0")
        finally:
            os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    said_so = os.read(read, 1)
    os.close(read)
    return "yes" if said_so == b"1" and status == 0 else "cpu" if os.WIFSIGNALED(status) else "no"


def are_equal(gold: str, said: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify

    letters = set(re.sub(r"\\[a-zA-Z]+", "", gold + said))
    if any(letter != letter.lower() and letter.lower() in letters for letter in letters):
        return False  # A and a are two letters, but the library ignores case
    one, other = (
        parse(
            f"${tex}$",
            [LatexExtractionConfig()],
            fallback_mode="no_fallback",
            parsing_timeout=None,
            raise_on_error=True,
        )
        for tex in (gold, said)
    )
    if len(one) != 1 or len(other) != 1 or not verify(one[0], other[0], timeout_seconds=None, raise_on_error=True):
        return False
    return are_numerically_equal(one[0], other[0])


def are_numerically_equal(one: Any, other: Any) -> bool:
    from sympy import Expr, MatrixBase
    from sympy.core.relational import Relational

    if isinstance(one, MatrixBase) and isinstance(other, MatrixBase):
        return one.shape == other.shape and all(are_numerically_equal(a, b) for a, b in zip(one, other))
    if isinstance(one, Relational) and isinstance(other, Relational):
        return is_same_relation(one, other)
    if isinstance(one, Expr) and isinstance(other, Expr):
        return bool(find_common_factor(one, other) == 1)
    return type(one) is type(other) and bool(one == other)


def is_same_relation(one: Any, other: Any) -> bool:
    from sympy import Eq, Ne

    if any(not (relation.lhs - relation.rhs).free_symbols for relation in (one, other)):
        return bool(one == other)  # neither x = x + 1 nor x = x + 2 has a solution
    if type(one) is type(other) is Eq or type(one) is type(other) is Ne:
        return find_common_factor(one.lhs - one.rhs, other.lhs - other.rhs) is not None
    below = [(r.lts - r.gts, r.rel_op in ("<", ">")) for r in (one, other) if hasattr(r, "lts")]
    if len(below) != 2 or below[0][1] != below[1][1]:
        return False
    by = find_common_factor(below[0][0], below[1][0])
    return by is not None and bool(by > 0)


def find_common_factor(one: Any, other: Any) -> Any:
    """The number c with ``one`` = c · ``other``, to 100 digits, at random points. None if there is no such number, or no point where both have
    a value."""
    from sympy import Abs, Float, Rational

    names = sorted(one.free_symbols | other.free_symbols, key=str)
    drawn = random.Random(0)
    found: list[Any] = []
    for _ in range(8 * POINTS if names else 1):
        point = {name: Rational(drawn.randint(1, 10**6), drawn.randint(1, 10**5)) for name in names}
        a, b = (side.doit().subs(point).evalf(DIGITS, maxn=600) for side in (one, other))
        if not (a.is_finite and b.is_finite):
            continue
        if b == 0 or a == 0:
            if names or a != b:
                return None
            return 1
        found.append((a / b).evalf(DIGITS))
        if len(found) == (POINTS if names else 1):
            break
    if not found or any(Abs(by - found[0]) > Abs(found[0]) * Float(10) ** -AGREE for by in found[1:]):
        return None
    return 1 if Abs(found[0] - 1) < Float(10) ** -AGREE else found[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
