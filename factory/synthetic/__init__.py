"""Lets a model write documents: the champion, another release, or any OpenAI-compatible endpoint.

``prompts``     read prompts from a file, and find the licence of the text that continues them
``openings``    take openings of this workspace's training documents as prompts; never of held-out documents
``writers``     the writing model (a release in the engine of ``factory serve``, or an endpoint), and the requests to it
``generating``  a run: prompts → answers → a shard, written aside

The result is a shard like any other. Ingest filters, deduplicates and decontaminates it like any other shard.
"""
