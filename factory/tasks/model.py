"""A model as tasks use it: log-probabilities of continuations, and generated texts. lm-eval's conventions make the numbers comparable.

As in lm-eval's Hugging Face model, context and continuation are encoded together after BOS, and split after the number of tokens that the
context has alone. Blanks at the context's end belong to the continuation. A context that is too long loses its beginning, which is counted.
Log-probabilities of a window are added in fp32 in the same order: at 340 nats, an fp64 sum differs by 3e-5, enough to change a perplexity.
Without BOS, the stop token stands for an empty context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from factory.evals.export_folder import ExportError
from factory.evals.reference_model import ReferenceModel, choose_likeliest_tokens
from factory.ingest.tokenizer import Tokenizer
from factory.tasks.items import TaskError

Advance = Callable[[float], None]
ROWS = 32  # most sequences in a batch of generation


@dataclass(frozen=True)
class ContinuationScore:
    """The score of a continuation."""

    log_probability: float
    likeliest: bool  # is each of its tokens the likeliest?


@dataclass(frozen=True)
class GeneratedText:
    """A generated text, without its stop."""

    text: str
    ended: bool  # by a stop text or token, not by the limit


@dataclass(frozen=True)
class GenerationParameters:
    """The parameters of generation."""

    max_tokens: int
    stop: tuple[str, ...] = ()
    temperature: float = 0.0  # 0: the likeliest token


@dataclass
class TaskModel:
    """A loaded export with its tokenizer. ``cut_contexts`` counts contexts that lost their beginning."""

    model: ReferenceModel
    tokenizer: Tokenizer
    batch_tokens: int
    cut_contexts: int = field(default=0)

    @classmethod
    def load(cls, export: Path, tokenizer: Tokenizer, batch_tokens: int, device: str) -> TaskModel:
        """Load an export onto a device. Raises: TaskError for an invalid export."""
        try:
            model = ReferenceModel.load(export)
        except ExportError as error:
            raise TaskError(
                "model.odd_export", "The model cannot be loaded: {problem}", problem=error.message
            ) from error
        if model.spec.vocab_size < tokenizer.vocab_size:
            raise TaskError(
                "model.small_vocabulary",
                "The model cannot be measured, because its vocabulary has {model:,} tokens, but the tokenizer has "
                "{tokenizer:,}",
                model=model.spec.vocab_size, tokenizer=tokenizer.vocab_size,
            )  # fmt: skip
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(model.move_to(device), tokenizer, batch_tokens)

    @property
    def context_length(self) -> int:
        return self.model.spec.context

    @property
    def empty_context_tokens(self) -> list[int]:
        """The tokens before a text that has no context."""
        return list(self.tokenizer.bos) or [self.tokenizer.stop_token]

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of context and continuation. Raises: TaskError if the continuation has no tokens."""
        kept = context.rstrip()
        continuation, context = context[len(kept) :] + continuation, kept
        alone = self.tokenizer.encode(context)
        before = [*self.tokenizer.bos, *alone] or self.empty_context_tokens
        after = self.tokenizer.encode(context + continuation)[len(alone) :]
        if not after:
            raise TaskError(
                "model.no_tokens", "The continuation {text!r} has no tokens, so it has no score", text=continuation[:40]
            )
        return before, after

    def score_continuations(self, pairs: Sequence[tuple[str, str]], advance: Advance) -> list[ContinuationScore]:
        """The score of each (context, continuation). Raises: TaskError for a continuation longer than the model's context, or a score not finite."""
        sequences = []
        for context, continuation in pairs:
            before, after = self.encode_pair(context, continuation)
            if len(after) > self.context_length:
                raise TaskError(
                    "model.long_answer", "An answer of {tokens:,} tokens is longer than the model's context of {context:,} tokens: {text!r}",
                    tokens=len(after), context=self.context_length, text=continuation[:60],
                )  # fmt: skip
            sequences.append((before, after))
        return self.score_tokens(sequences, advance)

    def score_tokens(
        self, sequences: Sequence[tuple[list[int], list[int]]], advance: Advance
    ) -> list[ContinuationScore]:
        """The score of each (context tokens, continuation tokens). Each pair is one window."""
        found = [ContinuationScore(0.0, True)] * len(sequences)
        kept = []
        for before, after in sequences:
            whole = (before + after)[-(self.context_length + 1) :]
            self.cut_contexts += len(before) + len(after) > len(whole)
            kept.append((whole, len(after)))
        ranked = sorted(range(len(kept)), key=lambda i: len(kept[i][0]), reverse=True)
        while ranked:
            longest = len(kept[ranked[0]][0])
            many = max(1, self.batch_tokens // longest)
            batch, ranked = ranked[:many], ranked[many:]
            tokens_BT = torch.zeros(len(batch), longest, dtype=torch.int64)
            scored_BT = torch.zeros(len(batch), longest, dtype=torch.bool)
            for row, index in enumerate(batch):
                whole, last = kept[index]
                tokens_BT[row, : len(whole)] = torch.tensor(whole)
                scored_BT[row, len(whole) - last : len(whole)] = True
            nats_BT, likeliest_BT = self.model.score_tokens(tokens_BT, scored_BT)
            for row, index in enumerate(batch):
                whole, last = kept[index]
                log_probability = -float(nats_BT[row, len(whole) - last : len(whole)].sum())
                if not math.isfinite(log_probability):
                    text = self.tokenizer.decode(whole[-last:])[:60]
                    raise TaskError(
                        "model.not_finite",
                        "The log-probability of {text!r} is not finite, so the model has no score",
                        text=text,
                    )
                found[index] = ContinuationScore(log_probability, bool((likeliest_BT | ~scored_BT)[row].all()))
            advance(len(batch))
        return found

    def score_whole_texts(self, texts: Sequence[str], advance: Advance) -> list[float]:
        """The log-probability of each whole text, its own BOS included, in windows that do not overlap and start after another BOS."""
        sequences, owner = [], []
        for index, text in enumerate(texts):
            tokens = [*self.empty_context_tokens, *self.tokenizer.bos, *self.tokenizer.encode(text)]
            for start, stop in _windows(len(tokens) - 1, self.context_length):
                begin = max(0, stop - self.context_length)
                sequences.append((tokens[begin : start + 1], tokens[start + 1 : stop + 1]))
                owner.append(index)
        sums = np.zeros(len(texts))
        scored = self.score_tokens(sequences, advance)
        np.add.at(sums, np.array(owner, np.int64), np.array([one.log_probability for one in scored]))
        return [float(value) for value in sums]

    def generate(
        self, prompts: Sequence[str], parameters: GenerationParameters, seeds: Sequence[int], advance: Advance
    ) -> list[GeneratedText]:
        """A text for each prompt, drawn with the prompt's own seed. Raises: TaskError if ``max_tokens`` leaves no room for a prompt."""
        room = self.context_length - parameters.max_tokens
        if room <= 0:
            raise TaskError(
                "model.no_room",
                "An answer of {max_tokens:,} tokens leaves no room for a question in the model's context of {context:,} tokens. "
                "Lower max_tokens of the task",
                max_tokens=parameters.max_tokens, context=self.context_length,
            )  # fmt: skip
        encoded = []
        for prompt in prompts:
            tokens = self.tokenizer.encode_text_prompt(prompt).tolist() or self.empty_context_tokens
            self.cut_contexts += len(tokens) > room
            encoded.append(tokens[-room:])
        ranked = sorted(range(len(encoded)), key=lambda i: len(encoded[i]), reverse=True)
        found: list[GeneratedText] = [GeneratedText("", False)] * len(encoded)
        stops = {*self.tokenizer.stop_ids}
        while ranked:
            many = max(1, min(ROWS, self.batch_tokens // (len(encoded[ranked[0]]) + parameters.max_tokens)))
            batch, ranked = ranked[:many], ranked[many:]
            draw = (
                _likeliest
                if parameters.temperature == 0
                else _draw([seeds[index] for index in batch], parameters.temperature)
            )
            written = self.model.generate(
                [encoded[index] for index in batch],
                parameters.max_tokens,
                stops,
                draw,
                lambda tokens: any(word in self.tokenizer.decode(tokens) for word in parameters.stop),
            )
            for index, one in zip(batch, written, strict=True):
                found[index] = GeneratedText(_until(self.tokenizer.decode(one.tokens), parameters.stop), one.ended)
            advance(len(batch))
        return found


def _windows(count: int, context: int) -> list[tuple[int, int]]:
    """The targets [start, stop) of each window over ``count`` targets.

    >>> _windows(10, 4)
    [(0, 4), (4, 8), (8, 10)]
    """
    return [(start, min(start + context, count)) for start in range(0, count, context)]


def _refuse_unmeasured(logits_BV: torch.Tensor) -> None:
    if not torch.isfinite(logits_BV).all():
        raise TaskError("model.logits_not_finite", "The model's logits are not finite, so it cannot generate texts")


def _likeliest(logits_BV: torch.Tensor) -> torch.Tensor:
    _refuse_unmeasured(logits_BV)
    return choose_likeliest_tokens(logits_BV)


def _until(text: str, stop: Sequence[str]) -> str:
    for word in stop:
        text = text.split(word)[0]
    return text


def _draw(seeds: Sequence[int], temperature: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Draw each row's token with the row's own random numbers (Gumbel noise), so that a text does not depend on its batch."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def choose(logits_BV: torch.Tensor) -> torch.Tensor:
        uniform_BV = torch.stack(
            [torch.rand(logits_BV.shape[1], generator=one, dtype=torch.float64) for one in generators]
        )
        _refuse_unmeasured(logits_BV)
        noise_BV = -(-uniform_BV.clamp(min=1e-300).log()).log()
        return (logits_BV.double() / temperature + noise_BV).argmax(-1)

    return choose
