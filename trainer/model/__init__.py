"""The model: transformer blocks over the ops of ``kernels``, and mixtures of experts."""
