"""Writes an ``MLmodel``, so that MLflow can load a version: ``mlflow.pyfunc.load_model("models:/factory-lm@champion")`` and
``mlflow.transformers.load_model``.

The ``MLmodel`` file and the tokenizer are among the candidate's artifacts. The file refers to the export's weights by a path, so that they are
stored once and the export's hash does not change. Where a server keeps the artifacts, the export is sent to the server.
"""

from __future__ import annotations

import json
import platform
import shutil
import tempfile
import uuid
from datetime import UTC, datetime
from importlib.metadata import version
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from factory.ledger.rows import CandidateRow

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

NAME = "model"  # the folder among the artifacts, and in it the folder of an export that was sent
TASK, PIPELINE = "text-generation", "TextGenerationPipeline"
SENT_LIMIT = 1 << 30  # bytes; a larger export is not sent to a server, only its path
NEW_TOKENS = 128  # default of max_new_tokens
REQUIRED_PACKAGES = ("mlflow", "torch", "transformers")


def log_loadable_model(client: MlflowClient, run: str, candidate: CandidateRow) -> str:
    """Add the files that MLflow needs to load a candidate to the artifacts of its run. Returns their address. Safe to repeat."""
    export, place = Path(candidate.export_path), f"{client.get_run(run).info.artifact_uri}/{NAME}"
    address = urlparse(place)
    with tempfile.TemporaryDirectory(prefix="factory-model-") as aside:
        if address.scheme in ("", "file"):
            weights = relpath(export, unquote(address.path))  # stays right when the workspace is moved
        elif sum(path.stat().st_size for path in export.rglob("*") if path.is_file()) <= SENT_LIMIT:
            weights = NAME
            client.log_artifacts(run, str(export), f"{NAME}/{NAME}")
        else:
            weights = str(export)
        _write(Path(aside), candidate, export, weights)
        client.log_artifacts(run, aside, NAME)
    return place


def _write(folder: Path, candidate: CandidateRow, export: Path, weights: str) -> None:
    from mlflow import pyfunc
    from mlflow.models import Model, ModelSignature
    from mlflow.types.schema import ColSpec, DataType, ParamSchema, ParamSpec, Schema

    tokenizer = folder / "components" / "tokenizer"
    tokenizer.mkdir(parents=True)
    for path in export.iterdir():
        if "token" in path.name or path.name.startswith("chat_template"):
            shutil.copyfile(path, tokenizer / path.name)
    made = _written(export / "tokenizer_config.json").get("tokenizer_class") or "PreTrainedTokenizerFast"
    text = Schema([ColSpec(DataType.string)])
    params = ParamSchema([ParamSpec("max_new_tokens", DataType.long, NEW_TOKENS)])
    model = Model(
        utc_time_created=str(datetime.fromtimestamp(candidate.created_at, UTC).replace(tzinfo=None)),
        model_uuid=uuid.UUID(hex=candidate.export_sha256[:32]).hex,
        signature=ModelSignature(text, text, params),
        metadata={"candidate": candidate.id, "export_sha256": candidate.export_sha256},
    )
    pyfunc.add_to_model(
        model,
        loader_module="mlflow.transformers",
        python_env="python_env.yaml",
        model_config={"max_new_tokens": NEW_TOKENS, "return_full_text": False},
    )
    model.add_flavor(
        "transformers",
        task=TASK,
        instance_type=PIPELINE,
        pipeline_model_type=_written(export / "config.json")["architectures"][0],
        source_model_name=f"candidate-{candidate.id}",
        model_binary=weights,
        components=["tokenizer"],
        tokenizer_type=made,
        transformers_version=version("transformers"),
    )
    model.save(str(folder / "MLmodel"))
    (folder / "requirements.txt").write_text(
        "".join(f"{name}=={version(name).split('+')[0]}\n" for name in REQUIRED_PACKAGES)
    )
    environment = {"python": platform.python_version(), "dependencies": ["-r requirements.txt"]}
    (folder / "python_env.yaml").write_text(json.dumps(environment) + "\n")


def _written(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
