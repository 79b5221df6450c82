"""Requests join and leave a batch at any moment. Each gets the tokens that the judge's model gives for it alone."""

from __future__ import annotations

import functools
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from factory.evals.reference_model import ReferenceModel
from factory.serving.api.defaults import SamplingSettings
from factory.serving.native import batch as batches
from factory.serving.native.batch import ComputedToken, DecodingBatch, DecodingJob
from factory.serving.native.decoder import CachedDecoder
from factory.serving.native.engine_loop import EngineLoop
from tests.support.factory.exports import CONTEXT, FAMILIES, VOCAB, save_export, tiny_model

KINDS = {name: {} for name in FAMILIES} | {
    "glm4_moe, no shared expert": {"n_shared_experts": 0, "first_k_dense_replace": 0, "use_qk_norm": True},
    "llama, head of its own": {"tie_word_embeddings": False},
}


@functools.cache
def models(kind: str) -> tuple[CachedDecoder, ReferenceModel]:
    with tempfile.TemporaryDirectory() as folder:
        export = save_export(tiny_model(3, kind.partition(",")[0], **KINDS[kind]), Path(folder))  # type: ignore[arg-type]
        return CachedDecoder.load(export, torch.device("cpu")), ReferenceModel.load(export)


@functools.cache
def alone(kind: str, prompt: tuple[int, ...], count: int) -> list[tuple[int, float]]:
    """Greedy tokens and their log-probabilities, each from a full forward pass without a cache."""
    ids, found = list(prompt), []
    for _ in range(count):
        logprobs = models(kind)[1].logits(torch.tensor([ids]))[0, -1].log_softmax(-1)
        ids.append(int(logprobs.argmax()))
        found.append((ids[-1], float(logprobs[ids[-1]])))
    return found


def run(
    batch: DecodingBatch, arrivals: list[tuple[int, DecodingJob]], leave: dict[int, int]
) -> dict[int, list[ComputedToken]]:
    """``arrivals``: (step, job); ``leave``: a job's key and the tokens after which it is cancelled."""
    written: dict[int, list[ComputedToken]] = {job.key: [] for _, job in arrivals}
    number = 0
    while any(step >= number for step, _ in arrivals) or batch.running_jobs or batch.waiting_jobs:
        for step, job in arrivals:
            if step == number:
                batch.add_job(job)
        for token in batch.run_step():
            written[token.key].append(token)
            if leave.get(token.key) == len(written[token.key]) and not token.end:
                batch.cancel_job(token.key)
        number += 1
    return written


jobs = st.lists(
    st.tuples(
        st.integers(0, 12),  # arrives at this step
        st.integers(1, 40),  # prompt tokens
        st.integers(1, 20),  # tokens to write
        st.none() | st.integers(1, 8),  # leaves after so many
    ),
    min_size=1,
    max_size=9,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(drawn=jobs, room=st.sampled_from([CONTEXT, 3 * CONTEXT, 100 * CONTEXT]), chunk=st.sampled_from([5, 512]))
def test_sequences_that_join_and_leave_do_not_change_other_sequences(
    kind: str, drawn: list[tuple[int, ...]], room: int, chunk: int
) -> None:
    arrivals, leave = [], {}
    for key, (step, length, count, gone) in enumerate(drawn):
        prompt = [(7 * key + 13 * place + length) % VOCAB for place in range(length)]
        arrivals.append((step, DecodingJob(key, prompt, count, top=3)))
        if gone:
            leave[key] = gone
    before, batches.CHUNK = batches.CHUNK, chunk
    try:
        written = run(DecodingBatch(models(kind)[0], room), arrivals, leave)
    finally:
        batches.CHUNK = before
    for _, job in arrivals:
        count = min(leave.get(job.key, job.most_tokens), job.most_tokens)
        expected = alone(kind, tuple(job.prompt), count)
        found = written[job.key]
        assert [token.token for token in found] == [token for token, _ in expected]
        assert max(abs(token.logprob - logprob) for token, (_, logprob) in zip(found, expected, strict=True)) < 1e-5
        assert all(token.top[0] == (token.token, token.logprob) and len(token.top) == 3 for token in found)
        assert [token.end for token in found[:-1]] == [""] * (count - 1)
        assert found[-1].end == ("length" if count == job.most_tokens else "")


def test_one_step_processes_prompts_and_single_tokens_in_one_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, _ = models("qwen3")
    passes: list[list[int]] = []
    logits = decoder.compute_logits

    def counting(tokens: list[list[int]], starts: list[int], cache: torch.Tensor) -> torch.Tensor:
        passes.append([len(row) for row in tokens])
        return logits(tokens, starts, cache)

    monkeypatch.setattr(decoder, "compute_logits", counting)
    run(
        DecodingBatch(decoder, 10_000),
        [(0, DecodingJob(1, [5, 6, 7], 4)), (0, DecodingJob(2, [8, 9], 3)), (2, DecodingJob(3, [4] * 6, 1))],
        {},
    )
    assert passes == [[3, 2], [1, 1], [1, 1, 6], [1]]


def test_joined_weight_matrices_are_in_memory_once() -> None:
    for kind in KINDS:
        decoder, _ = models(kind)
        weights = decoder.weights.values()
        held = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in weights}
        assert sum(held.values()) == sum(weight.nbytes for weight in weights)


