"""Decodes sequences with continuous batching: sequences join and leave between any two steps, and do not influence each other.

Each sequence has a row of the cache. The first ``_ready`` rows have read their prompts and are decoded together. The other rows still read their
prompts. A step is one pass of the model: it computes the next token of each ready row and reads at most ``CHUNK`` prompt tokens, so that a long
prompt does not delay other sequences. When a row leaves, the last row takes its place. So the used rows are always a slice, and reading them
copies nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from factory.serving.api.defaults import SamplingSettings
from factory.serving.native.decoder import CachedDecoder

CHUNK = 512  # most prompt tokens in a step
MOST_ROWS = 128


@dataclass(frozen=True)
class DecodingJob:
    """A sequence to continue. The prompt and ``most_tokens`` new tokens together fit into the model's context."""

    key: int
    prompt: list[int]
    most_tokens: int
    sampling: SamplingSettings = SamplingSettings()
    stop_ids: frozenset[int] = frozenset()
    top: int = 0  # how many of the likeliest tokens to return with each token
    seed: int = 0


class ComputedToken(NamedTuple):
    """A token that a step computed for a job. ``end``: 'stop' (the token is in ``stop_ids``), 'length' or 'failed'; '' if the job continues."""

    key: int
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    end: str = ""


@dataclass
class _Row:
    job: DecodingJob
    generator: torch.Generator
    length: int = 0  # number of columns that are written
    written: list[int] = field(default_factory=list)

    @property
    def columns(self) -> int:
        return len(self.job.prompt) + self.job.most_tokens


