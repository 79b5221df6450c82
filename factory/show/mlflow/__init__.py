"""What MLflow shows: runs of segments, candidates and proposals, and their metrics."""
