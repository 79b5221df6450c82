"""Everything that thinks: it is handed evidence through a workbench and hands back edits as data.

``line_profiler`` makes the evidence: where a training step's time goes, by source line. Two proposers read it and return a
``proposal``, a falsifiable hypothesis and edits: ``search_proposer`` has the implementations that the kernel registry holds measured by
the ``workbench``; ``kernel_engineer`` is a language model, spoken to through ``llm``, that writes patches and mends them until the
workbench's quick check takes them; what it reads and says is ``untrusted``. ``recipe_scout`` reads the trunk's metrics and
proposes one changed value of its recipe.
"""
