"""Does the work on each document in worker processes, chunk by chunk. Its functions take picklable arguments and do not use the ledger.

``analyse_chunk``  turns raw rows into the fates of bad rows, and the content, n-grams and near-duplicate signatures of the other rows
``finish_chunk``   trims and tokenises the kept documents of a chunk, and checks that they decode to the same text

Between the two steps the normalised content is in a spool folder, with two files for each chunk (JSON lines and n-gram hashes), so that
memory does not grow with the shard.

``WorkerPool`` runs these functions, with a bounded number of chunks at a time, and returns the results in order. Processes are spawned, not forked,
because the parent may have threads and database connections. A worker ends when its parent ends, even if the parent is killed. Workers that
finish no more chunks are found in the same way as a trainer that makes no steps, and are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import get_context, parent_process
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from agents.core.untrusted import fold_to_one_line
from factory.core.errors import FactoryError
from factory.ingest.document import (
    Content,
    Row,
    hash_content,
    join_texts,
    make_comparison_text,
    normalise_content,
    parse_document,
    parse_json,
)
from factory.ingest.forked_calls import ForkedCalls, ItemKilledProcessError
from factory.ingest.reading.rows import BadRow, RawRow, RowOrigin, pop_row_origin
from factory.ingest.rules import contamination, filters, held_out_split, near_duplicates, personal_data
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.rules.word_hashes import Hashes, hash_words, winnow_hashes
from factory.ingest.shapes.chats import ReadingNotes, Structure, Turn
from factory.ingest.shapes.field_mapping import FieldMapping
from factory.ingest.shapes.row_counts import RowCounts
from factory.ingest.tokenizer import SPECIAL, Tokenizer, contains_special_token
from factory.ingest.tokenizing.chat_rendering import ChatRefusedError
from factory.ingest.tokenizing.library_faults import TokenizerFailedError
from factory.ingest.tokenizing.marked_library import SpellsMarkError
from factory.retrying.policy import RetryPolicy
from factory.retrying.watchdog import UsualDurations, Watchdog
from kernels.contract.message import Message

# Bounds of a tokenizer of another maker: processor time of a document, memory, and documents that may end a process. A tokenizer that is not
# hostile encodes a megabyte in about a second.
SECONDS_A_DOCUMENT, SECONDS_A_MB = 20.0, 20.0
MEMORY = 4 << 30
MOST_KILLED = 20

READ = ("text", "messages", "id", "domain", "source", "license", "synthetic_by")  # keys of a row that ingest needs
LONGEST_MAKER = 300  # characters of a model's name, which reports and cards show


@dataclass(frozen=True)
class IngestJob:
    """The arguments that all chunks of a shard share."""

    policy: DataPolicy
    spool: Path
    prefix: str  # prefix of the rows' keys: the first 16 hex digits of the shard's SHA-256
    name: str  # the name of the file, which selects the mapping of its columns
    shows_text_only: bool  # whether the tokenizer was frozen with another chat template, in which ingest writes no tools, calls or reasoning
    special: tuple[str, ...] = SPECIAL  # the texts of the special tokens
    structure: frozenset[Structure] = frozenset()  # what the chat template takes as objects, if it is of another model
    document_seconds: float = SECONDS_A_DOCUMENT  # of processor time, for a document of few characters


@dataclass(frozen=True)
class AnalysedChunk:
    """One analysed chunk. ``rows`` has every row. ``undecided`` has the positions in ``rows`` of the rows without a fate yet, in spool order."""

    chunk: int
    rows: list[Row]
    undecided: list[int]
    signatures: near_duplicates.Signatures  # [undecided, permutations]
    lengths: npt.NDArray[np.int64]  # [undecided], the number of n-grams of each
    row_counts: RowCounts


@dataclass(frozen=True)
class DocumentToFinish:
    """One document that ``finish_chunk`` takes from the spool: its position in the spool, and the word spans to cut."""

    place: int
    key: str
    held_out: bool
    cuts: list[tuple[int, int]]


@dataclass(frozen=True)
class FinishedDocument:
    place: int
    tokens: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    loss_mask: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    sampled: Hashes = field(default_factory=lambda: np.zeros(0, np.uint64))  # winnowed n-grams of the final text
    trimmed: int = 0  # number of characters removed
    content: Content | None = None  # of a held-out document only
    dropped: tuple[str, str] | None = None  # rule, detail


_is_worker = False  # whether this process is a worker


def initialise_worker() -> None:
    """Initialise a worker process. The process then ends when its parent ends, for whatever reason."""
    global _is_worker
    _is_worker = True
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def analyse_chunk(job: IngestJob, chunk: int, first_row: int, raw_rows: Sequence[RawRow]) -> AnalysedChunk:
    """Read and check the rows of a chunk, and write the content of the good rows to the spool."""
    rows: list[Row] = []
    alive: list[int] = []
    contents: list[Content] = []
    shingles: list[Hashes] = []
    grams: list[Hashes] = []
    told = RowCounts()
    for offset, raw in enumerate(raw_rows):
        number = first_row + offset
        key = f"{job.prefix}:{number}"
        row = Row(number, key, key, "unknown")
        rows.append(row)
        try:
            content = read_row(job.policy, row, raw, job.name, told, job.shows_text_only, job.special, job.structure)
        except BadRow as bad:
            row.drop(bad.rule, bad.detail)
            continue
        words = hash_words(make_comparison_text(content))
        assert row.content_sha256
        shingles.append(near_duplicates.hash_shingles(words, bytes.fromhex(row.content_sha256)))
        grams.append(contamination.hash_ngrams(words, job.policy.decontamination.ngram))
        contents.append(content)
        alive.append(offset)
    _spool_write(job.spool, chunk, contents, grams)
    lengths = np.array([len(one) for one in grams], np.int64)
    return AnalysedChunk(chunk, rows, alive, near_duplicates.compute_signatures(shingles), lengths, told)


def read_row(
    policy: DataPolicy,
    row: Row,
    raw: RawRow,
    file: str,
    row_counts: RowCounts,
    shows_text_only: bool = False,
    special: tuple[str, ...] = SPECIAL,
    structure: frozenset[Structure] = frozenset(),
) -> Content:
    """Validate, normalise, filter and redact one row of a file. Sets fields of ``row`` and adds to ``row_counts``. ``shows_text_only``,
    ``special`` and ``structure`` are those of ``IngestJob``.

    Raises: BadRow.
    """
    decoded, origin, mapping = _looked_at(policy, raw, file, row_counts)
    notes, read = ReadingNotes(shows_text_only, structure), {*READ}
    if mapping:
        columns = [path for _, value in mapping[1].list_mapped_values() for path in value.columns]
        read |= {*columns, *(path.partition(".")[0] for path in columns)}
    origin.refuse_unreadable_values(sorted(read))
    if origin.path and isinstance(decoded, dict) and decoded.get("path") is None:
        decoded["path"] = origin.path
    parsed = parse_document(decoded, policy.default_domain, mapping[1] if mapping else None, notes)
    row_counts.count_notes(notes)
    row.id = parsed.id or row.key
    row.domain, row.source, row.license = parsed.domain, parsed.source, parsed.license
    row.synthetic_by = fold_to_one_line((parsed.synthetic_by or "").replace(";", ","), LONGEST_MAKER) or None
    rules = policy.find_domain_rules(row.domain)
    row.grouping_facts = parsed.facts
    row.group_key = held_out_split.make_group_name(
        rules.group, row.source, row.grouping_facts, row.key.partition(":")[0]
    )
    licence = policy.licences.find_licence(row.license)
    row.releasable = licence.release
    row.licence_refusal = (
        ""
        if licence.train
        else Message("ingest.no_training", "the licence {licence!r} does not allow training", licence=row.license)
    )
    content = normalise_content(parsed.content, code=row.domain == "code")
    text = join_texts(content)
    failure = filters.find_first_broken_rule(text, rules)
    if failure is None and rules.must_parse and "text" in content and (row.source or "").endswith(".py"):
        reason = filters.check_python_syntax(text)
        failure = ("does_not_parse", reason) if reason else None
    if failure:
        raise BadRow(*(("licence", row.licence_refusal) if row.licence_refusal else failure))
    content = _redact(content, rules.pii, row)
    row.content_sha256 = hash_content(content)
    row.spells_special_token = contains_special_token(text, special)
    return content


def count_row_columns(policy: DataPolicy, raw: RawRow, file: str, row_counts: RowCounts) -> None:
    """Add to ``row_counts`` which columns of its mapping a row has. A row that cannot be read adds nothing."""
    with contextlib.suppress(BadRow):
        _looked_at(policy, raw, file, row_counts)


def _looked_at(
    policy: DataPolicy, raw: RawRow, file: str, row_counts: RowCounts
) -> tuple[Any, RowOrigin, tuple[int, FieldMapping] | None]:
    """Return (the decoded row, its origin, the mapping of its file). Raises: BadRow."""
    if isinstance(raw, BadRow):
        raise raw
    decoded = parse_json(raw) if isinstance(raw, bytes) else raw
    origin = pop_row_origin(decoded)
    if mapping := policy.find_field_mapping(PurePath(origin.path).name, file):
        row_counts.count_columns(decoded | origin.unreadable if isinstance(decoded, dict) else decoded, *mapping)
    return decoded, origin, mapping


def _redact(content: Content, kinds: Sequence[str], row: Row) -> Content:
    def one(text: str) -> str:
        text, counts = personal_data.replace_personal_data(text, kinds)
        for kind, count in counts.items():
            row.pii[kind] = row.pii.get(kind, 0) + count
        return text

    if "text" in content:
        return {"text": one(content["text"])}

    def each(message: Turn) -> Turn:
        changed = {
            key: _map_values(part, one)
            for key, part in message.items()
            if key not in ("role", "tool_calls", "tool_call_id")
        }
        if "tool_calls" in message:  # their ids are names
            changed["tool_calls"] = [
                call | {"function": _map_values(call["function"], one)} for call in message["tool_calls"]
            ]
        return message | changed

    return {"messages": [each(message) for message in content["messages"]]}


def _map_values(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with each text changed, except keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_values(part, change) for key, part in value.items()}
    return [_map_values(part, change) for part in value] if isinstance(value, list) else value


def finish_chunk(
    job: IngestJob, chunk: int, tasks: Sequence[DocumentToFinish], tokenizer_folder: Path
) -> list[FinishedDocument]:
    """Trim and tokenise the kept documents of a chunk.

    A worker process leaves a tokenizer of another maker to a process of its own, which a document may end: then that document is dropped.
    Raises: FactoryError if many documents do so.
    """
    tokenizer = _tokenizer(tokenizer_folder)
    contents = read_spooled_contents(job.spool, chunk)
    if tokenizer.is_own or not _is_worker:
        return [_finish_one(job.policy, task, contents[task.place], tokenizer) for task in tasks]
    calls, found = _forked(job.policy, tokenizer_folder), []
    for task in tasks:
        content = contents[task.place]
        seconds = job.document_seconds + SECONDS_A_MB * len(join_texts(content)) / 1e6
        try:
            found.append(calls.call((task, content), seconds))
            continue
        except ItemKilledProcessError as error:
            why = _describe_death(error, seconds)
        except MemoryError:
            why = Message("ingest.tokenizer_memory", "the tokenizer needs more than {gb} GB of memory", gb=MEMORY >> 30)
        found.append(FinishedDocument(task.place, dropped=("tokenizer_failed", why)))
        if calls.killed > MOST_KILLED:
            raise FactoryError(
                "ingest.tokenizer_keeps_failing",
                "the tokenizer ends its process for more than {most} documents of {file}. The last failure: {why}. Nothing was stored",
                most=MOST_KILLED, file=job.name, why=why,
            )  # fmt: skip
    return found


def _describe_death(error: ItemKilledProcessError, seconds: float) -> Message:
    if error.took_too_long:
        return Message(
            "ingest.tokenizer_time",
            "the tokenizer needs more than {seconds:.0f} seconds of processor time for the document",
            seconds=seconds,
        )
    return Message(
        "ingest.tokenizer_died",
        "the tokenizer's process was ended by the signal {signal}",
        signal=signal.Signals(error.number).name,
    )


def _finish_one(policy: DataPolicy, task: DocumentToFinish, content: Content, tokenizer: Tokenizer) -> FinishedDocument:
    rules = policy.decontamination
    trimmed = 0
    if task.cuts:
        if "messages" in content:
            chat = Message("ingest.contaminated_chat", "a passage of the chat is also in a held-out document")
            return FinishedDocument(task.place, dropped=("contaminated", chat))
        shorter = contamination.cut_spans(content["text"], task.cuts, rules.margin, rules.max_trimmed)
        if shorter is None:
            reason = Message(
                "ingest.contaminated",
                "the document shares {passages:,|passage|passages} with held-out documents, which is too much text to cut out",
                passages=len(task.cuts),
            )
            return FinishedDocument(task.place, dropped=("contaminated", reason))
        trimmed = len(content["text"]) - len(shorter)
        content = {"text": shorter}
    try:
        if "text" in content:
            tokens, mask = tokenizer.encode_text(content["text"])
        else:
            tokens, mask = tokenizer.encode_messages(content["messages"])
    except ChatRefusedError as error:
        return FinishedDocument(task.place, dropped=("chat_template", error.message))
    except SpellsMarkError as error:
        return FinishedDocument(task.place, dropped=("no_round_trip", error.message))
    except TokenizerFailedError as error:
        return FinishedDocument(task.place, dropped=("tokenizer_failed", error.message))
    if "messages" in content and not mask.any():
        unseen = Message(
            "ingest.answers_without_tokens", "the chat template writes no token of the assistant's answers"
        )
        return FinishedDocument(task.place, dropped=("chat_template", unseen))
    try:
        lossy = tokenizer.find_loss(content, tokens, mask)
    except TokenizerFailedError as error:
        return FinishedDocument(task.place, dropped=("tokenizer_failed", error.message))
    if lossy:
        return FinishedDocument(task.place, dropped=("no_round_trip", lossy))
    if task.held_out:
        return FinishedDocument(task.place, tokens, mask, content=content)
    sampled = winnow_hashes(
        contamination.hash_ngrams(hash_words(make_comparison_text(content)), rules.ngram), rules.sample_window
    )
    return FinishedDocument(task.place, tokens, mask, sampled, trimmed)


@lru_cache(maxsize=1)
def _tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer. Each worker process loads it once."""
    return Tokenizer.load(folder)


