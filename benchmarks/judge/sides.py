"""How many cloze items change sides between two models that are equally good: right with one and wrong with the other.

Models are trained on the standard library: ``--models`` that differ in their first weights and in the order of their data, and as many branches
of the first one that differ in the order of their last ``--branch`` steps alone, as candidates and champions of one trunk do. Each pair is
compared on the same cloze items of held-out documents. Two models that are right on a share p of the items, as if by independent draws, would
differ on 2p(1 − p) of them; they differ on fewer, as an item is easy or hard for both: ``together`` is ρ of share = 2p(1 − p)(1 − ρ).
``factory.evals.power.TOGETHER`` is what is assumed of it; a smaller one sets more guards aside.

    python -m benchmarks.judge.sides --models 4 --steps 400
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from factory.core.progress import SILENT
from factory.corpus.shards import write_corpus
from factory.evals.policy import EvalPolicy
from factory.evals.reference_model import ReferenceModel
from factory.evals.suite import HeldOutDocument, Suite
from factory.evals.tasks import build_cloze_items, score_cloze_items
from factory.ingest.tokenizer import Tokenizer, train_tokenizer
from tests.support.factory.exports import save_export, tiny_model

CONTEXT, ROWS, RATE = 128, 16, 3e-3
POLICY = EvalPolicy(cloze_items_per_domain=120)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400, help="of a model, its last --branch steps at a falling rate")
    parser.add_argument("--branch", type=int, default=100)
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        tokenizer, tokens, suite = corpus(root)
        items = build_cloze_items(suite, tokenizer, POLICY)
        right = lambda name, model: _right(model, root / name, tokenizer, items)
        apart, trunks = [], []
        for seed in range(asked.models):
            model = tiny_model(
                seed, vocab_size=tokenizer.vocab_size, hidden_size=96, head_dim=24, intermediate_size=256, num_hidden_layers=2,
                max_position_embeddings=256, initializer_range=0.02,
            )  # fmt: skip
            trunks.append(_train(model, tokens, asked.steps - asked.branch, seed))
            apart.append(right(f"apart-{seed}", _train(copy.deepcopy(trunks[-1]), tokens, asked.branch, 100 + seed)))
            print(f"model {seed}: {apart[-1].mean():.3f} of {len(items)} right", file=sys.stderr, flush=True)
        print(json.dumps({"of": "other first weights and order", "items": len(items)} | sides(apart)), flush=True)
        branches = [
            right(f"branch-{n}", _train(copy.deepcopy(trunks[0]), tokens, asked.branch, 200 + n))
            for n in range(asked.models)
        ]
        print(json.dumps({"of": "branches of one trunk", "items": len(items)} | sides(branches)), flush=True)
    return 0


def sides(right_MN: list[np.ndarray]) -> dict[str, float]:
    """Of each pair of models, the mean.

    >>> sides([np.array([1.0, 1.0, 0.0, 0.0]), np.array([1.0, 0.0, 1.0, 0.0])])
    {'right': 0.5, 'sides': 0.5, 'together': 0.0}
    """
    pairs = list(itertools.combinations(right_MN, 2))
    share = float(np.mean(right_MN))
    changed = float(np.mean([np.mean(one != other) for one, other in pairs]))
    by_chance = float(
        np.mean([one.mean() * (1 - other.mean()) + other.mean() * (1 - one.mean()) for one, other in pairs])
    )
    return {"right": round(share, 3), "sides": round(changed, 3), "together": round(1 - changed / by_chance, 3)}


def corpus(root: Path) -> tuple[Tokenizer, torch.Tensor, Suite]:
    """A tokenizer, the tokens of what is trained on, and held-out documents, one in ten sources."""
    rows = [json.loads(line) for path in write_corpus(root / "corpus", SILENT, 0.5) for line in path.open()]
    held = lambda row: hashlib.sha256(row["source"].encode()).digest()[0] < 26
    text = lambda row: row["text"] if "text" in row else "\n".join(m["content"] for m in row["messages"])
    trained = [row for row in rows if not held(row)]
    tokenizer = train_tokenizer((text(row)[:4000] for row in trained[::4]), 2048, root / "tokenizer.json")
    ids = [
        tokenizer.encode_text(row["text"])[0] if "text" in row else tokenizer.encode_messages(row["messages"])[0]
        for row in trained
    ]
    tokens = torch.tensor(np.concatenate(ids).astype("int64"))
    content = lambda row: {"text": row["text"]} if "text" in row else {"messages": row["messages"]}
    documents = [HeldOutDocument(row["id"], row["domain"], row["source"], content(row)) for row in rows if held(row)]
    documents.sort(key=lambda one: (one.domain, hashlib.sha256(one.key.encode()).hexdigest()))
    return tokenizer, tokens, Suite("", tuple(documents))


def _train(model: Any, tokens: torch.Tensor, steps: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)
        starts = torch.randint(len(tokens) - CONTEXT, (ROWS,), generator=generator)
        batch = torch.stack([tokens[start : start + CONTEXT] for start in starts.tolist()])
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def _right(model: Any, folder: Path, tokenizer: Tokenizer, items: list[Any]) -> np.ndarray:
    rows = score_cloze_items(ReferenceModel.load(save_export(model, folder, tokenizer)), items, lambda _: None)
    return np.array([row.value for row in rows])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
