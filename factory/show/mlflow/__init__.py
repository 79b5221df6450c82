"""What MLflow shows: runs of segments, candidates and proposals, their metrics, the registered model; and the words that people give there."""
