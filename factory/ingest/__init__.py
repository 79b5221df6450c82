"""Shards in, token shards out. A shard walks down this list (start at ``chain.ingest_shard``):

``rules/policy``                   what ``policies/data.yaml`` may say
``gathering`` ``remote``           what a command was asked for, as files
``packing``                        what becomes JSON lines before it is a shard; many small files as one
``readers`` ``reading/``           a file as a stream of rows
``shapes/``                        a row's columns: by a mapping, or by a known shape; what nothing reads
``document``                       a row as a normalised document, or the rule that drops it
``rules/filters`` ``rules/pii``    rules per domain; personal data and secrets replaced
``rules/words``                    hashes of words and of runs of words, for the next three
``rules/near_dup``                 MinHash signatures and bands
``rules/split``                    which documents may be held out
``rules/decontaminate``            overlap of training and held-out documents, in both directions
``worker``                         the per-document work of the above, in processes
``compared``                       what later documents are compared with: files of hashes, and their index
``index``                          what is known of earlier shards
``decide``                         duplicates, held-out split, contamination: decisions over the whole shard
``tokenizer`` ``vocabulary``       the tokenizer; its one training
``chat_template``                  what exports are served with: the tokenizer's chats, in Jinja
``store``                          the ledger rows, in one transaction
``preview``                        how the first rows of a file are read, before anything is stored
"""
