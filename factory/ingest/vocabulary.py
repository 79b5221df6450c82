"""Loads the workspace's tokenizer, or trains it on a bounded sample of the text that waits for ingest.

The sample is drawn in equal shares from the training documents of the first shard and from the other shards in the
inbox. If the first shard has only chats, code therefore still gets tokens of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import sqlalchemy as sa

from factory.core.errors import DamagedTokenizerError, InputError
from factory.core.faults import is_temporary_read_failure
from factory.core.workspace import Workspace
from factory.ingest.document import BadRow, Row, join_texts
from factory.ingest.readers import ShardProblem, read_rows
from factory.ingest.rules import held_out_split
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.shapes.row_counts import RowCounts
from factory.ingest.tokenizer import FILES, Tokenizer, train_tokenizer, write_stated_ids
from factory.ingest.vocabulary_size import check_planned_vocabulary
from factory.ingest.worker import DocumentToFinish, read_row, read_spooled_contents
from factory.ledger.file_events import is_small_vocabulary_allowed
from factory.ledger.imported_model import refuse_unfinished_import
from factory.ledger.ledger import tokenizers
from factory.ledger.plant import Plant
from kernels.contract.files import write_atomically
from kernels.contract.message import Message

_OF_ONE_DOCUMENT = 50_000  # characters of one document at most, so that one large file does not fill the sample
_OTHER_SHARDS = 16
_ENOUGH = 100_000  # characters; if a longer text gives too few tokens, it repeats few words, and waiting for more text does not help


class TooLittleTextError(InputError):
    """The error of text that is too short to train the tokenizer, which is trained only once. The file waits for more text."""


def load_or_train_tokenizer(
    plant: Plant,
    policy: DataPolicy,
    tasks: Sequence[Sequence[DocumentToFinish]],
    spool: Path,
    path: Path,
    other_files: Sequence[Path],
) -> Tokenizer:
    """Return the workspace's tokenizer. The first call trains it, unless a tokenizer lies in the workspace: then it is used as it is. The ledger
    records it with the first shard. ``other_files`` are the files that are ingested after ``path``.

    Raises: DamagedTokenizerError when the tokenizer's files are not the recorded ones; ConfigError when the vocabulary is larger than the
    recipe's embedding; TooLittleTextError when all text that waits is short and gives fewer tokens than ``tokenizer.vocab_size`` of the data
    policy, unless a person allowed a small vocabulary.
    """
    recorded = plant.ledger.select_first(sa.select(tokenizers))
    if not recorded and (plant.workspace.tokenizer / "tokenizer.json").exists():
        return adopt_tokenizer(plant.workspace)
    if not recorded:
        check_planned_vocabulary(plant.workspace, None)
    if recorded:
        try:
            tokenizer = Tokenizer.load(plant.workspace.tokenizer)
        except InputError as error:
            raise _damaged(error.message) from error
        if tokenizer.sha256 != recorded["sha256"]:
            raise _damaged(
                Message(
                    "ingest.other_tokenizer",
                    "{path} is not the tokenizer that this workspace was trained with (SHA-256 {sha256:.16}…)",
                    path=plant.workspace.tokenizer / "tokenizer.json",
                    sha256=recorded["sha256"],
                )
            )
        if not plant.ledger.read("SELECT id FROM token_shards LIMIT 1"):
            check_planned_vocabulary(plant.workspace, tokenizer)
        return tokenizer
    refuse_unfinished_import(plant)
    others = _other_shards(plant.workspace, path, other_files)
    share = policy.tokenizer.sample_bytes // (len(others) + 1)
    with plant.progress.task("train the tokenizer") as bar:
        sample = list(_sample_spool(tasks, spool, share))
        for other in others:
            sample += _sample_file(other, policy, share)
        if not any(sample):  # without any text, even a small vocabulary is impossible
            raise TooLittleTextError(
                "ingest.all_held_out",
                "there is no text to train the tokenizer on, because all documents so far are held out. Ingest this file "
                "together with more documents",
            )
        bar.advance(note=f"{sum(map(len, sample)) / 1e6:.1f} MB of {len(others) + 1} shards")
        # If there are no worker processes, the library may start threads of its own.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        aside = spool / "tokenizer"
        made = train_tokenizer(iter(sample), policy.tokenizer.vocab_size, aside)
        if made.vocab_size < policy.tokenizer.vocab_size:
            if sum(map(len, sample)) < _ENOUGH and not is_small_vocabulary_allowed(plant.ledger):
                raise TooLittleTextError(
                    "ingest.little_text",
                    "there is too little text to train the tokenizer, which is trained only once. tokenizer.vocab_size in "
                    "policies/data.yaml asks for {wanted:,} tokens. The {characters:,} characters of text give only {made:,} "
                    "tokens. {enough:,} characters are enough. Ingest this file together with more text, or accept the small "
                    "vocabulary: 'factory ingest --small-vocabulary'",
                    characters=sum(map(len, sample)),
                    made=made.vocab_size,
                    wanted=policy.tokenizer.vocab_size,
                    enough=_ENOUGH,
                )
            plant.progress.line(
                Message(
                    "ingest.small_vocabulary",
                    "  the tokenizer has only {made:,} tokens instead of {wanted:,}, because there was too little text. The tokenizer is "
                    "trained only once and keeps this size",
                    made=made.vocab_size,
                    wanted=policy.tokenizer.vocab_size,
                )
            )
        plant.workspace.tokenizer.mkdir(parents=True, exist_ok=True)
        for name in sorted(
            FILES, key=lambda name: name == "tokenizer.json"
        ):  # tokenizer.json last: it completes the folder
            write_atomically(plant.workspace.tokenizer / name, (aside / name).read_bytes())
        return Tokenizer.load(plant.workspace.tokenizer)


def adopt_tokenizer(workspace: Workspace) -> Tokenizer:
    """Return the tokenizer that lies in a workspace before its first ingest. A foreign one gets a file with the ids of its model.

    Raises: InputError for a tokenizer that cannot be used; ConfigError when it has more ids than the recipe's embedding has rows.
    """
    tokenizer = Tokenizer.load(workspace.tokenizer)
    check_planned_vocabulary(workspace, tokenizer)
    if not tokenizer.is_own:
        write_stated_ids(tokenizer, workspace.tokenizer)
        tokenizer = Tokenizer.load(workspace.tokenizer)
    return tokenizer


def _damaged(why: str) -> DamagedTokenizerError:
    return DamagedTokenizerError(
        "ingest.damaged_tokenizer",
        "{why}. The daemon restores the tokenizer from a backup or an export. If no daemon runs, run 'factory check --repair'",
        why=why,
    )


def _sample_spool(tasks: Sequence[Sequence[DocumentToFinish]], spool: Path, budget: int) -> Iterator[str]:
    """Yield every k-th training document of a shard, so that the sample of about ``budget`` characters is spread over the shard."""
    total = sum(file.stat().st_size for file in spool.glob("*.jsonl"))
    every = max(1, -(-total // budget))
    number = 0
    for chunk, of_chunk in enumerate(tasks):
        wanted = [task for task in of_chunk if not task.held_out]
        contents = read_spooled_contents(spool, chunk) if wanted else []
        for task in wanted:
            if number % every == 0:
                yield join_texts(contents[task.place])[:_OF_ONE_DOCUMENT]
            number += 1


def _other_shards(workspace: Workspace, path: Path, other_files: Sequence[Path]) -> list[Path]:
    waiting = sorted(workspace.inbox.glob("[!.]*")) if workspace.inbox.is_dir() else []
    files = {file.resolve(): file for file in (*other_files, *waiting) if file.is_file()}
    files.pop(path.resolve(), None)
    return sorted(files.values())[:_OTHER_SHARDS]


def _sample_file(path: Path, policy: DataPolicy, budget: int) -> Iterator[str]:
    """Yield the first documents of a shard that is not ingested yet, up to ``budget`` characters. Faults are ignored, as the shard's ingest reports
    them."""
    drawn = 0
    try:
        for number, raw in enumerate(islice(read_rows(path, policy.limits), policy.limits.max_rows)):
            row = Row(number, "", "", "unknown")
            try:
                content = read_row(policy, row, raw, path.name, RowCounts())
            except BadRow:
                continue
            assert row.content_sha256
            if row.spells_special_token or not held_out_split.is_drawn_to_hold_out(
                held_out_split.name_held_out_draw_unit(row.group_key, row.content_sha256), policy.held_out.share
            ):
                text = join_texts(content)[:_OF_ONE_DOCUMENT]
                drawn += len(text)
                yield text
            if drawn >= budget:
                return
    except (ShardProblem, InputError, OSError) as error:
        if is_temporary_read_failure(error):
            raise  # the vocabulary is permanent, so no file may be missing from its sample
        return
