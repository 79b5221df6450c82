"""What computes here: precision, kernels as tuned for this machine."""
