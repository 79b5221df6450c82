"""The three tasks: bits per byte of held-out documents, cloze questions about them, and greedy chat samples whose code must parse.

Bits per byte: every token after BOS is predicted once, in overlapping windows of the model's context. Special tokens are only context, and so is, in
chat, all text except the assistant's answers. So nats and UTF-8 bytes are of the same text.
Cloze: a context and four continuations of equal length, the true one and three from other held-out documents of the domain. The model is right if the
true one has the fewest nats per byte. In chat, the context is the question and the continuations are beginnings of answers.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from factory.evals.policy import EvalPolicy
from factory.evals.reference_model import ReferenceModel
from factory.evals.reply_code import extract_fenced_code
from factory.evals.suite import HeldOutDocument, Suite, make_shuffling_sort_key
from factory.evals.token_bytes import TokenBytes
from factory.ingest.shapes.chats import has_loss
from factory.ingest.tokenizer import Tokenizer

BATCH_TOKENS = 4096
DISTRACTORS = 3
DEV = "dev"  # bits per byte on the dev half, which alone decides nothing
Advance = Callable[[float], None]


@dataclass(frozen=True)
class EvalItem:
    """A row of the table eval_items."""

    task: str
    item: str
    domain: str
    cluster: str
    value: float
    weight: float


@dataclass(frozen=True)
class ScoredText:
    """A held-out document as tokens. ``scored``: the tokens that are predicted and counted."""

    document: HeldOutDocument
    tokens: npt.NDArray[np.int64]  # [L]
    scored: npt.NDArray[np.bool_]  # [L], False for the first token
    bytes: int  # of the scored tokens


@dataclass(frozen=True)
class ChatSample:
    """A greedy answer. ``parses``: whether its code is valid Python; None if the true answer has no code."""

    item: str
    domain: str
    cluster: str
    question: str
    answer: str
    ended: bool
    parses: bool | None


# -- bits per byte -----------------------------------------------------------------------------------------------------
def encode_documents(
    documents: Sequence[HeldOutDocument], tokenizer: Tokenizer, token_bytes: TokenBytes, limit: int
) -> list[ScoredText]:
    """Encode documents as tokens. Each is cut after ``limit`` scored bytes. Documents without scored tokens are left out."""
    encoded = []
    for document in documents:
        if document.messages is None:
            ids, mask = tokenizer.encode_text(document.content["text"][: 2 * limit])
        else:
            ids, mask = tokenizer.encode_messages(document.messages)
        tokens = ids.astype(np.int64)
        lengths = token_bytes.lengths[tokens]
        scored = mask & (lengths > 0)
        scored[:1] = False
        running = np.cumsum(np.where(scored, lengths, 0))
        keep = running <= limit
        tokens, scored = tokens[keep], scored[keep]
        if scored.any():
            encoded.append(ScoredText(document, tokens, scored, int(running[keep][-1])))
    return encoded


def list_overlapping_windows(
    length: int, context: int, overlap: int, first: int | None = None
) -> list[tuple[int, int, int]]:
    """Return (start, stop, first scored) of each window over ``length`` tokens. The scored parts cover [1, length) exactly once.

    >>> list_overlapping_windows(10, 4, 1)
    [(0, 4, 1), (3, 7, 4), (6, 10, 7)]
    """
    assert 1 <= overlap < context
    stop = min(first or context, length)
    found = [(0, stop, 1)]
    while stop < length:
        start = max(0, stop - overlap)
        found.append((start, min(start + context, length), stop))
        stop = found[-1][1]
    return found


def score_bits_per_byte(
    model: ReferenceModel, texts: Sequence[ScoredText], policy: EvalPolicy, advance: Advance, shifted: bool = False
) -> list[EvalItem]:
    """Return an item for each document: its value is in nats, its weight in UTF-8 bytes.

    ``shifted`` halves the first window, which shifts all others.
    """
    context = model.spec.context
    overlap = min(max(1, int(policy.window_overlap * context)), context - 1)
    first = max(2, context // 2) if shifted else None
    sequences, owner = [], []
    for index, text in enumerate(texts):
        for start, stop, scored_from in list_overlapping_windows(len(text.tokens), context, overlap, first):
            scored = text.scored[start:stop].copy()
            scored[: scored_from - start] = False
            if scored.any():
                sequences.append((text.tokens[start:stop], scored))
                owner.append(index)
    nats = np.zeros(len(texts))
    np.add.at(nats, np.array(owner, np.int64), sum_nats(model, sequences, advance))
    return [
        EvalItem("bpb", text.document.key, text.document.domain, text.document.cluster, float(n), float(text.bytes))
        for text, n in zip(texts, nats, strict=True)
    ]


def sum_nats(
    model: ReferenceModel, sequences: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]], advance: Advance
) -> npt.NDArray[np.float64]:
    """Return the summed nats of the scored tokens of each sequence (tokens [L], scored [L]). Windows of similar length share a batch."""
    nats = np.zeros(len(sequences))
    ranked = sorted(range(len(sequences)), key=lambda i: len(sequences[i][0]), reverse=True)
    while ranked:
        longest = len(sequences[ranked[0]][0])
        batch, ranked = ranked[: max(1, BATCH_TOKENS // longest)], ranked[max(1, BATCH_TOKENS // longest) :]
        tokens_BT = torch.zeros(len(batch), longest, dtype=torch.int64)
        scored_BT = torch.zeros(len(batch), longest, dtype=torch.bool)
        for row, index in enumerate(batch):
            tokens, scored = sequences[index]
            tokens_BT[row, : len(tokens)] = torch.from_numpy(tokens)
            scored_BT[row, : len(tokens)] = torch.from_numpy(scored)
        nats[batch] = model.nll(tokens_BT, scored_BT).double().sum(1).numpy()
        advance(len(batch))
    return nats


def compute_bits_per_byte_by_domain(items: Sequence[EvalItem]) -> dict[str, float]:
    """Return bits per byte of each domain: summed nats over summed bytes."""
    nats: dict[str, float] = defaultdict(float)
    weight: dict[str, float] = defaultdict(float)
    for item in items:
        nats[item.domain] += item.value
        weight[item.domain] += item.weight
    return {domain: nats[domain] / weight[domain] / float(np.log(2)) for domain in sorted(nats)}


def measure_noise_floor(
    model: ReferenceModel,
    texts: Sequence[ScoredText],
    scored_items: Sequence[EvalItem],
    policy: EvalPolicy,
    advance: Advance,
) -> dict[str, float]:
    """Return, for each domain, the difference in bits per byte between two measurements of the same weights on the same documents.

    This is an A/A test: the second measurement shifts every window by half a context, the only arbitrary choice. It bounds the noise of the
    measurement, not the noise between training seeds.
    """
    by_domain: dict[str, list[int]] = defaultdict(list)
    for index, text in enumerate(texts):
        by_domain[text.document.domain].append(index)
    chosen = [index for indices in by_domain.values() for index in indices[: policy.noise_documents_per_domain]]
    again = compute_bits_per_byte_by_domain(
        score_bits_per_byte(model, [texts[i] for i in chosen], policy, advance, shifted=True)
    )
    before = compute_bits_per_byte_by_domain([scored_items[i] for i in chosen])
    return {domain: abs(again[domain] - before[domain]) for domain in before}


# -- cloze -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ClozeItem:
    document: HeldOutDocument
    context: npt.NDArray[np.int64]
    choices: tuple[npt.NDArray[np.int64], ...]  # the true choice comes first
    bytes: tuple[int, ...]


def build_cloze_items(suite: Suite, tokenizer: Tokenizer, policy: EvalPolicy) -> list[ClozeItem]:
    """Return the cloze items of a suite. The items depend only on the suite's documents and the policy."""
    found = []
    for domain in suite.domains:
        pieces = [
            piece
            for document in suite.list_documents_of_domain(domain)
            if (piece := _piece(document, tokenizer, policy))
        ]
        for index, (document, context, true) in enumerate(pieces[: policy.cloze_items_per_domain]):
            others: list[str] = []
            for step in range(1, len(pieces)):
                other, _, text = pieces[(index + step) % len(pieces)]
                if other.cluster != document.cluster and text != true and text not in others:
                    others.append(text)
                if len(others) == DISTRACTORS:
                    choices = [true, *others]
                    ids = tuple(np.array(tokenizer.encode(choice), np.int64) for choice in choices)
                    found.append(ClozeItem(document, context, ids, tuple(len(choice.encode()) for choice in choices)))
                    break
    return found


