"""Agents: they get evidence through a workbench and return edits as data.

``line_profiler`` makes the evidence: where a training step's time goes, by source line. The others return a
``core.proposal``, a falsifiable hypothesis and edits: ``search_proposer`` has the registered implementations of ops measured
by the ``workbench``; ``kernel_engineer`` writes patches and corrects them until the workbench's quick check accepts them;
``recipe_scout`` reads the trunk's metrics and proposes changed values of its recipe. The last two can be a language model,
called through ``llm`` by the ``loop``; what it reads and writes is ``untrusted``.
"""
