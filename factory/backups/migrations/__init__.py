"""One file a step of the ledger's schema, ``schema_N.py``: alembic revision N, from the schema before it to N.

A new ledger is made by ``Ledger.create`` with the tables of ``factory.ledger.ledger``; an older one walks through these revisions
(``factory upgrade``). The version is the row 'schema' of the table ``meta``. Schema 1 is where revisions begin.

A change of the tables: edit ``factory.ledger.ledger``, add ``schema_7.py`` with ``down_revision = "6"``, and set ``SCHEMA`` in
``factory.ledger.version``.
"""
