"""The plant and the judge: everything that measures, decides, stores or releases. Agents may not patch it.

The path of a shard: ``cli`` or ``daemon`` sees it in the inbox → ``ingest/`` turns it into documents with fates and a token
shard → ``training/`` plans a segment and runs the trainer in its own process → an anneal branch yields a candidate → ``evals/``
measures it on held-out items → ``gates/release`` judges → ``release/`` makes it champion and publishes it. ``ledger/`` remembers all
of it; ``tracking/`` shows it in MLflow. The code loop walks ``code_loop/`` → ``git/`` → ``sandbox/`` → ``gates/patch``.
"""
