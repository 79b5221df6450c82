"""Upgrades of the ledger's tables. Each file schema_N.py is alembic's revision N, which upgrades schema N - 1 to schema N. The first schema is 1.

``Ledger.create`` makes a new ledger with the tables of ``factory.ledger.ledger``. ``factory upgrade`` applies these revisions to an older
ledger. The version is the row 'schema' of the table ``meta``.

To change the tables: edit ``factory.ledger.ledger``, add schema_7.py with ``down_revision = "6"``, and set ``SCHEMA_VERSION`` in
``factory.ledger.version``.
"""
