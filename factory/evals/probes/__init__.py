"""Runs other programs on the same export and compares their answers. Nothing here uses the suite or the ledger.

``conversations`` has the fixed texts and chats for every program. ``server`` starts ``server_probe`` (transformers) and ``engine_process`` a
serving engine, each in a process of its own. ``chat_checks`` and ``engine`` compare their answers with the trainer's own tokenizer.
``checks`` has the names of all checks.
"""