_forks: dict[Path, tuple[DataPolicy, ForkedCalls]] = {}  # of this worker, by the folder of the tokenizer


def _forked(policy: DataPolicy, folder: Path) -> ForkedCalls:
    """Return the process of this worker that tokenises documents, with the tokenizer that the worker has loaded."""
    known = _forks.get(folder)
    if known and known[0] == policy:
        return known[1]
    for _, calls in _forks.values():
        calls.close()
    _forks.clear()
    tokenizer = _tokenizer(folder)
    _forks[folder] = policy, ForkedCalls(lambda item: _finish_one(policy, item[0], item[1], tokenizer), MEMORY)
    return _forks[folder][1]


# -- the spool -------------------------------------------------------------------------------------------------------
def _spool_write(spool: Path, chunk: int, contents: Sequence[Content], grams: Sequence[Hashes]) -> None:
    with open(spool / f"{chunk:06d}.jsonl", "w", encoding="utf-8") as out:
        for content in contents:
            out.write(json.dumps(content, ensure_ascii=False) + "\n")
    np.save(spool / f"{chunk:06d}.npy", np.concatenate(grams) if grams else np.zeros(0, np.uint64))


def read_spooled_contents(spool: Path, chunk: int) -> list[Content]:
    """Read the contents of a chunk's documents, in spool order."""
    with open(spool / f"{chunk:06d}.jsonl", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def read_spooled_ngrams(spool: Path, analysed: AnalysedChunk) -> list[Hashes]:
    """Read the n-grams of each document of a chunk, in spool order."""
    joined = np.load(spool / f"{analysed.chunk:06d}.npy")
    return np.split(joined, np.cumsum(analysed.lengths)[:-1]) if len(analysed.lengths) else []


R = TypeVar("R")
POLL_SECONDS = 1.0
_AHEAD = 2  # chunks per worker that are in work or waiting


class WorkerDiedError(FactoryError):
    """The error of a worker process that was killed (most likely because memory ran out) or hung. Nothing was stored."""


class WorkerPool:
    """A pool of ``workers`` processes. With 0 workers, this process does the work, chunk by chunk."""

    def __init__(self, workers: int | None, spool: Path, policy: RetryPolicy) -> None:
        """``spool`` is a folder that grows while the processes work. ``policy`` says after which time they count as hung."""
        self.workers = min(os.cpu_count() or 1, 16) if workers is None else workers
        self.spool, self.policy = spool, policy
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> WorkerPool:
        if self.workers > 0:
            self.start(self.workers)
        return self

    def start(self, workers: int) -> None:
        """Let ``workers`` processes do the work from now on, if there are none yet."""
        if self._executor is None:
            self.workers = workers
            context = get_context("spawn")
            self._executor = ProcessPoolExecutor(workers, mp_context=context, initializer=initialise_worker)

    def __exit__(self, *exc: object) -> None:
        if self._executor:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def map(self, function: Callable[..., R], calls: Iterable[tuple[Any, ...]]) -> Iterator[R]:
        """Yield ``function(*call)`` for each call, in order. Calls are taken from ``calls`` only as fast as they are done.

        Raises: WorkerDiedError.
        """
        if self._executor is None:
            for call in calls:
                yield function(*call)
            return
        dog = Watchdog(self.policy, UsualDurations(), os.getpid(), self.spool, first_counts=True, unit="chunk")
        under_way: deque[Future[R]] = deque()
        done = 0
        try:
            for call in calls:
                under_way.append(self._executor.submit(function, *call))
                if len(under_way) >= self.workers * _AHEAD:
                    yield self._result(under_way.popleft(), dog, done)
                    done += 1
            while under_way:
                yield self._result(under_way.popleft(), dog, done)
                done += 1
        except BrokenProcessPool as error:
            raise WorkerDiedError(
                "ingest.worker_killed",
                "a worker process of ingest was killed, most likely because memory ran out. Nothing was stored",
            ) from error

    def _result(self, future: Future[R], dog: Watchdog, done: int) -> R:
        dog.restart_clock()
        while True:
            try:
                found = future.result(timeout=POLL_SECONDS)
            except TimeoutError:
                if future.done():  # the work ended a moment later, or raised TimeoutError itself
                    dog.find_hang(done + 1)
                    return future.result()
                if hung := dog.find_hang(done):
                    self._kill()
                    raise WorkerDiedError(
                        "ingest.workers_hung",
                        "the worker processes of ingest hung: {why}. The factory killed the processes, and nothing was stored",
                        why=hung,
                    ) from None
                continue
            dog.find_hang(done + 1)
            return found

    def _kill(self) -> None:
        assert self._executor
        for worker in list(self._executor._processes.values()):
            worker.kill()
