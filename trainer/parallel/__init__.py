"""Several ranks: who they are and what they send (``ranks``), who holds which part of a tensor (``split``)."""
