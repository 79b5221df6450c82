"""Shows runs of segments, candidates and proposals, their metrics and the registered model in MLflow, and reads people's decisions there."""
