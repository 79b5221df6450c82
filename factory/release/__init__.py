"""From a verdict to a champion: releases, the registered model in MLflow, the folder that servers read."""
