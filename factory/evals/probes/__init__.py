"""Other programs on the same export, and what they are asked: nothing here knows the suite or the ledger.

``conversations`` are the fixed texts and chats that every program gets → ``server`` starts ``server_probe`` (transformers) and ``engine`` the
serving engine, each in a process of its own → ``chat_checks`` and ``engine`` compare what they answer with the trainer's own tokenizer.
``checks`` has the names.
"""
