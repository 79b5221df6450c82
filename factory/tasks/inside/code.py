"""Runs a program with its tests in the sandbox: ``python -I -S code.py FOLDER PACKAGES…``. Imports nothing of the factory.

FOLDER/program.py and then FOLDER/tests.py run in one module ``__main__``, as Python would run a file, with the packages of PACKAGES. If both end
without an exception (tests may also end with ``sys.exit(0)``, like ``unittest.main()``), the secret word of FOLDER/word is printed. The word is
read and removed before the program runs, so a program that exits early cannot pass.
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
    site.setquit()  # defines exit and quit, without the other effects of module site
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=program, __builtins__=__builtins__, __annotations__={})
    sys.modules["__main__"] = module
    for path in (program, tests):
        with open(path, "rb") as source:
            code = compile(source.read(), path, "exec", dont_inherit=True)
        try:
            exec(code, module.__dict__)
        except SystemExit as left:
            # Only the tests may exit. A program that exits when the tests call it has not passed.
            if left.code not in (None, 0) or path == program or program in list_traceback_files(left.__traceback__):
                raise
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os.write(1, f"\n{word}\n".encode())
    os._exit(0)  # skips atexit functions, whose output must not follow the word


def list_traceback_files(traceback: types.TracebackType | None) -> set[str]:
    """The files of the code that an exception passed through."""
    found = set()
    while traceback is not None:
        found.add(traceback.tb_frame.f_code.co_filename)
        traceback = traceback.tb_next
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
