"""What a step says of itself: norms, noise scale, anomalies, throughput; and the files that it is written to."""
