"""A small real plant for tests: fixed text, a real tokenizer, token shards, held-out rows, and tiny exports of each family, some of them trained."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from factory.core.exports import hash_export_folder
from factory.core.workspace import Workspace
from factory.evals.evaluator import evaluate_on_suite, load_current_suite
from factory.evals.export_folder import ExportError
from factory.evals.export_parity import ExpectedExport, _total, hash_export_tensors
from factory.evals.parity import CHECKS
from factory.ingest.rules.held_out_split import goes_to_sealed_half_on_tie
from factory.ingest.tokenizer import Tokenizer, train_tokenizer
from factory.ledger.ledger import (
    Ledger,
    candidates,
    checkpoints,
    data_plans,
    documents,
    evaluations,
    held_out,
    record_event,
    segments,
    shards,
    tokenizers,
)
from factory.ledger.plant import Plant
from factory.ledger.rows import Subject
from tests.support.text.library import library
from trainer.contract.checkpoint.export import make_generation_config
from trainer.contract.data.token_shard import TokenizedDocument, TokenShard, write_token_shard

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB, CONTEXT = 512, 64
SHARD = "ab" * 32


@dataclass
class Document:
    key: str
    domain: str
    source: str
    content: dict[str, Any]
    held: bool


def corpus() -> list[Document]:
    """Chunks of four modules as code, their docstrings as docs, questions on their functions as chat; every fifth is held out."""
    found: list[Document] = []
    said: set[str] = set()

    def add(domain: str, source: str, content: dict[str, Any]) -> None:
        key = f"{SHARD[:16]}:{len(found)}"
        found.append(Document(key, domain, source, content, hashlib.sha256(source.encode()).digest()[0] % 5 == 0))

    for module in (library()[name] for name in ("argparse", "textwrap", "ast", "inspect")):
        text = module.text[:36000]
        for start in range(0, len(text), 600):
            add("code", f"{module.name}:{start // 600}", {"text": text[start : start + 600]})
        for member in module.members:
            if not member.own or member.doc[:60] in said:  # inherited
                continue
            said.add(member.doc[:60])
            source = f"{module.name}.{member.name}"
            add("docs", source, {"text": f"{member.name}\n\n{member.doc[:500]}"})
            answer = f"{member.doc[:120]}\n```python\nimport {module.name}\n{source}\n```"
            messages = [{"role": "user", "content": f"What is {source}?"}, {"role": "assistant", "content": answer}]
            add("chat", source, {"messages": messages})
    return found


class FilledPlant(Plant):
    def __init__(
        self, workspace: Workspace, ledger: Ledger, tokenizer: Tokenizer, shard: TokenShard, documents: list[Document]
    ) -> None:
        super().__init__(workspace, ledger)
        self.tokenizer, self.shard, self.documents = tokenizer, shard, documents

    def add_candidate(self, export: Path) -> int:
        """Record an export folder as a candidate of a finished anneal segment; returns its id."""
        with self.ledger.begin() as tx:
            number = len(self.ledger.select_rows(candidates.select())) + 1
            values = {
                "id": number, "kind": "anneal", "generation": 1, "recipe": "demo", "recipe_json": {}, "recipe_sha256": "0", "data_plan": "plan",
                "code_commit": "0", "first_step": 0, "last_step": 1, "state": "done", "attempts": 1, "folder": "", "created_at": 0.0,
            }  # fmt: skip
            tx.execute(segments.insert().values({c.name: values[c.name] for c in segments.c if c.name in values}))
            tx.execute(checkpoints.insert().values(id=f"c{number}", segment=number, step=1, path="", created_at=0.0))
            tx.execute(
                candidates.insert().values(
                    id=number,
                    segment=number,
                    checkpoint=f"c{number}",
                    export_path=self.ledger.to_stored_path(export),
                    export_sha256=hash_export_folder(export),
                    created_at=time.time(),
                )
            )
            detail = {"segment": number}
            with contextlib.suppress(ExportError):  # what no exporter wrote
                config = json.loads((export / "config.json").read_text())
                detail["made"] = ExpectedExport(_total(hash_export_tensors(export)), config).to_json()
            record_event(tx, "candidate", Subject("candidate", number), detail)
        return number


def measured_alone(plant: FilledPlant, candidate: int) -> int:
    """Measure a candidate for a test that does not ask about parity: what needs no other program is real, every check is said to be passed."""
    number = evaluate_on_suite(plant, candidate, load_current_suite(plant), released=True)
    mine = evaluations.c.id == number
    [row] = plant.ledger.select_rows(evaluations.select().where(mine))
    passed = {name: {"ok": True, "detail": "not asked here"} for name in CHECKS}
    with plant.ledger.begin() as tx:
        summary = row["summary"] | {"parity": passed | row["summary"]["parity"]}
        tx.execute(evaluations.update().where(mine).values(summary=summary))
    return candidate


def build_plant(workspace: Workspace, ledger: Ledger) -> FilledPlant:
    """Fill a fresh workspace and ledger."""
    every = corpus()
    texts = [d.content.get("text") or "\n".join(m["content"] for m in d.content["messages"]) for d in every]
    tokenizer = train_tokenizer(iter(texts), VOCAB, workspace.tokenizer)
    encoded = {
        d.key: tokenizer.encode_text(d.content["text"])
        if "text" in d.content
        else tokenizer.encode_messages(d.content["messages"])
        for d in every
    }
    shard = write_token_shard(
        workspace.shards,
        (TokenizedDocument(d.key, d.key, d.domain, d.source, "psf", *encoded[d.key]) for d in every if not d.held),
        vocab_size=tokenizer.vocab_size,
        tokenizer_sha256=tokenizer.sha256,
    )
    with ledger.begin() as tx:
        tx.execute(
            shards.insert().values(sha256=SHARD, name="stdlib", path="", bytes=1, state="ingested", ingested_at=0.0)
        )
        tx.execute(
            tokenizers.insert().values(
                sha256=tokenizer.sha256, path=str(workspace.tokenizer), vocab_size=tokenizer.vocab_size, created_at=0.0
            )
        )
        tx.execute(
            documents.insert(),
            [
                {
                    "key": d.key, "id": d.key, "shard": SHARD, "row": i, "domain": d.domain, "fate": "held_out" if d.held else "train",
                    "content_sha256": hashlib.sha256(json.dumps(d.content).encode()).hexdigest(), "releasable": True, "tokens": 1,
                    "supervised_tokens": 1, "license": "PSF-2.0", "source": d.source, "token_shard": None if d.held else shard.id,
                }
                for i, d in enumerate(every)
            ],
        )  # fmt: skip
        tx.execute(
            held_out.insert(),
            [
                {
                    "key": d.key,
                    "domain": d.domain,
                    "group_key": d.source,
                    "sealed": goes_to_sealed_half_on_tie(d.source),
                    "content": d.content,
                }
                for d in every
                if d.held
            ],
        )
        plan = {
            "token_shards": [{"id": shard.id, "path": str(shard.path), "generation": 1}],
            "weights": {},
            "replay": 0.0,
            "max_epochs": 4,
            "seed": 0,
        }
        tx.execute(data_plans.insert().values(id="plan", plan=plan, created_at=0.0))
    return FilledPlant(workspace, ledger, tokenizer, shard, every)


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {}),
    "llama": ("Llama", {}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "partial_rotary_factor": 1.0,
            "num_nextn_predict_layers": 0,
        },
    ),
}


def tiny_model(seed: int = 0, family: str = "qwen3", **changes: Any) -> PreTrainedModel:
    import transformers  # here: most who collect this file make no model, and it takes three seconds

    torch.manual_seed(seed)
    name, special = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        **{
            "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
            "intermediate_size": 96, "max_position_embeddings": CONTEXT, "tie_word_embeddings": True, "initializer_range": 0.1,
            "rope_theta": 10_000.0, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0, **special, **changes,
        }
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():  # norms off one and biases off zero, so that a model that ignores them is found out
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.mul_(1 + 0.3 * torch.randn_like(weight))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn_like(buffer))
    return model  # type: ignore[no-any-return]


def trained(model: PreTrainedModel, shard: TokenShard, steps: int, seed: int = 0) -> PreTrainedModel:
    """A short real training on the shard's tokens: enough to beat an untrained model clearly."""
    tokens = torch.tensor(shard.tokens.astype("int64"))
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - CONTEXT, (16,), generator=generator)
        batch = torch.stack([tokens[start : start + CONTEXT] for start in starts.tolist()])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def save_export(model: PreTrainedModel, folder: Path, tokenizer: Tokenizer | None = None) -> Path:
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(eos_token_id=[0, 2], pad_token_id=0)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(make_generation_config()))
    if tokenizer is not None:
        tokenizer.copy_to(folder)
    return folder


@contextlib.contextmanager
def plant_of_one_thread(root: Path) -> Iterator[FilledPlant]:
    """A plant in a workspace of its own; while the block runs torch works in one thread, as its matrices are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        workspace = Workspace.create(root / "workspace")
        yield build_plant(workspace, Ledger.create(workspace.ledger_url))
    finally:
        torch.set_num_threads(threads)
