"""``make setup``: makes ``.venv`` with plain pip, from pinned packages. ``__main__`` does all of it, before anything is installed."""
