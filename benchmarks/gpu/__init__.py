"""What a card does with this repository, in eight minutes: ``python -m benchmarks.gpu``, or ``make bench-gpu``.

Data walks so: ``__main__`` reads the command line and hands it to ``session``, which runs the parts of ``parts`` one after the other.
A part is a list of named items. Items run in processes of their own (``worker`` is the inside of one, ``pool`` the outside), so that a
kernel that crashes, poisons its device or hangs costs its item, and the next item starts in a new process. What an item finds are
records, a JSON line each (``records``), written as they come; ``page`` makes the Markdown and the JSON of them:
``headline`` what comes first, ``winners`` what to change. ``watch`` looks at the card between the parts.

``facts`` · ``right`` (the oracle on the device) · ``fast`` (ops beside ``rivals``, on ``shapes``, by ``timing``) · ``step`` (whole training
steps, of ``models``) · ``chain`` (profiler, gate, sandbox, resume) are the parts. ``aims`` is the one table of what is to be reached;
``tests/gpu`` holds the same functions to it.
"""
