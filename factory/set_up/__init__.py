"""``make setup``: makes ``.venv`` with plain pip, from pinned packages. The code is in ``__main__``, which needs no installed package."""
