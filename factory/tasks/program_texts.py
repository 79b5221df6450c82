"""Python programs that prove a task in the sandbox. They are text for programs, not for people.

They have a file of their own, because they are not messages and two files use them.
"""

from __future__ import annotations

# Prints the missing modules in the last line of its error. It does not import them, because some need seconds.
FIND_LIBRARIES = """
import importlib.util
missing = [name for name in {names!r} if importlib.util.find_spec(name) is None]
assert not missing, ", ".join(missing)
"""
RAISE = "raise RuntimeError('it is not written')"
EMPTY_CLASS = """class {name}:
    def __init__(self, *args, **keys): pass
    def __getattr__(self, name): return lambda *args, **keys: None
"""
# Replies without an answer. The score of each must be 0.
EMPTY_REPLIES = ("", "I do not know.", "no answer", "?", "The answer is", "lorem ipsum dolor sit amet")
