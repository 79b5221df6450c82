"""The releasability report: whether models trained on the ingested data could be released, and what to do about each obstacle.

The report is made from the first shard on, before anything is trained.

``report``  makes the report from held-out groups, licences, tasks, vocabulary and recipe, with the release gate's own computation
``recorded_report``   keeps the newest report in the ledger, from which ``factory status`` reads it
"""
