"""What tasks ask of a model: log-probabilities of a continuation, and continuations, with the conventions of lm-eval, so that numbers compare.

As its Hugging Face model does: context and continuation are encoded together, after BOS, and split after as many tokens as the context has alone;
blanks at the context's end belong to the continuation; what is too long loses its beginning. That is counted. Log-probabilities of one window are
added up in fp32 and in the same order: at 340 nats an fp64 sum is another number by 3e-5, which a perplexity shows. Of a tokenizer without BOS the
stop token stands for an empty context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from factory.evals.export_config import ExportError
from factory.evals.reference_model import ReferenceModel, greedy
from factory.ingest.tokenizer import Tokenizer
from factory.tasks.items import TaskError

Advance = Callable[[float], None]
ROWS = 32  # most sequences that are generated at once


@dataclass(frozen=True)
class Scored:
    """Of one continuation."""

    log_probability: float
    likeliest: bool  # each of its tokens was the most likely one


@dataclass(frozen=True)
class Drawn:
    """One generated text, up to its stop."""

    text: str
    ended: bool  # by a stop, not by the limit


@dataclass(frozen=True)
class Drawing:
    """How texts are generated."""

    max_tokens: int
    stop: tuple[str, ...] = ()
    temperature: float = 0.0  # 0: the likeliest token


@dataclass
class TaskModel:
    """A loaded export with its tokenizer. ``cut`` counts contexts that lost their beginning."""

    model: ReferenceModel
    tokenizer: Tokenizer
    batch_tokens: int
    cut: int = field(default=0)

    @classmethod
    def load(cls, export: Path, tokenizer: Tokenizer, batch_tokens: int, device: str) -> TaskModel:
        """Raises: TaskError for an export that is not one."""
        try:
            model = ReferenceModel.load(export)
        except ExportError as error:
            raise TaskError(f"the model cannot be measured: {error}") from error
        if model.config.vocab_size < tokenizer.vocab_size:
            raise TaskError(
                f"the model cannot be measured: {model.config.vocab_size} tokens in the model, {tokenizer.vocab_size} in the tokenizer"
            )
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(model.to(device), tokenizer, batch_tokens)

    @property
    def context(self) -> int:
        return self.model.config.context

    @property
    def prefix(self) -> list[int]:
        """What stands before a text that has nothing before it."""
        return list(self.tokenizer.bos) or [self.tokenizer.stop_token]

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of both. Raises: TaskError when the continuation has none."""
        kept = context.rstrip()
        continuation, context = context[len(kept) :] + continuation, kept
        alone = self.tokenizer.ids(context)
        before = [*self.tokenizer.bos, *alone] or self.prefix
        after = self.tokenizer.ids(context + continuation)[len(alone) :]
        if not after:
            raise TaskError(f"a continuation of {continuation[:40]!r} has no token of its own: nothing can be scored")
        return before, after

    def log_probabilities(self, pairs: Sequence[tuple[str, str]], advance: Advance) -> list[Scored]:
        """Of each (context, continuation). Raises: TaskError when one is longer than the model's context, or not finite."""
        sequences = []
        for context, continuation in pairs:
            before, after = self.encode_pair(context, continuation)
            if len(after) > self.context:
                raise TaskError(
                    f"an answer of {len(after)} tokens is longer than the model's context of {self.context}: {continuation[:60]!r}"
                )
            sequences.append((before, after))
        return self.score_tokens(sequences, advance)

    def score_tokens(self, sequences: Sequence[tuple[list[int], list[int]]], advance: Advance) -> list[Scored]:
        """Of each (context tokens, continuation tokens), which lie in one window."""
        found = [Scored(0.0, True)] * len(sequences)
        kept = []
        for before, after in sequences:
            whole = (before + after)[-(self.context + 1) :]
            self.cut += len(before) + len(after) > len(whole)
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
            nats_BT, likeliest_BT = self.model.scores(tokens_BT, scored_BT)
            for row, index in enumerate(batch):
                whole, last = kept[index]
                log_probability = -float(nats_BT[row, len(whole) - last : len(whole)].sum())
                if not math.isfinite(log_probability):
                    text = self.tokenizer.decode(whole[-last:])[:60]
                    raise TaskError(
                        f"the model gives no finite log-probability of {text!r}: nothing can be said of its answers"
                    )
                found[index] = Scored(log_probability, bool((likeliest_BT | ~scored_BT)[row].all()))
            advance(len(batch))
        return found

    def rolling(self, texts: Sequence[str], advance: Advance) -> list[float]:
        """The log-probability of each whole text: every token once, the text's own BOS too, in windows that do not overlap, after BOS."""
        sequences, owner = [], []
        for index, text in enumerate(texts):
            tokens = [*self.prefix, *self.tokenizer.bos, *self.tokenizer.ids(text)]
            for start, stop in _windows(len(tokens) - 1, self.context):
                begin = max(0, stop - self.context)
                sequences.append((tokens[begin : start + 1], tokens[start + 1 : stop + 1]))
                owner.append(index)
        sums = np.zeros(len(texts))
        scored = self.score_tokens(sequences, advance)
        np.add.at(sums, np.array(owner, np.int64), np.array([one.log_probability for one in scored]))
        return [float(value) for value in sums]

    def generate(self, prompts: Sequence[str], how: Drawing, seeds: Sequence[int], advance: Advance) -> list[Drawn]:
        """One text for each prompt, drawn with its own seed. Raises: TaskError when the limit leaves no room for a prompt."""
        room = self.context - how.max_tokens
        if room <= 0:
            raise TaskError(
                f"{how.max_tokens} tokens of an answer leave no room for a question in the model's context of {self.context}: "
                "lower max_tokens of the task"
            )
        encoded = []
        for prompt in prompts:
            tokens = self.tokenizer.text_prompt(prompt).tolist() or self.prefix
            self.cut += len(tokens) > room
            encoded.append(tokens[-room:])
        ranked = sorted(range(len(encoded)), key=lambda i: len(encoded[i]), reverse=True)
        found: list[Drawn] = [Drawn("", False)] * len(encoded)
        stops = {self.tokenizer.end_token, self.tokenizer.stop_token}
        while ranked:
            many = max(1, min(ROWS, self.batch_tokens // (len(encoded[ranked[0]]) + how.max_tokens)))
            batch, ranked = ranked[:many], ranked[many:]
            draw = _likeliest if how.temperature == 0 else _draw([seeds[index] for index in batch], how.temperature)
            written = self.model.generate(
                [encoded[index] for index in batch],
                how.max_tokens,
                stops,
                draw,
                lambda tokens: any(word in self.tokenizer.decode(tokens) for word in how.stop),
            )
            for index, one in zip(batch, written, strict=True):
                found[index] = Drawn(_until(self.tokenizer.decode(one.tokens), how.stop), one.ended)
            advance(len(batch))
        return found


def _windows(count: int, context: int) -> list[tuple[int, int]]:
    """[start, stop) of the targets of each window over ``count`` targets, the last one too.

    >>> _windows(10, 4)
    [(0, 4), (4, 8), (8, 10)]
    """
    return [(start, min(start + context, count)) for start in range(0, count, context)]


def _refuse_unmeasured(logits_BV: torch.Tensor) -> None:
    if not torch.isfinite(logits_BV).all():
        raise TaskError("the model gives no finite log-probability: nothing can be said of its answers")


def _likeliest(logits_BV: torch.Tensor) -> torch.Tensor:
    _refuse_unmeasured(logits_BV)
    return greedy(logits_BV)


def _until(text: str, stop: Sequence[str]) -> str:
    for word in stop:
        text = text.split(word)[0]
    return text


def _draw(seeds: Sequence[int], temperature: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Draws each row's token with its own numbers (the largest logit with Gumbel noise), so that a text does not depend on its batch."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def choose(logits_BV: torch.Tensor) -> torch.Tensor:
        uniform_BV = torch.stack(
            [torch.rand(logits_BV.shape[1], generator=one, dtype=torch.float64) for one in generators]
        )
        _refuse_unmeasured(logits_BV)
        noise_BV = -(-uniform_BV.clamp(min=1e-300).log()).log()
        return (logits_BV.double() / temperature + noise_BV).argmax(-1)

    return choose
