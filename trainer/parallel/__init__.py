"""Training on several ranks: their mesh and communication (``ranks``), and the parts of tensors that they hold (``fsdp_sharding``)."""
