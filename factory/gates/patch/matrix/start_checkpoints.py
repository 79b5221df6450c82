"""Makes the data and the start checkpoints of the matrix. Approved code makes them from a random seed."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from factory.gates.patch.matrix.cases import DOMAINS, VOCABULARY, MatrixCase, make_case_recipe
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.data.token_shard import TokenizedDocument, write_token_shard

LATE_STEPS = (100_000, 900_000)
POISONED_TOKEN = 7
SHRINK_FACTOR = 0.9
TINY_NORM = 1e-6  # far below any norm, logit or loss, so that the next measurement counts as a jump
TRUNK = MatrixCase("trunk", steps=8)
OTHER = MatrixCase("another recipe", steps=2, changes={"model.d_ff": 16, "seed": 2})
ANNEAL_CASE = MatrixCase("annealed", "trunk", "anneal")


DRAWN = 0  # the key of the data plan whose domains have drawn names


def make_data_plans(folder: Path, vocabulary: int = VOCABULARY) -> dict[int, dict[str, Any]]:
    """Return number of generations → data plan. The token shards have random documents, so that no code can know them in advance.

    The plan ``DRAWN`` has one generation of four domains with random names. ``vocabulary``: of this plan's shard.
    """
    draw = np.random.default_rng(secrets.randbits(64))

    def make_shard(folder: Path, domains: Sequence[str], vocabulary: int, generation: int) -> dict[str, Any]:
        documents = []
        for number in range(90):
            length = int(draw.integers(3, 40))
            domain = domains[number % len(domains)]
            tokens = (draw.integers(1, VOCABULARY) + 7 * np.arange(length) + draw.integers(0, 3, length)) % VOCABULARY
            mask = np.ones(length, bool)
            if domain == domains[0]:
                mask[: length // 2] = False
            key = f"{draw.integers(1 << 62):016x}:{number}"
            documents.append(TokenizedDocument(key, key, domain, "s", "", tokens.astype(np.uint32), mask))
        shard = write_token_shard(folder, documents, vocab_size=vocabulary, tokenizer_sha256=secrets.token_hex(32))
        return {"id": shard.id, "path": str(shard.path), "generation": generation}

    shards = [make_shard(folder, DOMAINS, VOCABULARY, generation) for generation in range(2)]
    names = sorted(f"{secrets.choice('abcdefghijklmnopqrstuvwxyz')}{secrets.token_hex(3)}" for _ in range(4))
    seed = int(draw.integers(1 << 31))
    weights = make_case_recipe({})["mixture"]["weights"]
    common = {"weights": weights, "max_epochs": 1000, "seed": seed}
    drawn = {"token_shards": [make_shard(folder / "drawn", names, vocabulary, 0)], "max_epochs": 1000, "seed": seed}
    drawn["weights"] = dict(zip(names, (0.1, 0.2, 0.3, 0.4)))
    return {count: {"token_shards": shards[:count], **common} for count in (1, 2)} | {DRAWN: drawn}


def make_derived_checkpoints(trunk: Path, folder: Path) -> dict[str, Path]:
    """Return name → checkpoint. Each is a changed copy of ``trunk``, in a state that a short run seldom or never reaches."""
    draw = np.random.default_rng(secrets.randbits(64))
    whole = checkpoints.load_checkpoint(trunk)
    late = json.loads(json.dumps(whole.state))
    late["step"] = late["sampler"]["step"] = int(draw.integers(*LATE_STEPS))
    outliers = json.loads(json.dumps(whole.state))
    outliers["detector"]["grad_norm"] = [1e-6] * 8
    calm = json.loads(json.dumps(whole.state))
    calm["detector"] |= {
        "grad_norm": [TINY_NORM] * 8,
        "course": calm["detector"]["course"] | {"blocks": [TINY_NORM] * 4},
    }
    for turns in calm.get("signals", {"turns": {}})["turns"].values():  # older code has no signals
        turns |= {"past": {f"blocks.{layer}": [TINY_NORM] * 8 for layer in range(2)}, "changes": [1.0] * 8}
    poisoned = {name: tensor.clone() for name, tensor in whole.model.items()}
    embedding = next(name for name in poisoned if "embed" in name)
    poisoned[embedding][POISONED_TOKEN] = float("nan")
    changed = {
        "quiet": replace(whole, state=calm),
        "late": replace(whole, state=late),
        "outliers": replace(whole, state=outliers),
        "poisoned": replace(whole, model=poisoned),
    }
    found = {name: checkpoints.save_checkpoint(folder / name, checkpoint) for name, checkpoint in changed.items()}
    found["broken"] = folder / "broken"
    shutil.copytree(trunk, found["broken"])
    damage_checkpoint(found["broken"])
    return found


def make_outliers_checkpoint(trunk: Path, folder: Path) -> Path:
    """Return a copy of ``trunk`` in which every gradient norm is an outlier."""
    whole = checkpoints.load_checkpoint(trunk)
    state = json.loads(json.dumps(whole.state))
    state["detector"]["grad_norm"] = [TINY_NORM] * state["recipe"]["stability"]["window"]
    if "limit" in state["detector"]:
        state["detector"]["limit"] = 2 * TINY_NORM
    return checkpoints.save_checkpoint(folder, replace(whole, state=state))


def damage_checkpoint(checkpoint: Path) -> None:
    """Change the last bit of a checkpoint's weights."""
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))


def copy_interrupted_run(finished: Path, folder: Path, damaged: bool = False, step: int | None = None) -> None:
    """Copy a finished run to ``folder`` in the state after a kill: the newest checkpoint is missing, or ``damaged``.

    The weights of the previous checkpoint are changed, so that a run that starts again from the beginning has another result than a run that resumes.
    ``step``: a new step for that checkpoint; None: its own step.
    """
    shutil.copytree(finished, folder, dirs_exist_ok=True)
    (folder / "result.json").unlink()
    (_, before), (_, newest) = checkpoints.list_checkpoints(folder / "checkpoints")[-2:]
    if damaged:
        damage_checkpoint(newest)
    else:
        shutil.rmtree(newest)
    whole = checkpoints.load_checkpoint(before)
    shutil.rmtree(before)
    changed = {
        name: tensor * SHRINK_FACTOR if tensor.is_floating_point() else tensor for name, tensor in whole.model.items()
    }
    if step is not None:
        whole.state["step"] = whole.state["sampler"]["step"] = step
    checkpoints.save_checkpoint(folder / "checkpoints", replace(whole, model=changed))
