"""Everything that thinks: it is handed evidence through a workbench and hands back edits as data.

``line_profiler`` makes the evidence: where a training step's time goes, by source line. Those who read it return a ``core.proposal``, a
falsifiable hypothesis and edits: ``search_proposer`` has the implementations that the kernel registry holds measured by the
``workbench``; ``kernel_engineer`` writes patches and mends them until the workbench's quick check takes them. ``recipe_scout``
reads the trunk's metrics and proposes changed values of its recipe. The last two can be a language model, spoken to through ``llm``, at
work in the ``loop``; what it reads and says is ``untrusted``.
"""
