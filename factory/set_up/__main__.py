# ``python3 -I factory/set_up/__main__.py [--dev]``, by any Python 3: this file keeps to what 3.6 can read, so that it can refuse it.
import os
import sys


def too_old(version):  # type: ignore[no-untyped-def]
    """The line that refuses a Python, or nothing."""
    if tuple(version[:2]) >= (3, 11):
        return ""
    found = ".".join(map(str, version[:3]))
    return "Python >= 3.11 is needed, this one is " + found + ": name another, as in 'make demo PYTHON=python3.12'"


if __name__ == "__main__":
    if too_old(sys.version_info):
        sys.exit(too_old(sys.version_info))
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from factory.set_up.steps import main

    main()
