"""Imported models to serve: a small model of transformers' class, with a tokenizer in the form of its family, that is release 0 of a workspace."""

from __future__ import annotations

import asyncio
import functools
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import torch

from factory.core.progress import SILENT
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.presets.imported_workspace import ImportOptions, make_imported_workspace
from factory.serving.engines import EngineKind
from models.adapters import FAMILIES
from tests.support.models.small_models import Case, save_model
from tests.support.serving.served import Serving, serving
from tests.support.text.library import library
from tests.support.tokenizers.families import FAMILIES as TOKENIZERS

VOCABULARY = 1536  # rows of the embeddings, at least as many as each tokenizer has tokens
PROMPTS = (16, 5)  # lengths: one request asks for the continuations of both
# the tokenizer whose form is nearest to that of the family's models
TOKENIZER_OF_FAMILY = {
    "llama": "llama3", "qwen2": "qwen2.5", "qwen3": "qwen2.5", "qwen3_moe": "qwen2.5", "smollm3": "smollm2", "olmo2": "tagged",
    "mistral": "mistral", "gemma2": "gemma", "gemma3_text": "gemma", "glm4_moe": "tagged", "deepseek_v3": "llama3",
    "olmo3": "tagged", "exaone4": "tagged", "seed_oss": "tagged", "mixtral": "mistral", "olmoe": "tagged", "nanochat": "tagged", "phi3": "tagged",
    "gpt_oss": "tagged",
}  # fmt: skip


@functools.cache
def make_tokenizer_folder(name: str) -> Path:
    """Train the tokenizer once in a process."""
    folder = Path(tempfile.mkdtemp(prefix="factory-tests-tokenizer-")) / name
    return TOKENIZERS[name].write(folder, [library()[module].text for module in ("inspect", "ast", "json")])


@dataclass(frozen=True)
class Imported:
    """The folder of a model, and the workspace that was made from it."""

    source: Path
    workspace: Workspace
    ledger: Ledger

    @property
    def plant(self) -> Plant:
        return Plant(self.workspace, self.ledger)


def import_case(case: Case, root: Path, tokenizer: str = "", repository: Path | None = None) -> Imported:
    """Write a case's model with a tokenizer, and import it. ``tokenizer``: '' for that of the case's family. ``repository``: of the live code."""
    source = root / str(case)
    save_model(replace(case, keys={**case.keys, "vocab_size": VOCABULARY}).make_model(), source)
    tokens = make_tokenizer_folder(tokenizer or TOKENIZER_OF_FAMILY[case.family])
    shutil.copytree(tokens, source, dirs_exist_ok=True)
    facts = make_imported_workspace(root / "workspace", ImportOptions(source), repository, SILENT)
    assert (facts["family"], facts["release"]) == (case.family, 0)
    workspace = Workspace.open(Path(facts["workspace"]))
    return Imported(source, workspace, Ledger.open(workspace.ledger_url, workspace.root))


def make_prompts() -> list[list[int]]:
    """Random ids, of every kind that the model has an embedding for."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in PROMPTS]


def generate_in_transformers(case: Case, source: Path, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """What ``generate`` of transformers writes after each prompt, greedily and past every end token."""
    import transformers

    kind = getattr(transformers, FAMILIES[case.family].class_name)
    model = kind.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    written = [model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)[0] for ids in prompts]
    return [row[len(ids) :].tolist() for row, ids in zip(written, prompts, strict=True)]


async def ask_for_ids(client: httpx.AsyncClient, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """What the served model writes after each prompt, by /v1/completions: greedily and past every end token."""
    asked: dict[str, Any] = {"prompt": prompts, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    asked |= {"logprobs": 1, "return_tokens_as_token_ids": True}
    answer = await client.post("/v1/completions", json=asked)
    assert answer.status_code == 200 and answer.headers["x-factory-release"] == "0", answer.text
    choices = sorted(answer.json()["choices"], key=lambda choice: int(choice["index"]))
    return [[int(name.removeprefix("token_id:")) for name in choice["logprobs"]["tokens"]] for choice in choices]


async def wait_until_served(served: Serving) -> None:
    """A start is as long as it is: only its failure ends the waiting."""
    while not served.supervisor.current:
        assert not served.supervisor.trouble, served.supervisor.trouble
        await asyncio.sleep(0.05)


def count_different_served_tokens(case: Case, root: Path, count: int, kind: EngineKind | None = None) -> int:
    """Import a case's model, serve its release 0 over HTTP, and compare greedy continuations with those that transformers writes with the source.

    Returns how many of ``count`` tokens a prompt differ. The server itself has compared the engine with the judge's model before it answers.
    """
    imported, prompts = import_case(case, root), make_prompts()

    async def scene() -> list[list[int]]:
        async with serving(imported.workspace, imported.ledger, kind) as served:
            await wait_until_served(served)
            return await ask_for_ids(served.client, prompts, count)

    found = asyncio.run(scene())
    expected = generate_in_transformers(case, imported.source, prompts, count)
    assert [len(row) for row in found] == [len(row) for row in expected] == [count] * len(prompts)
    pairs = zip(found, expected, strict=True)
    return sum(a != b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
