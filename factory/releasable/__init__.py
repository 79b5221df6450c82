"""Can what is ingested be released? Answered from the first shard on, before anything is trained, each line with what to do.

``gathering``  looks at held-out groups, licences, tasks, vocabulary and recipe, and asks the release gate's own computation
``recorded``   keeps the newest answer in the ledger, where ``factory status`` finds it
"""
