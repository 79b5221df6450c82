"""Put first on PYTHONPATH: every Python process notes each file whose code it runs, as it runs it, in the folder $NOTED.

A file by process number: the command line, then one path a line. A process started with ``-I`` notes nothing.
"""

import os
import sys

folder = os.environ.get("NOTED")
if folder:
    noted: "set[str]" = set()

    def note(line: str) -> None:
        with open(f"{folder}/{os.getpid()}", "a", encoding="utf-8", errors="backslashreplace") as out:
            out.write(line.replace("\n", " ") + "\n")

    def hear(event: str, arguments: "tuple[object, ...]") -> None:
        path = getattr(arguments[0], "co_filename", "") if event == "exec" else ""
        if path.endswith(".py") and path not in noted:
            noted.add(path)
            note(path)

    note(" ".join(sys.orig_argv))
    sys.addaudithook(hear)
