"""What every side trains: one model, the same rows of packed documents in the same order, one recipe.

``prepare`` writes a folder that all sides read. Ours continues from the checkpoint, the others from the same weights in Hugging Face's format.

    work.json                the ``Work``
    shard/, checkpoints/     a token shard and checkpoint 0, for our trainer
    model/, rows.npz         the weights, and each row's tokens, positions and targets, for the others
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from agents.line_profiler.workload import MEDIAN_TOKENS
from benchmarks.support.best_here import ROOT
from trainer.batch import make_batch
from trainer.checkpoint_writer import CheckpointWriter
from trainer.contract.checkpoint.export import make_hf_config, rename_tensors_for_hf
from trainer.contract.checkpoint.format import format_checkpoint_name, load_checkpoint
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.token_shard import TokenizedDocument, write_token_shard
from trainer.contract.plan.spec import SegmentSpec
from trainer.contract.recipe import Recipe
from trainer.parallel.ranks import Ranks
from trainer.run import SegmentRun

NO_TARGET = -100  # transformers' label of a position without loss
KERNELS = ROOT / "policies" / "kernels.yaml"
SHAPES: dict[str, dict[str, Any]] = {
    # config.json of HuggingFaceTB/SmolLM2-135M, whose 134.5 M weights are those of SmolLM2-135M-Instruct too
    "smollm2-135m": {
        "vocab_size": 49152, "d_model": 576, "layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64, "d_ff": 1536,
    },
    "tiny": {"vocab_size": 512, "d_model": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "d_ff": 128},
}  # fmt: skip
OF_ALL_SHAPES = {"rope_theta": 100_000.0, "norm_eps": 1e-5, "qk_norm": False, "family": "llama"}


@dataclass(frozen=True)
class Work:
    """What all sides train. A step has ``rows`` rows of ``context`` tokens."""

    shape: str  # a key of ``SHAPES``
    context: int
    rows: int
    steps: int
    precision: str  # fp32 · bf16
    lr: float = 3e-4
    seed: int = 1

    @classmethod
    def load(cls, folder: Path) -> Work:
        return cls(**json.loads((folder / "work.json").read_text()))

    @property
    def tokens_per_step(self) -> int:
        return self.rows * self.context

    def recipe(self, compile: bool = True, micro: int | None = None, recompute: str = "none") -> Recipe:
        """Constant rate, no decay and no z-loss, so that all sides make the same updates. ``micro``: rows of one forward and backward pass."""
        return Recipe.parse(
            {
                "name": "peers",
                "seed": self.seed,
                "precision": self.precision,
                "compile": compile,
                "checkpoint_every": self.steps,
                "model": SHAPES[self.shape] | OF_ALL_SHAPES | {"context": self.context},
                "mixture": {"weights": {"*": 1.0}},
                "batch": {"sequences": self.rows, "micro_sequences": micro},
                "optimizer": {"lr": self.lr, "weight_decay": 0.0},
                "schedule": {"warmup_steps": 0, "trunk_steps": {"first": self.steps, "later": 1}, "anneal_steps": 1},
                "stability": {"z_loss": 0.0, "noise_scale_every": 0},
                "parallel": {"recompute": recompute},
            }
        )

    def segment(self, folder: Path, recipe: Recipe, kernels: Path, initial: Path | None) -> SegmentSpec:
        """Of all steps, on the token shard in ``folder``."""
        (shard,) = (folder / "shard").iterdir()
        plan = DataPlan.make_for_segment(recipe.mixture, "trunk", [(shard.name, str(shard), 0)], recipe.seed)
        return SegmentSpec(
            kind="trunk",
            recipe=recipe,
            data_plan=plan,
            first_step=0,
            last_step=self.steps,
            initial_checkpoint=str(initial) if initial else None,
            kernels=str(kernels),
        )


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


def first_checkpoint(folder: Path) -> Path:
    return folder / "checkpoints" / format_checkpoint_name(0)


if __name__ == "__main__":
    prepare(Path(sys.argv[1]), Work(**json.loads(sys.argv[2])))