def test_a_stop_token_ends_its_row_and_other_rows_continue() -> None:
    decoder, _ = models("qwen3")
    expected = [token for token, _ in alone("qwen3", (5, 6, 7), 20)]
    stop = expected[4]
    arrivals = [(0, DecodingJob(1, [5, 6, 7], 20, stop_ids=frozenset({stop}))), (0, DecodingJob(2, [5, 6, 7], 20))]
    written = run(DecodingBatch(decoder, 1000), arrivals, {})
    first = expected.index(stop)
    assert [t.token for t in written[1]] == expected[: first + 1] and written[1][-1].end == "stop"
    assert [t.token for t in written[2]] == expected and written[2][-1].end == "length"


def test_sampled_tokens_depend_only_on_the_seed_of_their_job() -> None:
    decoder, _ = models("qwen3")
    hot = lambda key, seed: DecodingJob(key, [9, 8, 7], 25, SamplingSettings(1.0, 0.95), seed=seed)
    one = [t.token for t in run(DecodingBatch(decoder, 10_000), [(0, hot(1, 4))], {})[1]]
    many = run(DecodingBatch(decoder, 10_000), [(n % 3, hot(n, n)) for n in range(8)], {})
    assert [t.token for t in many[4]] == one
    assert len({tuple(t.token for t in row) for row in many.values()}) == 8


def test_jobs_that_arrive_together_start_in_the_same_step() -> None:
    decoder, _ = models("qwen3")
    loop = EngineLoop(DecodingBatch(decoder, 10_000))
    over = threading.Barrier(9)
    ends: list[str] = []

    def listen(token: ComputedToken | None) -> None:
        if token is None or token.end:
            ends.append(token.end if token else "failed")
            threading.Thread(target=over.wait).start()

    with loop.collect_submitted_jobs():
        for number in range(8):
            loop.submit_job(listen, lambda key, number=number: DecodingJob(key, [9, 8, 7], 5, seed=number))  # type: ignore[misc]
            time.sleep(0.05)  # longer than a step: one alone would have been begun
    over.wait()
    assert ends == ["length"] * 8 and loop.steps <= 5


def test_sampled_token_frequencies_follow_temperature_and_top_p() -> None:
    from factory.serving.native.batch import sample_token

    logits, generator = torch.tensor([2.0, 1.0, 0.0, -1.0]), torch.Generator().manual_seed(0)
    for sampling, expected in (
        (SamplingSettings(1.0), logits.softmax(0)),
        (SamplingSettings(0.5), (2 * logits).softmax(0)),
        (SamplingSettings(1.0, top_p=0.8), torch.tensor([0.7311, 0.2689, 0, 0])),
        (SamplingSettings(1.0, top_k=1), torch.tensor([1.0, 0, 0, 0])),
        (SamplingSettings(1.0, top_p=0.0), torch.tensor([1.0, 0, 0, 0])),
    ):
        drawn = (
            torch.bincount(torch.tensor([sample_token(logits, sampling, generator) for _ in range(4000)]), minlength=4)
            / 4000
        )
        assert (drawn - expected).abs().max() < 0.03, sampling


def test_logits_that_are_nan_fail_the_row() -> None:
    decoder, _ = models("llama")
    broken = CachedDecoder(
        decoder.spec,
        decoder.weights | {"final_norm": decoder.weights["final_norm"] * 3e38},
        decoder.device,
    )
    tokens = run(DecodingBatch(broken, 1000), [(0, DecodingJob(1, [5, 6], 9))], {})[1]
    assert [token.end for token in tokens] == ["failed"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_writes_what_the_cpu_writes(kind: str) -> None:
    decoder = models(kind)[0]
    there = CachedDecoder(decoder.spec, decoder.weights, torch.device("cuda"))
    arrivals = [(n % 4, DecodingJob(n, [(3 * n + i) % VOCAB for i in range(1 + 5 * n)], 20)) for n in range(8)]
    for key, found in run(DecodingBatch(there, 10_000), arrivals, {}).items():
        assert [t.token for t in found] == [token for token, _ in alone(kind, tuple(arrivals[key][1].prompt), 20)]
