"""One side's training, in a process of its own: ``python -m benchmarks.peers.side FOLDER OUT '{"name": "trainer", …}'``.

Each side has a watch that looks at the clock, the processor time of all threads and the peak of resident memory at the end of each step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.work import Work, first_checkpoint
from benchmarks.support.memory import resident, restart_peak

if TYPE_CHECKING:
    from trainer.contract.recipe import Recipe

OURS, TRAINER, SFT = "factory", "Trainer", "SFTTrainer"
STAGES = ("loading", "first steps", "steps", "saving")
WARM_UP = 1  # steps that are not timed: the first compiles


@dataclass(frozen=True)
class Side:
    """Which trainer, and its settings."""

    name: str  # OURS, TRAINER or SFT
    compiled: bool = True
    hidden: bool = True  # documents of a row do not see one another; ours always hides them
    micro: int | None = None  # rows of one forward and backward pass; None: all
    recompute: bool = False  # the blocks' activations in the backward pass

    def __str__(self) -> str:
        words = ["compiled" if self.compiled else "eager", *(["documents see one another"] if not self.hidden else [])]
        words += [f"{self.micro} rows at once"] if self.micro else []
        return f"{self.name}, {', '.join(words + (['recomputation'] if self.recompute else []))}"


@dataclass
class Measured:
    """One training. Lists have a value for each step, in seconds and nats a token. Bytes: the peak of resident memory in each stage, and after it."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    core_seconds: list[float] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)  # imports, and ``STAGES``
    afterwards: dict[str, int] = field(default_factory=dict)


class Watch:
    """Fills a ``Measured``."""

    def __init__(self, steps: int) -> None:
        self.steps, self.measured = steps, Measured()
        self.left = time.perf_counter(), time.process_time()
        self.end_stage("imports")

    def end_stage(self, name: str) -> None:
        self.measured.peaks[name], self.measured.afterwards[name] = resident("VmHWM"), resident("VmRSS")
        restart_peak()

    def begin(self) -> None:
        """Everything is loaded; the first step comes next."""
        self.end_stage("loading")
        self.left = time.perf_counter(), time.process_time()

    def end_step(self) -> None:
        now = time.perf_counter(), time.process_time()
        self.measured.seconds.append(now[0] - self.left[0])
        self.measured.core_seconds.append(now[1] - self.left[1])
        done = len(self.measured.seconds)
        if done in (WARM_UP, self.steps):
            self.end_stage("steps" if done == self.steps else "first steps")
        self.left = time.perf_counter(), time.process_time()


def train_ours(folder: Path, out: Path, side: Side, kernels: Path) -> Measured:
    recipe = Work.load(folder).recipe(side.compiled, side.micro, "block" if side.recompute else "none")
    return train_recipe(folder, out, recipe, kernels)


def train_recipe(folder: Path, out: Path, recipe: Recipe, kernels: Path) -> Measured:
    """By the loop of ``python -m trainer``, from checkpoint 0 to a saved checkpoint."""
    from kernels.contract.host_memory import keep_freed_memory

    keep_freed_memory()
    from kernels.contract.precision import allow_bf16_matmul
    from trainer.contract.plan.precision import DTYPES
    from trainer.monitor.hook import Anomaly, StepHook
    from trainer.parallel.ranks import Ranks
    from trainer.run import SegmentRun
    from trainer.segment import train_steps

    work = Work.load(folder)
    watch = Watch(work.steps)

    class Look(StepHook):
        key = "peers"

        def after_step(self, record: dict[str, Any]) -> list[Anomaly]:
            watch.measured.losses.append(record["loss"])
            watch.end_step()
            return []

    spec = work.segment(folder, recipe, kernels, first_checkpoint(folder))
    run = SegmentRun(spec, Ranks.join(recipe.parallel, recipe.model), first_checkpoint(folder))
    run.hooks.append(Look())
    watch.begin()
    with allow_bf16_matmul(DTYPES[recipe.precision]):
        train_steps(out, run)
    watch.end_stage("saving")
    return watch.measured


def train_theirs(folder: Path, out: Path, side: Side) -> Measured:
    """By ``Trainer`` or ``SFTTrainer``, from the same weights to a saved checkpoint with its optimiser.

    Both get rows that are packed already, with their targets beside them, and make them no mask: the positions begin again in each document, from
    which transformers' models see which tokens belong together. With ``hidden`` False they get no positions, and use the plain causal path.
    """
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    work = Work.load(folder)
    if side.name == SFT:
        from trl import SFTConfig, SFTTrainer

    watch = Watch(work.steps)
    rows = {name: torch.from_numpy(array) for name, array in np.load(folder / "rows.npz").items()}
    if not side.hidden:
        del rows["position_ids"]

    def collate(numbers: list[Any]) -> dict[str, Any]:
        index = torch.tensor([int(one["row"]) for one in numbers])
        found = {name: array[index] for name, array in rows.items()}
        found["labels"] = found["shift_labels"]
        if side.name == SFT and not side.hidden:
            found["attention_mask"] = torch.ones_like(found["input_ids"])  # as its own collator makes it
        return found

    class Look(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.end_step()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                watch.measured.losses.append(float(logs["loss"]))

    micro = side.micro or work.rows
    chosen: dict[str, Any] = {
        "output_dir": str(out),
        "use_cpu": True,
        "max_steps": work.steps,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": work.rows // micro,
        "gradient_checkpointing": side.recompute,
        "bf16": work.precision == "bf16",
        "torch_compile": side.compiled,
        "optim": "adamw_torch_fused",
        "learning_rate": work.lr,
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": work.steps,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": work.seed,
    }
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="sdpa")
    numbers = [{"row": number} for number in range(work.steps * work.rows)]
    common: dict[str, Any] = {"model": model, "data_collator": collate, "callbacks": [Look()]}
    if side.name == SFT:
        from datasets import Dataset

        config = SFTConfig(**chosen, max_length=None, dataset_kwargs={"skip_prepare_dataset": True})
        data = Dataset.from_list([one | {"input_ids": [0], "labels": [0]} for one in numbers])
        trainer = SFTTrainer(**common, args=config, train_dataset=data, processing_class=_tokenizer())
    else:
        trainer = Trainer(**common, args=TrainingArguments(**chosen), train_dataset=numbers)
    trainer.train()
    watch.end_stage("saving")
    return watch.measured


def _tokenizer() -> Any:
    """``SFTTrainer`` wants one, and asks it for nothing but its padding."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = WordLevel({"<|endoftext|>": 0}, unk_token="<|endoftext|>")
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token=end, pad_token=end, unk_token=end)


def main(words: list[str]) -> int:
    folder, out, side = Path(words[0]), Path(words[1]), Side(**json.loads(words[2]))
    out.mkdir(parents=True, exist_ok=True)
    measured = train_ours(folder, out, side, Path(words[3])) if side.name == OURS else train_theirs(folder, out, side)
    (out / "measured.json").write_text(json.dumps(asdict(measured)))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main(sys.argv[1:]))
