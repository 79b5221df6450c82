"""One run of a writer: the run fixes the prompts and the writer, answers every prompt, then puts the complete shard in place.

    arguments ─► <workspace>/generated/.<arguments' hash>/ {plan.json, answers.jsonl} ─► generated/<name>.jsonl ─► inbox

The folder is made aside and renamed, so it is complete or absent. After a kill at any instruction, a run with the same arguments finds the folder
and continues with its writer and prompts, even if something was released or ingested meanwhile. When all prompts are answered, the rows are
written in the order of the prompts: a shard is the same however often its run was interrupted.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from factory.core.errors import InputError
from factory.core.progress import Progress, ProgressTask
from factory.core.workspace import Workspace
from factory.evals.export_folder import read_config
from factory.git.scope import AgentsPolicy
from factory.ingest.reading.streams import make_unreadable_file_error
from factory.ingest.rules.licence_claims import find_relicensed_documents, find_strictest_licence
from factory.ingest.rules.policy import REPLAY_DOMAIN, DataPolicy
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.imported_model import find_import, find_imported_licence
from factory.ledger.ledger import Ledger, documents, shards
from factory.ledger.plant import Plant
from factory.ledger.rows import ReleaseRow
from factory.synthetic.openings import sample_document_openings
from factory.synthetic.prompts import Prompt, choose_licence, read_prompts
from factory.synthetic.writers import (
    Answer,
    TextWriter,
    WriterClient,
    WriterError,
    find_release_writer,
    make_endpoint_writer,
    open_writer,
)
from kernels.contract.files import rename_into_place
from kernels.contract.message import Message
from trainer.contract.data.token_shard import hash_file


class AnswerJournal:
    """The answers of a run so far, in an append-only file of JSON lines. A killed run continues after the last answer.

    The file ``path`` is made if it does not exist. An incomplete last line (after a kill or a power cut) is removed, and that answer is requested
    again. The file is not flushed to the disk after each answer: a power cut only costs time.
    """

    def __init__(self, path: Path) -> None:
        self._places: dict[int, int] = {}
        self._file = open(path, "a+b")  # noqa: SIM115 - as long as the run
        self._file.seek(0)
        whole = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                number = int(row["number"])
                Answer(**{key: str(row[key]) for key in ("text", "end")})
            except (ValueError, KeyError, TypeError):
                break
            self._places[number] = whole
            whole += len(line)
        self._file.truncate(whole)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def __len__(self) -> int:
        return len(self._places)

    def append_answer(self, number: int, answer: Answer) -> None:
        assert number not in self._places
        self._file.seek(0, 2)
        place = self._file.tell()
        row = {"number": number, "text": answer.text, "end": answer.end}
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self._places[number] = place

    def read_answer(self, number: int) -> Answer:
        self._file.seek(self._places[number])
        row = json.loads(self._file.readline())
        return Answer(row["text"], row["end"])

    def close(self) -> None:
        self._file.close()


FOLDER = "generated"
LOCK = "generate"
DEFAULT_DOCUMENTS = 100  # documents of a run with openings, if a person gives no number
LEFT_OUT = {"taken out", "refused", "empty"}  # ends of answers that give no document


@dataclass(frozen=True)
class GenerationRequest:
    """The arguments that a person gave. Without ``release`` and ``endpoint``, the champion writes. Without ``count``, each prompt of the file
    gives one document."""

    release: int | None = None
    endpoint: str = ""
    model: str = ""
    prompts: Path | None = None
    domain: str | None = None  # of the documents whose openings are taken
    opening_tokens: int = 32
    count: int | None = None
    tokens: int = 256
    temperature: float = 0.8
    seed: int = 0
    licence: str | None = None
    replay: bool = False  # a release writes from the beginning of a document on, for the domain 'replay'

    def refuse_conflicting_options(self, policy: DataPolicy) -> None:
        """Raises: InputError for options that exclude one another."""
        if self.endpoint == "champion":
            raise InputError(
                "synthetic.endpoint_champion",
                "leave out '--endpoint champion', because the champion writes by default. To let another release write, use '--release "
                "N'",
            )
        if self.endpoint and self.release is not None:
            raise InputError(
                "synthetic.two_writers", "give one writer: either --release N or --endpoint URL --model NAME"
            )
        if bool(self.endpoint) != bool(self.model):
            raise InputError(
                "synthetic.endpoint_without_model",
                "give both --endpoint URL and --model NAME: an endpoint may serve several models",
            )
        if self.prompts and self.domain:
            raise InputError(
                "synthetic.domain_of_prompts",
                "give either --domain or --prompts: --domain chooses among this workspace's documents, but each row of --prompts names "
                "its own domain",
            )
        if self.replay and (self.endpoint or self.prompts or self.domain):
            raise InputError(
                "synthetic.replay_options",
                "with --replay a release writes without prompts, for the domain {domain}. Leave out --endpoint, --prompts and --domain",
                domain=REPLAY_DOMAIN,
            )
        if self.licence and not policy.licences.find_licence(self.licence).train:
            raise InputError(
                "synthetic.licence",
                "--license {licence!r} does not allow training (licences in data.yaml), so ingest would drop every document",
                licence=self.licence,
            )

    def hash_arguments(self) -> str:
        """A hash of the arguments and of the file of prompts. Raises: InputError if that file cannot be read."""
        try:
            prompts = hash_file(self.prompts) if self.prompts else ""
        except OSError as error:
            raise make_unreadable_file_error(str(self.prompts), error) from error
        arguments = {
            key: value for key, value in asdict(self).items() if key != "replay" or value
        }  # as before there was this key
        said = json.dumps(arguments | {"prompts": prompts}, sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class GenerationPlan:
    """A run, as it is fixed before its first answer."""

    name: str  # of the shard, without suffix
    writer: TextWriter
    prompts: list[Prompt]
    count: int  # documents; if the prompts are fewer, they are used again from the first
    is_resumed: bool = False  # True: an earlier call began this run

    def get_prompt(self, number: int) -> Prompt:
        return self.prompts[number % len(self.prompts)]

    def summarise(self) -> dict[str, Any]:
        """The plan in numbers, for a person, before the run begins."""
        licences: Counter[str] = Counter()
        domains: Counter[str] = Counter()
        for number in range(self.count):
            licences[self.get_prompt(number).license or ""] += 1
            domains[self.get_prompt(number).domain] += 1
        return {
            "written_by": self.writer.name,
            "count": self.count,
            "prompts": len(self.prompts),
            "openings": sum(prompt.opening_of is not None for prompt in self.prompts),
            "domains": dict(domains),
            "licences": dict(licences),
        }


@dataclass(frozen=True)
class GeneratedShard:
    """A finished shard. ``ends``: how many answers ended in each way; {} if the shard existed before.

    An answer that ended by 'stop' or 'length' gives a document. 'empty', 'refused' and 'taken out' give none. 'taken out': during the run a person
    took out the document of the opening, or the document came under a licence that does not allow training.
    """

    path: Path
    sha256: str
    written_by: str
    documents: int
    ends: dict[str, int]
    inbox: str = ""  # the path of its copy in the inbox, or why there is none

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


def plan_generation(plant: Plant, request: GenerationRequest) -> GenerationPlan:
    """The plan of a new run, or of the interrupted run with the same arguments. Changes nothing. Raises: InputError; ConfigError."""
    policy = DataPolicy.load(plant.workspace.policy_path("data.yaml"))
    request.refuse_conflicting_options(policy)
    key = request.hash_arguments()
    if (found := _read_plan(plant.workspace.root / FOLDER / f".{key}", plant.ledger)) is not None:
        return found
    if request.endpoint:
        writer = make_endpoint_writer(
            request.endpoint, request.model, AgentsPolicy.load(plant.workspace.policy_path("agents.yaml")).llm
        )
    else:
        writer = find_release_writer(plant.ledger, request.release)
    if request.prompts:
        prompts = read_prompts(request.prompts, policy.default_domain, request.count)
        count = request.count or len(prompts)
    elif request.replay:
        count = request.count or DEFAULT_DOCUMENTS
        _refuse_long(writer, request)
        imported = find_import(plant.ledger)
        is_import = imported is not None and imported.id == ReleaseRow.get(plant.ledger, writer.release).segment
        licence = find_imported_licence(plant.ledger) if is_import else None  # a later release also learnt other text
        name = policy.licences.find_model_licence(licence.name)[0] if licence else ""
        prompts = [Prompt({"text": ""}, REPLAY_DOMAIN, license=name or None)]
    else:
        count = request.count or DEFAULT_DOCUMENTS
        _refuse_long(writer, request)
        tokenizer = Tokenizer.load(plant.workspace.tokenizer)
        prompts = sample_document_openings(
            plant.ledger, tokenizer, count, request.opening_tokens, request.domain, request.seed, policy.licences
        )
    named = [
        Prompt(**{**vars(prompt), "license": choose_licence(prompt, request.licence, policy.licences)})
        for prompt in prompts
    ]
    return GenerationPlan(f"synthetic-{writer.file_name_part}-{key}", writer, named, count)


def _refuse_long(writer: TextWriter, request: GenerationRequest) -> None:
    if writer.export and (not request.replay) * request.opening_tokens + 1 + request.tokens > (
        context := read_config(Path(writer.export)).context
    ):
        raise InputError(
            "synthetic.too_many_tokens",
            "--opening-tokens {opening} and --tokens {tokens} together do not fit the context of {writer}, which has {context} tokens. "
            "Lower one of the two",
            opening=request.opening_tokens,
            tokens=request.tokens,
            context=context,
            writer=writer.name,
        )


def generate_shard(plant: Plant, request: GenerationRequest, *, inbox: bool = False) -> GeneratedShard:
    """Write the shard, or continue an interrupted run; a finished shard is not written again. ``inbox``: put a copy into the inbox.

    Raises: InputError; WorkspaceError while another run writes in this workspace; WriterError, after which the answers so far are kept.
    """
    with plant.workspace.hold_lock(LOCK):
        what = plan_generation(plant, request)
        place = plant.workspace.root / FOLDER / f"{what.name}.jsonl"
        aside = plant.workspace.root / FOLDER / f".{request.hash_arguments()}"
        ends: dict[str, int] = {}
        if not place.is_file():
            if not what.is_resumed:
                _begin(aside, what)
            ends = _write(plant, request, what, aside, place)
        _delete(aside)
        with open(place, "rb") as rows:
            made = GeneratedShard(place, hash_file(place), what.writer.name, sum(1 for _ in rows), ends)
        return GeneratedShard(**{**vars(made), "inbox": _to_inbox(plant, made)}) if inbox else made


def _begin(folder: Path, what: GenerationPlan) -> None:
    """Make the run's folder, completely or not at all."""
    folder.parent.mkdir(exist_ok=True)
    aside = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed here
    aside.mkdir()
    try:
        fixed = {"name": what.name, "writer": asdict(what.writer), "count": what.count}
        fixed["prompts"] = [prompt.to_json() for prompt in what.prompts]
        (aside / "plan.json").write_text(json.dumps(fixed), encoding="utf-8")
        rename_into_place(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _read_plan(folder: Path, ledger: Ledger) -> GenerationPlan | None:
    """The plan of an interrupted run; None: there is none, or its shard is in place already. Raises: InputError for a plan that cannot be read, or
    if the release's export is gone."""
    try:
        fixed = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        prompts = [Prompt(**prompt) for prompt in fixed["prompts"]]
        began = TextWriter(**fixed["writer"])
        writer = find_release_writer(ledger, began.release) if began.release else began  # the export may have moved
        if writer.export_sha256 != began.export_sha256:
            raise ValueError(f"{began.name} began this run, but release {began.release} has other weights now")
        return GenerationPlan(str(fixed["name"]), writer, prompts, int(fixed["count"]), is_resumed=True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            "synthetic.broken_run",
            "the interrupted run in {folder} cannot continue ({error}). Delete the folder, and then give the command again",
            folder=folder,
            error=error,
        ) from None


def _write(
    plant: Plant,
    request: GenerationRequest,
    what: GenerationPlan,
    aside: Path,
    place: Path,
) -> dict[str, int]:
    """Answer the remaining prompts and put the shard in place; returns ``GeneratedShard.ends``."""
    journal = AnswerJournal(aside / "answers.jsonl")
    try:
        if len(journal) < what.count:
            try:
                asyncio.run(_answer_all(plant.workspace, request, what, journal, plant.progress))
            except WriterError as error:
                if not len(journal):
                    raise
                raise WriterError(
                    "synthetic.interrupted",
                    "{why}. {kept:,} of {count:,} answers are kept. To continue, give the same command again",
                    why=error.message,
                    kept=len(journal),
                    count=what.count,
                ) from None
        licences = DataPolicy.load(plant.workspace.policy_path("data.yaml")).licences
        claimed = {
            key: one.find_effective_licence(licences)
            for key, one in find_relicensed_documents(plant.ledger, licences).items()
        }
        barred = {key for key, name in claimed.items() if not licences.find_licence(name).train}
        gone = _taken_out(plant.ledger, what.prompts) | barred
        made = aside / "shard.jsonl"
        ends: Counter[str] = Counter()
        with open(made, "w", encoding="utf-8") as out:
            for number in range(what.count):
                prompt, answer = what.get_prompt(number), journal.read_answer(number)
                if prompt.opening_of in claimed:  # perhaps by a shard that was ingested after the plan
                    both = [prompt.license or "", claimed[prompt.opening_of]]
                    prompt = replace(prompt, license=find_strictest_licence(both, licences) or None)
                end = _end(prompt, answer, gone)
                ends[end] += 1
                if end not in LEFT_OUT:
                    out.write(json.dumps(_row(what, number, prompt, answer), ensure_ascii=False) + "\n")
        if not ends.keys() - LEFT_OUT:
            why = _why(ends, what, journal)
            _delete(aside)
            raise InputError(
                "synthetic.no_document",
                "{writer} wrote no document, so there is no shard. The answers ended in these ways: {ends}",
                writer=what.writer.name,
                ends=why,
            )
        rename_into_place(made, place)
    finally:
        journal.close()
    return dict(ends)


def _delete(folder: Path) -> None:
    """Delete a run's folder; the plan last, since a folder without a plan is not a run."""
    if folder.is_dir():
        for name in ("shard.jsonl", "answers.jsonl", "plan.json"):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _end(prompt: Prompt, answer: Answer, gone: set[str]) -> str:
    if prompt.opening_of in gone:
        return "taken out"
    return answer.end if answer.end == "refused" or answer.text.strip() else "empty"


def _why(ends: Counter[str], what: GenerationPlan, journal: AnswerJournal) -> str:
    said = ", ".join(f"{count} {end}" for end, count in ends.items())
    refused = (answer for n in range(what.count) if (answer := journal.read_answer(n)).end == "refused")
    first = next(refused, None)
    return said + (f" ({first.text})" if first else "")


async def _answer_all(
    workspace: Workspace, request: GenerationRequest, what: GenerationPlan, journal: AnswerJournal, progress: Progress
) -> None:
    policy = AgentsPolicy.load(workspace.policy_path("agents.yaml")).llm
    async with open_writer(what.writer, workspace, policy, progress.line) as asking:
        with progress.task(f"{what.writer.name} writes", total=what.count) as task:
            task.advance(len(journal))
            size, requests = asking.batch_size_and_concurrency
            every = (range(first, min(first + size, what.count)) for first in range(0, what.count, size))
            left = (numbers for numbers in every if any(number not in journal for number in numbers))
            workers = [
                asyncio.ensure_future(_answer_some(asking, request, what, journal, left, task)) for _ in range(requests)
            ]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)