class DecodingBatch:
    """The sequences that are decoded together. ``room``: the most cache columns (rows × longest row); at least the model's context."""

    def __init__(self, decoder: CachedDecoder, room: int) -> None:
        self.decoder, self.room = decoder, max(room, decoder.spec.context)
        self._waiting: deque[DecodingJob] = deque()
        self._rows: list[_Row] = []
        self._ready = 0
        self._cache = decoder.make_cache(0, 0)

    def add_job(self, job: DecodingJob) -> None:
        assert job.prompt and job.most_tokens > 0
        assert len(job.prompt) + job.most_tokens <= self.decoder.spec.context
        self._waiting.append(job)

    def cancel_job(self, key: int) -> None:
        """Remove a job that waits or runs."""
        self._waiting = deque(job for job in self._waiting if job.key != key)
        for number, row in enumerate(self._rows):
            if row.job.key == key:
                self._leave(number)
                return

    @property
    def waiting_jobs(self) -> int:
        return len(self._waiting)

    @property
    def running_jobs(self) -> int:
        return len(self._rows)

    def run_step(self) -> list[ComputedToken]:
        """Read prompts and compute a token for each ready row. Returns these tokens: none without jobs, or while only prompts are read."""
        self._admit()
        found = self._advance()
        ended = {token.key for token in found if token.end}
        for number in reversed(range(self._ready)):
            if self._rows[number].job.key in ended:
                self._leave(number)
        return found

    # -- the steps ------------------------------------------------------------------------------------------------------
    def _admit(self) -> None:
        while self._waiting and len(self._rows) < MOST_ROWS:
            job = self._waiting[0]
            columns = max([len(job.prompt) + job.most_tokens, *(row.columns for row in self._rows)])
            if self._rows and (len(self._rows) + 1) * columns > self.room:
                break  # jobs start in order of arrival, so that a long job does not wait forever
            self._waiting.popleft()
            self._rows.append(_Row(job, torch.Generator().manual_seed(job.seed)))
        self._grow(len(self._rows), max((row.columns for row in self._rows), default=0))

    def _grow(self, rows: int, columns: int) -> None:
        had = self._cache
        if rows <= had.shape[2] and columns <= had.shape[4]:
            return
        if (more := min(2 * had.shape[2], MOST_ROWS)) * columns <= self.room:
            rows = max(rows, more)
        kept_rows, kept_columns = min(rows, had.shape[2]), min(columns, had.shape[4])
        self._cache = self.decoder.make_cache(rows, columns)
        self._cache[:, :, :kept_rows, :, :kept_columns] = had[:, :, :kept_rows, :, :kept_columns]

    def _advance(self) -> list[ComputedToken]:
        """Run one pass of the model over the last token of each ready row and over pieces of prompts. Returns the new tokens."""
        tokens, left = [row.written[-1:] for row in self._rows[: self._ready]], CHUNK
        for row in self._rows[self._ready :]:
            if not left:
                break
            tokens.append(row.job.prompt[row.length : row.length + left])
            left -= len(tokens[-1])
        if not tokens:
            return []
        rows = self._rows[: len(tokens)]
        logits_BV = self.decoder.compute_logits(tokens, [row.length for row in rows], self._cache)
        for row, piece in zip(rows, tokens, strict=True):
            row.length += len(piece)
        if rows[-1].length < len(rows[-1].job.prompt):  # only the last row can have read a part of its prompt
            rows.pop()
        self._ready = len(rows)
        return self._tokens(rows, logits_BV[: self._ready]) if rows else []

    def _tokens(self, rows: list[_Row], logits_BV: torch.Tensor) -> list[ComputedToken]:
        most_B, least_B = logits_BV.amax(1), logits_BV.amin(1)  # both are NaN if the row has a NaN
        sound = (most_B.isfinite() & least_B.isfinite()).tolist()
        chosen = logits_BV.argmax(1).tolist()
        for number, row in enumerate(rows):
            if sound[number] and row.job.sampling.temperature > 0:
                chosen[number] = sample_token(logits_BV[number], row.job.sampling, row.generator)
        logprobs_BV = logits_BV.log_softmax(1)
        own = logprobs_BV.gather(1, torch.tensor(chosen, device=self.decoder.device)[:, None])[:, 0].tolist()
        most = max(row.job.top for row in rows)
        likeliest, ids = (part.tolist() for part in logprobs_BV.topk(min(most, logprobs_BV.shape[1])))
        found = []
        for number, (row, token) in enumerate(zip(rows, chosen, strict=True)):
            row.written.append(token)
            end = "length" if len(row.written) == row.job.most_tokens else ""
            end = "stop" if token in row.job.stop_ids else end
            top = row.job.top and tuple(zip(ids[number][: row.job.top], likeliest[number][: row.job.top], strict=True))
            found.append(ComputedToken(row.job.key, token, own[number], top or (), end if sound[number] else "failed"))
        return found

    def _leave(self, number: int) -> None:
        """Remove a ready row. The last ready row takes its place, and the last of all rows takes the place of that one."""
        if number < self._ready:
            self._ready -= 1
            self._move(self._ready, number)
            number = self._ready
        self._move(len(self._rows) - 1, number)
        self._rows.pop()
        if not self._rows:
            self._cache = self.decoder.make_cache(0, 0)

    def _move(self, source: int, target: int) -> None:
        if source != target:
            row = self._rows[target] = self._rows[source]
            self._cache[:, :, target, :, : row.length] = self._cache[:, :, source, :, : row.length]


def sample_token(logits_V: torch.Tensor, sampling: SamplingSettings, generator: torch.Generator) -> int:
    """Sample one token by temperature, top-k and top-p. The result depends on the job's seed, not on the other jobs of the batch.

    ``generator`` is on the CPU. One number is drawn from it for each token, even if only one token is possible.
    """
    at = float(torch.rand(1, generator=generator, dtype=torch.float64))
    sorted_V, order_V = (logits_V.double().cpu() / max(sampling.temperature, 1e-6)).sort(descending=True, stable=True)
    if sampling.top_k:
        sorted_V = sorted_V[: sampling.top_k]
    share_V = sorted_V.softmax(0)
    total_V = share_V.cumsum(0)
    kept = 1 + int((total_V < sampling.top_p).sum()) if sampling.top_p < 1 else len(total_V)
    total_V = total_V[:kept]
    place = int(torch.searchsorted(total_V, at * float(total_V[-1]), right=True))
    return int(order_V[min(place, len(total_V) - 1)])
