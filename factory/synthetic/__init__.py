"""Documents that a model writes: the champion, another release, or any OpenAI-compatible endpoint.

``prompts``     what it goes on from, of a file, and what licence the text has then
``openings``    the same, of this workspace's training documents; never of held-out ones
``writers``     the model: a release behind the engine that ``factory serve`` uses, or an address; and how it is asked
``journal``     the answers so far, which outlive a kill
``generating``  a run: prompts → answers → a shard, written aside

What comes out is a shard like any other. Nothing here trusts it: ingest filters, deduplicates and decontaminates it.
"""
