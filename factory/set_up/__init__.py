"""``make setup``: ``.venv`` from pinned packages, with progress. It runs before anything is installed: standard library only.

``__main__`` refuses an old Python → ``steps`` runs the rest in order: ``needs`` (what the machine must have) → ``environment``
(the virtual environment) → ``pip`` (pip's progress, in short lines) → the imports are compiled → a stamp. ``journal`` runs the
commands of all of them.

It is faster than plain pip for three reasons: no development tools where only the demo is wanted, byte-code only of what is
imported (a fifth of the files), written by two processes at once. After a kill the same command goes on.
"""