async def _answer_some(
    asking: WriterClient,
    request: GenerationRequest,
    what: GenerationPlan,
    journal: AnswerJournal,
    left: Iterator[range],
    task: ProgressTask,
) -> None:
    for (
        numbers
    ) in left:  # complete requests, even if some of their answers exist: the model writes the same answers again
        prompts = [what.get_prompt(number).content for number in numbers]
        answers = await asking.request_answers(
            prompts, request.tokens, request.temperature, derive_request_seed(request.seed, numbers[0])
        )
        for number, answer in zip(numbers, answers, strict=True):
            if number not in journal:
                journal.append_answer(number, answer)
                task.advance()


def derive_request_seed(seed: int, number: int) -> int:
    """The seed of the request that begins with document ``number``: 31 bits, which every endpoint accepts."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{number}".encode()).digest()[:4]) >> 1


def _taken_out(ledger: Ledger, prompts: list[Prompt]) -> set[str]:
    """Keys of the documents whose openings are prompts, but which are no longer training documents."""
    found: set[str] = set()
    keys = [prompt.opening_of for prompt in prompts if prompt.opening_of]
    c = documents.c
    for start in range(0, len(keys), 5000):
        there = sa.select(c.key).where(c.key.in_(keys[start : start + 5000]), c.fate == "train")
        found |= {*keys[start : start + 5000]} - {row["key"] for row in ledger.select_rows(there)}
    return found


def _row(what: GenerationPlan, number: int, prompt: Prompt, answer: Answer) -> dict[str, Any]:
    named = {
        "domain": prompt.domain,
        "source": prompt.source or what.name,
        "license": prompt.license,
        "synthetic_by": what.writer.name,
        "opening_of": prompt.opening_of,
    }
    content = prompt.make_document(answer.text)
    return {"id": f"{what.name}/{number}", **content, **{key: value for key, value in named.items() if value}}


def _to_inbox(plant: Plant, made: GeneratedShard) -> str:
    known = plant.ledger.select_first(sa.select(shards.c.state).where(shards.c.sha256 == made.sha256))
    if known:
        return Message(
            "synthetic.known_shard",
            "the shard was not put into the inbox, because the ledger already has a shard with this content (state: {state})",
            state=known["state"],
        )
    place = plant.workspace.inbox / made.path.name
    aside = place.with_name(f".{place.name}.part")
    try:
        shutil.copyfile(made.path, aside)
        rename_into_place(aside, place)
    finally:
        with suppress(FileNotFoundError):
            aside.unlink()
    return str(place)
