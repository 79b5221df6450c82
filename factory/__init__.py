"""The plant and the judge: everything that measures, decides, stores or releases. Agents may not patch it.

How a shard walks through: ``cli`` or ``daemon`` sees it in the ``inbox`` → ``ingest/`` turns it into documents with fates and a token
shard → ``planning`` plans a segment, ``training`` runs the trainer in its own process → an anneal branch yields a candidate → ``evals/``
measures it on held-out items → ``gates/`` judges → ``releases`` makes it champion → ``serving`` publishes it. ``ledger`` remembers all of
it; ``tracking`` shows it in MLflow. The code loop walks ``proposing`` → ``repository`` → ``sandbox`` → ``gates/patch_gate``.
"""
