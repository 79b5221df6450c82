"""The embedded engine: many requests in one batch against one after the other, and against ``generate`` of transformers on the same export.

``python -m pytest benchmarks/serving/test_throughput.py -s``. One process, fp32, a model of the demo's shape with weights as they are initialised;
64 tokens are read and 64 written by each request, greedy. Two contenders run one after the other, in turns first, and the median of the ratios of
such pairs counts: what else the machine does then burdens both. Without HTTP: the router and the API add what ``test_swap.py`` and its clients
see, not what a token costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch

from factory.serving.native.batch import DecodingBatch, DecodingJob
from factory.serving.native.decoder import CachedDecoder
from tests.support.factory.exports import save_export, tiny_model

READ, WRITTEN = 64, 64
PAIRS = {"transformers": 11, "one by one": 3}  # after one that is not counted
SHAPE = {
    "vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 768, "max_position_embeddings": 256,
}  # fmt: skip
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Way = Callable[[list[list[int]]], list[list[int]]]  # prompts → what is written after each


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Way]:
    model = tiny_model(0, "qwen3", **SHAPE)
    decoder = CachedDecoder.load(save_export(model, tmp_path_factory.mktemp("export") / "export"), DEVICE)
    model = model.to(DEVICE)
    model.generation_config.eos_token_id = (
        None  # no token ends it, as none ends a Job here; a least length would cost it a pass over all logits
    )

    def batched(prompts: list[list[int]]) -> list[list[int]]:
        batch = DecodingBatch(decoder, room=1 << 20)
        for number, prompt in enumerate(prompts):
            batch.add_job(DecodingJob(number, prompt, WRITTEN))
        written: list[list[int]] = [[] for _ in prompts]
        while batch.running_jobs or batch.waiting_jobs:
            for token in batch.run_step():
                written[token.key].append(token.token)
        return written

    def one_by_one(prompts: list[list[int]]) -> list[list[int]]:
        return [batched([prompt])[0] for prompt in prompts]

    def transformers(prompts: list[list[int]]) -> list[list[int]]:
        ids = torch.tensor(prompts, device=DEVICE)
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=WRITTEN,
                do_sample=False,
            )
        return [row[READ:] for row in found.tolist()]

    return {"batched": batched, "one by one": one_by_one, "transformers": transformers}


@pytest.mark.parametrize("requests", [1, 8, 32])
def test_a_batch_is_faster_than_one_after_the_other_and_than_transformers(ways: dict[str, Way], requests: int) -> None:
    generator = torch.Generator().manual_seed(requests)
    prompts = torch.randint(3, SHAPE["vocab_size"], (requests, READ), generator=generator).tolist()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    ratios = {other: paired_ratio(ways, other, prompts, seconds) for other in PAIRS}
    rates = {name: len(prompts) * WRITTEN / statistics.median(taken) for name, taken in seconds.items()}
    print(
        f"\n{requests:3} requests: "
        + ", ".join(f"{name} {value:,.0f} tokens/s" for name, value in rates.items())
        + "; "
        + ", ".join(f"{value:.2f} × {name}" for name, value in ratios.items())
    )
    assert ratios["transformers"] > 1
    assert requests == 1 or ratios["one by one"] > 1.5


def paired_ratio(ways: dict[str, Way], other: str, prompts: list[list[int]], seconds: dict[str, list[float]]) -> float:
    """How many times as long ``other`` takes as a batch. The seconds of each are added to ``seconds``."""
    ratios = []
    for number in range(PAIRS[other] + 1):
        taken: dict[str, float] = {}
        for name in ("batched", other) if number % 2 else (other, "batched"):
            began = time.perf_counter()
            written = ways[name](prompts)
            taken[name] = time.perf_counter() - began
            assert [len(row) for row in written] == [WRITTEN] * len(prompts)
        if number:
            ratios.append(taken[other] / taken["batched"])
            for name, value in taken.items():
                seconds[name].append(value)
    return statistics.median(ratios)
