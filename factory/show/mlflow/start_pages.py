"""Where a person begins in MLflow. Its own start page leads elsewhere: it opens in the mode for agents, which hides the registered models."""

from __future__ import annotations

from factory.core.workspace import Workspace
from factory.show.mlflow.registry import MODEL
from factory.show.mlflow.runs import CANDIDATES, PROPOSALS, TRAINING
from factory.show.mlflow.store import mlflow_errors, open_client
from factory.show.mlflow.version_page import MODE


def start_pages(workspace: Workspace, server: str) -> dict[str, str]:
    """What is there to see → its address on the server. Whatever was moved with the workspace is found again from here on.

    Raises: TrackingError when the store cannot be opened.
    """
    client = open_client(workspace)
    pages = {"releases": f"models/{MODEL}"}
    with mlflow_errors("listing experiments"):
        for name in (CANDIDATES, TRAINING, PROPOSALS):
            if found := client.get_experiment_by_name(name):
                pages[name] = f"experiments/{found.experiment_id}"
        if not client.search_registered_models(f"name = '{MODEL}'"):
            del pages["releases"]
    return {name: f"{server}/#/{page}?{MODE}" for name, page in pages.items()}
