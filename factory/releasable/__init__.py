"""The releasability report: whether models trained on the ingested data could be released, and what to do about each obstacle.

The factory makes the report as soon as the first shard is ingested, before it trains anything.

``report``            makes the report from held-out groups, licences, tasks, vocabulary and recipe. The release gate does the same computation
``recorded_report``   keeps the newest report in the ledger, from which ``factory status`` reads it
"""
