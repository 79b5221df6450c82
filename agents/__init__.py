"""Agents: they get evidence through a workbench and return edits as data.

``line_profiler`` makes the evidence: it measures the time of each source line in a training step. Three agents return a ``Proposal``
(``core.proposal``), which has a hypothesis that a measurement can refute, and edits. ``search_proposer`` lets the ``workbench`` measure the
registered implementations of ops. ``kernel_engineer`` writes patches and corrects them until the workbench's quick check accepts them.
``recipe_scout`` reads the trunk's metrics and proposes changed values of its recipe. ``loss_doctor`` names the cause of an anomaly.
``loop`` runs an agent that is a language model, and calls the model through ``llm``. All text for and from a model is ``untrusted``.
"""
