"""``make setup``: ``.venv`` from pinned packages, told all the while. It runs before anything is installed: standard library only.

``__main__`` refuses an old Python → ``steps`` puts the rest in order: ``needs`` (what must be here already) → ``environment`` (the virtual
environment) → ``pip`` (what pip does, in plain words) → ``imports`` compiled → a stamp. ``journal`` runs the commands of all of them.

Faster than plain pip by three things: no development tools where only the demo is wanted, byte-code only of what is imported (a fifth of
the files), written by two processes at once. Killed at any moment, the same command goes on.
"""
