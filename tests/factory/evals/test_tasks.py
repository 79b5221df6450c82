"""Windows, scoring, code checks and byte baselines, compared with plain computations of the same."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from factory.evals.baselines import ByteNgramModel, _chunks
from factory.evals.policy import EvalPolicy
from factory.evals.reference_model import ReferenceModel
from factory.evals.suite import HeldOutDocument
from factory.evals.tasks import (
    ScoredText,
    extract_code,
    has_valid_python,
    list_overlapping_windows,
    score_bits_per_byte,
)
from tests.support.factory.exports import CONTEXT, VOCAB, save_export, tiny_model


@given(st.integers(1, 500), st.integers(2, 64), st.data())
def test_windows_score_every_token_but_the_first_once(length: int, context: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(1, context - 1))
    first = data.draw(st.one_of(st.none(), st.integers(1, context)))
    found = list_overlapping_windows(length, context, overlap, first)
    scored = [position for start, stop, at in found for position in range(at, stop)]
    assert scored == list(range(1, length))
    assert all(0 <= start < at and stop - start <= context for start, stop, at in found[1:])


def test_bits_per_byte_of_windows_is_that_of_each_token_in_its_window(tmp_path: Path) -> None:
    model = ReferenceModel.load(save_export(tiny_model(), tmp_path))
    rng = np.random.default_rng(0)
    texts = []
    for index, length in enumerate((2, 30, CONTEXT, 150)):
        scored = np.ones(length, bool)
        scored[0] = False
        texts.append(
            ScoredText(
                HeldOutDocument(f"d{index}", "code", "s", {}), rng.integers(0, VOCAB, length), scored, 7 * length
            )
        )
    items = score_bits_per_byte(model, texts, EvalPolicy(window_overlap=0.5), lambda n: None)
    for text, item in zip(texts, items, strict=True):
        expected, length = 0.0, len(text.tokens)
        for position in range(1, length):
            start = 0 if position < CONTEXT else ((position - CONTEXT) // (CONTEXT // 2) + 1) * (CONTEXT // 2)
            logits = model.logits(torch.from_numpy(text.tokens[None, start:position]))[0, -1]
            expected -= float(logits.log_softmax(-1)[text.tokens[position]])
        assert math.isclose(item.value, expected, rel_tol=1e-4)
        assert item.weight == text.bytes


def test_code_is_extracted_from_an_answer_and_its_syntax_is_checked() -> None:
    assert (
        extract_code("no code") is None and extract_code("define x") is None and extract_code("from here on, x") is None
    )
    for whole in ("def f(a, *, b=1): ...", "async def f(): ...", "class A(B):\n    x = 1", "from os import path"):
        assert extract_code(whole) == whole and has_valid_python(whole)
    assert not has_valid_python("def f(a, *, b=1: ...")
    assert extract_code("a\n```python\nx = 1\n```\nb\n```\ny\n```") == "x = 1\n"
    assert has_valid_python("```python\nx = 1\n```") and has_valid_python("```python\nx = 1")
    assert (
        not has_valid_python("x = 1")
        and not has_valid_python("```python\nx =\n```")
        and not has_valid_python("```\n\n```")
    )
    assert not has_valid_python("```\n" + "(" * 5000 + "\n```") and not has_valid_python("```\nx\0\n```")


def naive(text: bytes, history: bytes, byte: int) -> float:
    """Interpolated Witten-Bell by counting substrings, two bytes of nothing in front."""
    padded = b"\0\0" + text
    runs = [padded[i : i + 3] for i in range(len(text))]
    lower = (sum(run[2] == byte for run in runs) + 1) / (len(runs) + 256)
    for order in (1, 2):
        follows = Counter(run[2] for run in runs if run[2 - order : 2] == history[-order:])
        lower = (follows[byte] + len(follows) * lower) / (follows.total() + len(follows)) if follows else lower
    return lower


@settings(max_examples=3, deadline=None)
@given(st.binary(min_size=1, max_size=60), st.binary(min_size=3, max_size=3))
def test_byte_ngrams_equal_counting_and_sum_to_one(text: bytes, probe: bytes) -> None:
    model = ByteNgramModel()
    model.add_document(np.frombuffer(text, np.uint8), np.ones(len(text), bool))
    model.finish_counting()
    assert np.allclose(model.bigram.sum(1), 1)
    history = probe[:2] if probe[2] % 2 else (b"\0\0" + text)[-2:]
    bits = [
        model.measure_bits(np.frombuffer(history + bytes([byte]), np.uint8), np.array([False, False, True]))[1]
        for byte in range(256)
    ]
    assert math.isclose(sum(2**-bit for bit in bits), 1, rel_tol=1e-9)
    assert math.isclose(2 ** -bits[probe[2]], naive(text, history, probe[2]), rel_tol=1e-9)


def test_ngrams_are_not_counted_across_joined_documents() -> None:
    texts = [np.frombuffer(part, np.uint8) for part in (b"abc", b"bcd", b"zz")]
    one_by_one, joined = ByteNgramModel(), ByteNgramModel()
    for text in texts:
        one_by_one.add_document(text, np.ones(len(text), bool))
    for text, counted in _chunks(iter([(text, np.ones(len(text), bool)) for text in texts]), size=4):
        joined.add_document(text, counted)
    assert np.array_equal(one_by_one.trigrams, joined.trigrams)
