"""The workspace's one tokenizer: loaded when it exists, else trained on a bounded sample of what waits to be ingested.

The sample is taken from the training documents of the first shard and, in equal shares, from the other shards in the
inbox, so that a first shard of chats does not leave code without tokens of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import sqlalchemy as sa

from factory.core.errors import DamagedTokenizerError, InputError
from factory.core.faults import cannot_be_read_now
from factory.core.progress import Progress
from factory.core.workspace import Workspace
from factory.ingest.document import BadRow, Row, flat
from factory.ingest.readers import ShardProblem, read_rows
from factory.ingest.rules import split
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.shapes.told import Told
from factory.ingest.tokenizer import Tokenizer, train
from factory.ingest.vocabulary_size import refuse_vocabulary_to_be
from factory.ingest.worker import FinishTask, read_row, spool_contents
from factory.ledger.ledger import Ledger, tokenizers

_OF_ONE_DOCUMENT = 50_000  # characters: one large file must not fill the sample
_OTHER_SHARDS = 16
_SMALL = 100_000  # characters; less is too little text for a good vocabulary


def frozen_tokenizer(
    workspace: Workspace,
    ledger: Ledger,
    policy: DataPolicy,
    tasks: Sequence[Sequence[FinishTask]],
    spool: Path,
    path: Path,
    progress: Progress,
) -> Tokenizer:
    """Raises: DamagedTokenizerError when the tokenizer's files are not those the ledger recorded; ConfigError before a shard is
    made of more entries than the recipe's model has room for."""
    refuse_vocabulary_to_be(workspace)
    recorded = ledger.one(sa.select(tokenizers))
    if recorded:
        advice = "the daemon puts it back from a backup or an export; 'factory doctor --repair' does so where none runs"
        try:
            tokenizer = Tokenizer.load(workspace.tokenizer)
        except InputError as error:
            raise DamagedTokenizerError(f"{error}. {advice}") from error
        if tokenizer.sha256 != recorded["sha256"]:
            raise DamagedTokenizerError(
                f"{workspace.tokenizer}/tokenizer.json is not the tokenizer this workspace was trained with "
                f"(SHA-256 {recorded['sha256'][:16]}…): {advice}"
            )
        return tokenizer
    others = _other_shards(workspace, path)
    share = policy.tokenizer.sample_bytes // (len(others) + 1)
    with progress.task("train the tokenizer") as bar:
        sample = list(_sample_spool(tasks, spool, share))
        for other in others:
            sample += _sample_file(other, policy, share)
        if sum(map(len, sample)) < _SMALL:
            progress.line(
                f"the tokenizer is trained once, and now on little text ({sum(map(len, sample)):,} characters): better start with more"
            )
        bar.advance(note=f"{sum(map(len, sample)) / 1e6:.1f} MB of {len(others) + 1} shards")
        # It may be called from worker-free code, where the library would start threads of its own.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        return train(iter(sample), policy.tokenizer.vocab_size, workspace.tokenizer)


def _sample_spool(tasks: Sequence[Sequence[FinishTask]], spool: Path, budget: int) -> Iterator[str]:
    """Every k-th training document, so that about ``budget`` characters come from all over the shard."""
    total = sum(file.stat().st_size for file in spool.glob("*.jsonl"))
    every = max(1, -(-total // budget))
    number = 0
    for chunk, of_chunk in enumerate(tasks):
        wanted = [task for task in of_chunk if not task.held_out]
        contents = spool_contents(spool, chunk) if wanted else []
        for task in wanted:
            if number % every == 0:
                yield flat(contents[task.place])[:_OF_ONE_DOCUMENT]
            number += 1


def _other_shards(workspace: Workspace, path: Path) -> list[Path]:
    if not workspace.inbox.is_dir():
        return []
    waiting = (file for file in workspace.inbox.iterdir() if file.is_file() and not file.name.startswith("."))
    return sorted(file for file in waiting if file.resolve() != path.resolve())[:_OTHER_SHARDS]


def _sample_file(path: Path, policy: DataPolicy, budget: int) -> Iterator[str]:
    """The first documents of a shard that is not ingested yet; its ingest will report what is wrong with it."""
    drawn = 0
    try:
        for number, raw in enumerate(islice(read_rows(path, policy.limits), policy.limits.max_rows)):
            row = Row(number, "", "", "unknown")
            try:
                content = read_row(policy, row, raw, path.name, Told())
            except BadRow:
                continue
            assert row.content_sha256
            if row.special or not split.drawn(split.unit_of(row.group_key, row.content_sha256), policy.held_out.share):
                text = flat(content)[:_OF_ONE_DOCUMENT]
                drawn += len(text)
                yield text
            if drawn >= budget:
                return
    except (ShardProblem, InputError, OSError) as error:
        if cannot_be_read_now(error):
            raise  # the vocabulary stays for good: it is made of all that is there
        return
