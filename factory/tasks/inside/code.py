"""Runs one program with its tests in the sandbox: ``python -I -S code.py FOLDER``. Imports nothing of the factory.

FOLDER/program.py and FOLDER/tests.py are run in one namespace. When both have ended without an exception the word of FOLDER/word is printed,
which is removed before the program runs: leaving early, by whatever exit, is not passing.
"""

from __future__ import annotations

import os
import sys


def main(folder: str) -> None:
    with open(os.path.join(folder, "word"), encoding="utf-8") as file:
        word = file.read()
    os.remove(os.path.join(folder, "word"))
    namespace = {"__name__": "__main__"}
    for name in ("program.py", "tests.py"):
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            source = file.read()
        exec(compile(source, name, "exec"), namespace)
    sys.stdout.flush()
    os.write(1, f"\n{word}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1])