def _piece(
    document: HeldOutDocument, tokenizer: Tokenizer, policy: EvalPolicy
) -> tuple[HeldOutDocument, npt.NDArray[np.int64], str] | None:
    long = policy.cloze_continuation_bytes
    if document.messages is not None:
        last = max((i for i, message in enumerate(document.messages) if has_loss(message)), default=0)
        if last == 0 or len(document.messages[last]["content"]) < long:
            return None
        return (
            document,
            tokenizer.encode_chat_prompt(document.messages[:last]).astype(np.int64),
            document.messages[last]["content"][:long],
        )
    text = document.content["text"]
    room = len(text) - long - policy.cloze_context_bytes // 2
    if room <= 0:
        return None
    at = policy.cloze_context_bytes // 2 + int(make_shuffling_sort_key("cloze", document.key)[:12], 16) % room
    blank = re.compile(r"\s").search(text, at, at + 32)  # start at a blank after a word, as tokens do
    at = blank.start() if blank and blank.start() + long <= len(text) else at
    begin = max(0, at - policy.cloze_context_bytes)
    context = [*(() if begin else tokenizer.bos), *tokenizer.encode(text[begin:at])]
    return (document, np.array(context, np.int64), text[at : at + long]) if context else None


def score_cloze_items(model: ReferenceModel, items: Sequence[ClozeItem], advance: Advance) -> list[EvalItem]:
    """Return an item for each question. Its value is 1 if the true continuation has the fewest nats per byte, else 0; NaN if a loss is not finite."""
    sequences = []
    for item in items:
        for choice in item.choices:
            context = item.context[-max(1, model.spec.context - len(choice)) :]
            tokens = np.concatenate((context, choice))[: model.spec.context]
            sequences.append((tokens, np.arange(len(tokens)) >= len(context)))
    nats = sum_nats(model, sequences, advance).reshape(-1, DISTRACTORS + 1)
    rows = []
    for item, four in zip(items, nats, strict=True):
        cost = four / np.array(item.bytes)
        right = float(cost[0] < cost[1:].min()) if np.isfinite(cost).all() else float("nan")
        rows.append(EvalItem("cloze", item.document.key, item.document.domain, item.document.cluster, right, 1.0))
    return rows


