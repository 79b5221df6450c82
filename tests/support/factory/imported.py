"""Imports what commands import, for the process that forks them."""

import mlflow  # noqa: F401
import torch  # noqa: F401

import factory.cli  # noqa: F401
import factory.machine_check  # noqa: F401
import factory.training.training  # noqa: F401
from tests.support.plants.kept_store import keep_one

keep_one()
