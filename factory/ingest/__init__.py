"""Ingest turns shards into token shards. A shard passes through these modules in this order. Start reading at ``chain.ingest_shard``.

``rules/policy``                   define the keys of ``policies/data.yaml``
``input_files`` ``remote``           find or fetch the files that a command names
``file_groups``                        write other kinds of files as JSON lines; many small files become one shard
``readers`` ``reading/``           read a file as a stream of rows
``shapes/``                        find the text or the chat in a row's columns, by a mapping or a known shape
``document``                       make a normalised document from a row, or drop the row by a rule
``rules/filters``                  apply the rules of each domain
``rules/personal_data``            replace personal data and secrets
``rules/word_hashes``              hash words and n-grams, for the next three modules
``rules/near_duplicates``          compute MinHash signatures and bands
``rules/held_out_split``           choose the documents that may be held out
``rules/contamination``            find overlap between training and held-out documents, in both directions
``worker``                         do the per-document work of the modules above in processes
``hash_index``                     store and index the hashes with which later documents are compared
``document_index``                 query the documents of earlier shards
``decisions``                      decide over the whole shard: duplicates, held-out split, contamination
``tokenizer`` ``vocabulary``       use the tokenizer; train it once
``factory_format`` ``tokenizing/``  write documents with the factory's own tokenizer, or with that of another model
``installing``                     put the tokenizer of a model's folder into a workspace
``chat_template``                  make the Jinja template with which exports are served
``ledger_rows``                    write the ledger rows in one transaction
``preview``                        show how the first rows of a file are read, without storing anything
"""
