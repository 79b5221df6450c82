"""Runs one program with its tests in the sandbox, as Python runs a file: ``python -I -S code.py FOLDER PACKAGES…``. Imports nothing of the factory.

FOLDER/program.py and then FOLDER/tests.py are run in one module ``__main__`` that is in ``sys.modules``, whose file is the program, compiled without
the flags of this file, with the interpreter's packages. When both have ended as a right file ends (without an exception, or the tests by
``sys.exit(0)``, as ``unittest.main()`` ends) the word of FOLDER/word is printed, which is removed before the program runs: leaving early, by
whatever exit, is not passing.
"""

from __future__ import annotations

import os
import site
import sys
import types


def main(folder: str, *packages: str) -> None:
    with open(os.path.join(folder, "word"), encoding="utf-8") as file:
        word = file.read()
    os.remove(os.path.join(folder, "word"))
    program, tests = os.path.join(folder, "program.py"), os.path.join(folder, "tests.py")
    sys.path[:] = [folder, *(path for path in sys.path[1:] if path), *packages]
    sys.argv[:] = [program]
    site.setquit()  # exit and quit, which every program has, without what else site does
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=program, __builtins__=__builtins__, __annotations__={})
    sys.modules["__main__"] = module
    for path in (program, tests):
        with open(path, "rb") as source:
            code = compile(source.read(), path, "exec", dont_inherit=True)
        try:
            exec(code, module.__dict__)
        except SystemExit as left:
            # By the tests, on no way through the program: one that exits in a call has not passed it.
            if left.code not in (None, 0) or path == program or program in files(left.__traceback__):
                raise
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os.write(1, f"\n{word}\n".encode())
    os._exit(0)  # what was left to run at the end comes after the tests; its output must not stand behind the word


def files(traceback: types.TracebackType | None) -> set[str]:
    """Of the code that an exception came through."""
    found = set()
    while traceback is not None:
        found.add(traceback.tb_frame.f_code.co_filename)
        traceback = traceback.tb_next
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
