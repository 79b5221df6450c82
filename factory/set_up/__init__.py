"""``make setup``: ``.venv`` by plain pip, from pinned packages. ``__main__`` is all of it, and runs before anything is installed."""
