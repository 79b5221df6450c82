"""``python -m benchmarks.peers.preparing FOLDER WORK``: writes a folder that all sides read.

Ours continues from the checkpoint, the others from the same weights in Hugging Face's format.

    work.json                the ``Work``
    shard/, checkpoints/     a token shard and checkpoint 0, for our trainer
    model/, rows.npz         the weights, and each row's tokens, positions and targets, for the others

A separate file, because the other sides' processes import ``work`` and must not import the trainer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from agents.line_profiler.workload import MEDIAN_TOKENS
from benchmarks.peers.work import NO_TARGET, Work, first_checkpoint
from benchmarks.support.best_here import ROOT
from trainer.batch import make_batch
from trainer.checkpoint_writer import CheckpointWriter
from trainer.contract.checkpoint.export import make_hf_config, rename_tensors_for_hf
from trainer.contract.checkpoint.format import load_checkpoint
from trainer.contract.data.token_shard import TokenizedDocument, write_token_shard
from trainer.parallel.ranks import Ranks
from trainer.run import SegmentRun

KERNELS = ROOT / "policies" / "kernels.yaml"


def draw_documents(work: Work, vocabulary: int) -> Iterator[TokenizedDocument]:
    """Documents of log-normal length. Tokens follow Zipf's law, so that a few steps of training lower the loss and a wrong update shows."""
    generator = np.random.default_rng(work.seed)
    shares = 1 / np.arange(1, vocabulary + 1)
    wanted, made, number = 2 * work.steps * work.tokens_per_step, 0, 0
    while made < wanted:
        length = int(np.clip(generator.lognormal(np.log(MEDIAN_TOKENS), 0.8), 8, 4096))
        ids = generator.choice(vocabulary, length, p=shares / shares.sum()).astype(np.uint32)
        mask = np.ones(length, np.bool_)
        yield TokenizedDocument(f"{number:08d}", f"document-{number}", "text", "peers", "none", ids, mask)
        made, number = made + length, number + 1


def prepare(folder: Path, work: Work) -> None:
    """Write everything that the sides read."""
    recipe = work.recipe(compile=False)
    model = recipe.model
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "work.json").write_text(json.dumps(asdict(work)))
    documents = draw_documents(work, model.vocab_size)
    write_token_shard(folder / "shard", documents, vocab_size=model.vocab_size, tokenizer_sha256="0" * 64)
    run = SegmentRun(work.segment(folder, recipe, KERNELS, None), Ranks.join(recipe.parallel, model), None)
    _save_weights(folder, run)
    arrays: dict[str, list[Any]] = {"input_ids": [], "position_ids": [], "shift_labels": []}
    for _ in range(work.steps):
        batch = make_batch(run.order)
        arrays["input_ids"].append(batch.tokens_BT.numpy())
        arrays["position_ids"].append(batch.positions_BT.numpy())
        arrays["shift_labels"].append(np.where(batch.weights_BT.numpy() > 0, batch.targets_BT.numpy(), NO_TARGET))
    np.savez(folder / "rows.npz", **{name: np.concatenate(parts) for name, parts in arrays.items()})


def _save_weights(folder: Path, run: SegmentRun) -> None:
    """As checkpoint 0, and in Hugging Face's format."""
    writer = run.writer = CheckpointWriter(folder / "checkpoints", 1)
    run.save()
    writer.wait_for_last_save()
    writer.close()
    spec = run.recipe.model
    held = dict(rename_tensors_for_hf(load_checkpoint(first_checkpoint(folder)).model, spec))
    (folder / "model").mkdir()
    save_file(held, folder / "model" / "model.safetensors", {"format": "pt"})
    (folder / "model" / "config.json").write_text(json.dumps(make_hf_config(spec, "float32")))


if __name__ == "__main__":
    prepare(Path(sys.argv[1]), Work(**json.loads(sys.argv[2])))
