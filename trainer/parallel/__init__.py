"""Several ranks: their mesh and messages (``ranks``), and the parts of tensors that they hold (``split``)."""
