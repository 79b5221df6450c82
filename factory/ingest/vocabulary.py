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
from factory.core.workspace import Workspace
from factory.ingest.document import BadRow, Row, flat
from factory.ingest.readers import ShardProblem, read_rows
from factory.ingest.rules import split
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.shapes.told import Told
from factory.ingest.tokenizer import FILES, Tokenizer, train
from factory.ingest.vocabulary_size import refuse_vocabulary_to_be
from factory.ingest.worker import FinishTask, read_row, spool_contents
from factory.ledger.files import small_vocabulary
from factory.ledger.ledger import tokenizers
from factory.ledger.plant import Plant
from kernels.contract.files import write_atomically

_OF_ONE_DOCUMENT = 50_000  # characters: one large file must not fill the sample
_OTHER_SHARDS = 16
_ENOUGH = 100_000  # characters of text; where more give too few tokens, it is of few words, and waiting helps nothing


class LittleTextError(InputError):
    """There is too little text to train the tokenizer on, which is trained once: what is to be ingested waits for more."""


def frozen_tokenizer(
    plant: Plant,
    policy: DataPolicy,
    tasks: Sequence[Sequence[FinishTask]],
    spool: Path,
    path: Path,
    other_files: Sequence[Path],
) -> Tokenizer:
    """``other_files``: files that are to be ingested after ``path``.

    Raises: DamagedTokenizerError when the tokenizer's files are not those the ledger recorded; ConfigError before a shard is made of more
    entries than the recipe's model has room for; LittleTextError where all text that waits is short and gives fewer tokens than
    ``tokenizer.vocab_size`` of the data policy, and no person said that this is wanted.
    """
    refuse_vocabulary_to_be(plant.workspace)
    recorded = plant.ledger.one(sa.select(tokenizers))
    if recorded:
        advice = "the daemon puts it back from a backup or an export; 'factory check --repair' does so where none runs"
        try:
            tokenizer = Tokenizer.load(plant.workspace.tokenizer)
        except InputError as error:
            raise DamagedTokenizerError(f"{error}. {advice}") from error
        if tokenizer.sha256 != recorded["sha256"]:
            raise DamagedTokenizerError(
                f"{plant.workspace.tokenizer}/tokenizer.json is not the tokenizer this workspace was trained with "
                f"(SHA-256 {recorded['sha256'][:16]}…): {advice}"
            )
        return tokenizer
    others = _other_shards(plant.workspace, path, other_files)
    share = policy.tokenizer.sample_bytes // (len(others) + 1)
    with plant.progress.task("train the tokenizer") as bar:
        sample = list(_sample_spool(tasks, spool, share))
        for other in others:
            sample += _sample_file(other, policy, share)
        if not any(sample):  # no vocabulary of nothing, whatever a person said of little text
            raise LittleTextError(
                "the tokenizer is trained once, on documents to train on, and all so far are held out: ingest this file together with more documents"
            )
        bar.advance(note=f"{sum(map(len, sample)) / 1e6:.1f} MB of {len(others) + 1} shards")
        # It may be called from worker-free code, where the library would start threads of its own.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        aside = spool / "tokenizer"
        made = train(iter(sample), policy.tokenizer.vocab_size, aside)
        if made.vocab_size < policy.tokenizer.vocab_size:
            if sum(map(len, sample)) < _ENOUGH and not small_vocabulary(plant.ledger):
                raise LittleTextError(
                    f"the tokenizer is trained once, and there is too little text for it: {sum(map(len, sample)):,} characters give "
                    f"{made.vocab_size:,} of the {policy.tokenizer.vocab_size:,} tokens that policies/data.yaml asks for "
                    f"(tokenizer.vocab_size); {_ENOUGH:,} are enough. Ingest this file together with more text, or train the tokenizer on "
                    "it with 'factory ingest --small-vocabulary'"
                )
            plant.progress.line(
                f"  the tokenizer has {made.vocab_size:,} tokens, not {policy.tokenizer.vocab_size:,}: the text gives no more, and it is trained once"
            )
        plant.workspace.tokenizer.mkdir(parents=True, exist_ok=True)
        for name in sorted(
            FILES, key=lambda name: name == "tokenizer.json"
        ):  # that one last: it makes the folder a tokenizer
            write_atomically(plant.workspace.tokenizer / name, (aside / name).read_bytes())
        return Tokenizer.load(plant.workspace.tokenizer)


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


def _other_shards(workspace: Workspace, path: Path, other_files: Sequence[Path]) -> list[Path]:
    waiting = sorted(workspace.inbox.glob("[!.]*")) if workspace.inbox.is_dir() else []
    files = {file.resolve(): file for file in (*other_files, *waiting) if file.is_file()}
    files.pop(path.resolve(), None)
    return sorted(files.values())[:_OTHER_SHARDS]


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
