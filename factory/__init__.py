"""The plant and the judges: everything that measures, decides, stores or releases. Agents may not patch this package.

The path of a shard: ``cli/`` or ``duties/`` (the daemon) finds the shard in the inbox → ``ingest/`` makes a token shard from it and records what
happened to each document → ``training/`` plans a segment and runs the trainer in its own process → an anneal branch gives a candidate →
``evals/`` measures the candidate on held-out items → ``gates/release/`` judges it → ``release/`` makes it champion and publishes it.
``ledger/`` records every step, and ``show/`` shows them in MLflow. The path of a patch: ``code_loop/`` → ``git/`` → ``sandbox/`` → ``gates/patch/``.
"""