# -- chat --------------------------------------------------------------------------------------------------------------
def generate_chat_samples(
    model: ReferenceModel, suite: Suite, tokenizer: Tokenizer, policy: EvalPolicy
) -> list[ChatSample]:
    """Return greedy answers to held-out questions. About two in three questions have code in their true answer."""
    questions: list[tuple[HeldOutDocument, list[dict[str, Any]], list[int], bool]] = []
    for document in suite.documents:
        messages = document.messages or []
        at = next((i for i, message in enumerate(messages) if has_loss(message)), 0)
        prompt = tokenizer.encode_chat_prompt(messages[:at]).tolist() if at else []
        if prompt and len(prompt) + 16 <= model.spec.context:
            questions.append((document, messages[:at], prompt, extract_code(messages[at]["content"]) is not None))
    with_code, without = ([entry for entry in questions if entry[3] == code] for code in (True, False))
    share = max(1, policy.chat_samples * 2 // 3)
    questions = (with_code[:share] + without + with_code[share:])[: policy.chat_samples]
    if not questions:
        return []
    room = min(policy.chat_tokens, model.spec.context - max(len(entry[2]) for entry in questions))
    answers = model.generate([entry[2] for entry in questions], room, {*tokenizer.stop_ids})
    samples = []
    for (document, messages, _, has_code), answer in zip(questions, answers, strict=True):
        text = tokenizer.decode(answer.tokens)
        parses = has_valid_python(text) if has_code else None
        samples.append(
            ChatSample(
                document.key, document.domain, document.cluster, messages[-1]["content"], text, answer.ended, parses
            )
        )
    return samples


def make_chat_eval_items(samples: Sequence[ChatSample]) -> list[EvalItem]:
    return [
        EvalItem("chat", s.item, s.domain, s.cluster, float(s.parses), 1.0) for s in samples if s.parses is not None
    ]


def extract_code(text: str) -> str | None:
    """Return the code of an answer: the code in its fences, or the whole answer if it begins like Python; None if there is no code."""
    if (code := extract_fenced_code(text)) is not None:
        return code
    return (
        text
        if re.match(
            r"\s*(?:(?:async\s+)?def\s+\w+\s*\(|class\s+\w+\s*[:(]|@\w|import\s+\w|from\s+\w\S*\s+import\s)", text
        )
        else None
    )


def has_valid_python(text: str) -> bool:
    """Return whether the answer contains valid Python. The code is parsed, never run."""
    code = extract_code(text)
    if code is None or not code.strip():
        return False
    try:
        ast.parse(code[:20_000])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
