"""The engine computes each fact of a description as the judge's model does, and writes transformers' tokens for each family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from factory.evals.reference_model import ReferenceModel
from factory.serving.native import batch as batches
from factory.serving.native.batch import ComputedToken, DecodingBatch, DecodingJob
from factory.serving.native.decoder import CachedDecoder
from models.tensors import list_tensor_shapes
from tests.support.models.facts import EXPORTED_CASES, FACTS, make_native_weights, make_spec
from tests.support.models.small_models import SIZES, Case, save_model

CPU = torch.device("cpu")
WRITTEN = 64


def run(batch: DecodingBatch, jobs: list[DecodingJob]) -> dict[int, list[ComputedToken]]:
    """Each job arrives two steps after the one before it."""
    written: dict[int, list[ComputedToken]] = {job.key: [] for job in jobs}
    waiting = list(jobs)
    step = 0
    while waiting or batch.running_jobs or batch.waiting_jobs:
        if waiting and step % 2 == 0:
            batch.add_job(waiting.pop(0))
        for token in batch.run_step():
            written[token.key].append(token)
        step += 1
    return written


@pytest.mark.parametrize("fact", FACTS)
def test_the_engine_computes_each_fact_as_the_judges_model_does(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "CHUNK", 7)  # prompts are read in pieces, beside rows that write
    spec = make_spec(fact)
    weights = make_native_weights(spec)
    judge, engine = ReferenceModel(spec, dict(weights)), CachedDecoder(spec, dict(weights), CPU)
    lengths = {1: 30, 2: 1, 3: 9, 4: 22}
    jobs = [
        DecodingJob(key, [(7 * key + 13 * place) % spec.vocab_size for place in range(length)], 24)
        for key, length in lengths.items()
    ]
    alone = judge.generate([job.prompt for job in jobs], 24, stop=())
    for job, generated, found in zip(jobs, alone, run(DecodingBatch(engine, 1000), jobs).values(), strict=True):
        ids = [*job.prompt, *(token.token for token in found)]
        logprobs_TV = judge.logits(torch.tensor([ids]))[0, len(job.prompt) - 1 : -1].log_softmax(-1)
        assert [token.token for token in found] == logprobs_TV.argmax(-1).tolist() == generated.tokens
        own_T = logprobs_TV.gather(1, torch.tensor(generated.tokens)[:, None])[:, 0]
        assert float((torch.tensor([token.logprob for token in found]) - own_T).abs().max()) < 1e-5


@pytest.mark.parametrize("fact", FACTS)
def test_each_tensor_and_each_fact_takes_part_in_what_the_judges_model_computes(fact: str) -> None:
    """So the test above compares the fact, not two models without it."""
    spec = make_spec(fact)
    weights = make_native_weights(spec)
    tokens_BT = torch.arange(40)[None] * 7 % spec.vocab_size
    logits = ReferenceModel(spec, dict(weights)).logits(tokens_BT)
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
        changed = ReferenceModel(spec, weights | {name: tensor + noise}).logits(tokens_BT)
        assert float((changed - logits).abs().max()) > 1e-3, name
    plain = make_spec("plain")
    if list_tensor_shapes(plain) == list_tensor_shapes(spec) and fact not in ("plain", "dynamic RoPE"):
        other = ReferenceModel(plain, weights).logits(
            tokens_BT
        )  # dynamic RoPE is plain RoPE up to the original context
        assert float((other - logits).abs().max()) > 1e-3


@pytest.mark.parametrize("case", EXPORTED_CASES, ids=str)
def test_the_engine_writes_the_tokens_of_transformers(case: Case, tmp_path: Path) -> None:
    case = replace(case, keys={**case.keys, "max_position_embeddings": 96})
    theirs = case.make_model()
    engine = CachedDecoder.load(save_model(theirs, tmp_path), CPU)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(SIZES["vocab_size"], (length,), generator=generator).tolist() for length in (20, 11)]
    jobs = [DecodingJob(key, prompt, WRITTEN) for key, prompt in enumerate(prompts)]
    theirs.generation_config.eos_token_id = None  # no token ends it
    for job, found in zip(jobs, run(DecodingBatch(engine, 1000), jobs).values(), strict=True):
        ids = torch.tensor([job.prompt])
        wanted = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=WRITTEN, do_sample=False)
        assert [token.token for token in found] == wanted[0, len(job.prompt) :].tolist()
