"""Ingest turns shards into token shards. A shard passes these modules in this order (start at ``chain.ingest_shard``):

``rules/policy``                   the keys of ``policies/data.yaml``
``gathering`` ``remote``           find or fetch the files that a command names
``packing``                        write other kinds of files as JSON lines; many small files become one shard
``readers`` ``reading/``           read a file as a stream of rows
``shapes/``                        find the text or the chat in a row's columns, by a mapping or a known shape
``document``                       make a normalised document of a row, or drop the row by a rule
``rules/filters`` ``rules/pii``    apply the rules of each domain; replace personal data and secrets
``rules/words``                    hash words and runs of words, for the next three modules
``rules/near_dup``                 MinHash signatures and bands
``rules/split``                    choose which documents may be held out
``rules/decontaminate``            find overlap of training and held-out documents, in both directions
``worker``                         do the per-document work of the modules above in processes
``hash_index``                       the hashes that later documents are compared with, and their index
``document_index``                          query the documents of earlier shards
``decisions``                         decide over the whole shard: duplicates, held-out split, contamination
``tokenizer`` ``vocabulary``       the tokenizer; its one training
``chat_template``                  the Jinja template that exports are served with
``ledger_rows``                          write the ledger rows in one transaction
``preview``                        show how the first rows of a file are read, without storing anything
"""
