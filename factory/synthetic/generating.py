"""A run: prompts and writer are fixed first, then every prompt is answered, then the shard is put in place whole.

    arguments ─► <workspace>/generated/.<arguments' hash>/ {plan.json, answers.jsonl} ─► generated/<name>.jsonl ─► inbox

The folder is made aside and renamed, so it is whole or absent. Killed at any instruction, the same arguments find it and go on with its
writer and its prompts, whatever was released or ingested meanwhile. Rows are written in the order of their prompts when all are answered: a
shard does not show how often its run was cut off.
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
from factory.core.progress import Progress, Task
from factory.core.workspace import Workspace
from factory.evals.export_folder import read_config
from factory.git.scope import AgentsPolicy
from factory.ingest.rules.claims import counted, strictest
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import Ledger, documents, shards
from factory.ledger.plant import Plant
from factory.synthetic.openings import openings
from factory.synthetic.prompts import Prompt, licence_of, read_prompts
from factory.synthetic.writers import (
    Answer,
    TextWriter,
    WriterClient,
    WriterError,
    endpoint_writer,
    opened,
    release_writer,
)
from kernels.contract.files import put_in_place
from trainer.contract.data.token_shard import file_sha256


# The answers of a run so far: a file of JSON lines that is only appended to, so that a run that was killed goes on.
class AnswerJournal:
    """Of the file ``path``, which is made where there is none. What a kill or a power cut left of a last line is cut off: that answer is
    asked for again. The file is not flushed to the disk after each answer: a power cut costs time alone."""

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

    def add(self, number: int, answer: Answer) -> None:
        assert number not in self._places
        self._file.seek(0, 2)
        place = self._file.tell()
        row = {"number": number, "text": answer.text, "end": answer.end}
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self._places[number] = place

    def answer(self, number: int) -> Answer:
        self._file.seek(self._places[number])
        row = json.loads(self._file.readline())
        return Answer(row["text"], row["end"])

    def close(self) -> None:
        self._file.close()


FOLDER = "generated"
LOCK = "generate"
OF_OPENINGS = 100  # documents, where no number is given
LEFT_OUT = {"taken out", "refused", "empty"}


@dataclass(frozen=True)
class GenerationRequest:
    """What a person asks for. ``release`` None and no ``endpoint``: the champion. ``count`` None: a document for each prompt of the file."""

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

    def check(self, policy: DataPolicy) -> None:
        """Raises: InputError for options that do not go together."""
        if self.endpoint == "champion":
            raise InputError(
                "--endpoint champion: leave it out, the champion writes by default; --release N is another one"
            )
        if self.endpoint and self.release is not None:
            raise InputError("name one who writes: --release N or --endpoint URL --model NAME")
        if bool(self.endpoint) != bool(self.model):
            raise InputError("--endpoint URL and --model NAME go together: an endpoint serves several models")
        if self.prompts and self.domain:
            raise InputError("--domain chooses among this workspace's documents; a row of --prompts names its own")
        if self.licence and not policy.licences.of(self.licence).train:
            raise InputError(
                f"--license {self.licence!r} does not allow training (data.yaml): ingest would drop every document"
            )

    def key(self) -> str:
        """A hash of the arguments, and of the prompts' file. Raises: InputError when that cannot be read."""
        try:
            prompts = file_sha256(self.prompts) if self.prompts else ""
        except OSError as error:
            raise InputError(f"{self.prompts} cannot be read: {error.strerror}") from error
        said = json.dumps(asdict(self) | {"prompts": prompts}, sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class GenerationPlan:
    """What is fixed before the first answer."""

    name: str  # of the shard, without suffix
    writer: TextWriter
    prompts: list[Prompt]
    count: int  # documents: prompts are gone through again where there are fewer
    began: bool = False  # in an earlier call

    def prompt(self, number: int) -> Prompt:
        return self.prompts[number % len(self.prompts)]

    def says(self) -> dict[str, Any]:
        """For a person, before anything is written."""
        licences: Counter[str] = Counter()
        domains: Counter[str] = Counter()
        for number in range(self.count):
            licences[self.prompt(number).license or ""] += 1
            domains[self.prompt(number).domain] += 1
        return {
            "written_by": self.writer.name,
            "count": self.count,
            "prompts": len(self.prompts),
            "openings": sum(prompt.opening_of is not None for prompt in self.prompts),
            "domains": dict(domains),
            "licences": dict(licences),
        }


@dataclass(frozen=True)
class Generated:
    """A finished shard. ``ends``: how the answers ended ('stop', 'length'), and how many prompts gave no document ('empty', 'refused', 'taken out':
    its opening's document was, or came under a licence that does not allow training, meanwhile); empty where it was there before."""

    path: Path
    sha256: str
    written_by: str
    documents: int
    ends: dict[str, int]
    inbox: str = ""  # what became of it there

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


def plan(plant: Plant, request: GenerationRequest) -> GenerationPlan:
    """What a run would do, or what one that was cut off goes on with. Changes nothing. Raises: InputError; ConfigError."""
    policy = DataPolicy.load(plant.workspace.policy("data.yaml"))
    request.check(policy)
    key = request.key()
    if (found := _read_plan(plant.workspace.root / FOLDER / f".{key}", plant.ledger)) is not None:
        return found
    if request.endpoint:
        writer = endpoint_writer(
            request.endpoint, request.model, AgentsPolicy.load(plant.workspace.policy("agents.yaml")).llm
        )
    else:
        writer = release_writer(plant.ledger, request.release)
    if request.prompts:
        prompts = read_prompts(request.prompts, policy.default_domain, request.count)
        count = request.count or len(prompts)
    else:
        count = request.count or OF_OPENINGS
        _refuse_long(writer, request)
        tokenizer = Tokenizer.load(plant.workspace.tokenizer)
        prompts = openings(
            plant.ledger, tokenizer, count, request.opening_tokens, request.domain, request.seed, policy.licences
        )
    named = [
        Prompt(**{**vars(prompt), "license": licence_of(prompt, request.licence, policy.licences)})
        for prompt in prompts
    ]
    return GenerationPlan(f"synthetic-{writer.slug}-{key}", writer, named, count)


def _refuse_long(writer: TextWriter, request: GenerationRequest) -> None:
    if writer.export and request.opening_tokens + 1 + request.tokens > (
        context := read_config(Path(writer.export)).context
    ):
        raise InputError(
            f"--opening-tokens {request.opening_tokens} and --tokens {request.tokens} do not fit the {context} tokens that {writer.name} can read: "
            "name fewer"
        )


def generate(plant: Plant, request: GenerationRequest, *, inbox: bool = False) -> Generated:
    """Write the shard, or go on with it; one that is there already is not written again. ``inbox``: put a copy there.

    Raises: InputError; WorkspaceError while another run writes here; WriterError, and what was written is kept.
    """
    with plant.workspace.lock(LOCK):
        what = plan(plant, request)
        place = plant.workspace.root / FOLDER / f"{what.name}.jsonl"
        aside = plant.workspace.root / FOLDER / f".{request.key()}"
        ends: dict[str, int] = {}
        if not place.is_file():
            if not what.began:
                _begin(aside, what)
            ends = _write(plant, request, what, aside, place)
        _delete(aside)
        with open(place, "rb") as rows:
            made = Generated(place, file_sha256(place), what.writer.name, sum(1 for _ in rows), ends)
        return Generated(**{**vars(made), "inbox": _to_inbox(plant, made)}) if inbox else made


def _begin(folder: Path, what: GenerationPlan) -> None:
    """Make the run's folder, whole or not at all."""
    folder.parent.mkdir(exist_ok=True)
    aside = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed here
    aside.mkdir()
    try:
        fixed = {"name": what.name, "writer": asdict(what.writer), "count": what.count}
        fixed["prompts"] = [prompt.to_json() for prompt in what.prompts]
        (aside / "plan.json").write_text(json.dumps(fixed), encoding="utf-8")
        put_in_place(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _read_plan(folder: Path, ledger: Ledger) -> GenerationPlan | None:
    """Of a run that was cut off; None: there is none, or its shard is in place and the folder was being deleted. Raises: InputError for one
    that cannot be read, or whose release's export is gone."""
    try:
        fixed = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        prompts = [Prompt(**prompt) for prompt in fixed["prompts"]]
        began = TextWriter(**fixed["writer"])
        writer = release_writer(ledger, began.release) if began.release else began  # whose export may lie elsewhere now
        if writer.export_sha256 != began.export_sha256:
            raise ValueError(f"it was begun by {began.name}, which is not release {began.release} any more")
        return GenerationPlan(str(fixed["name"]), writer, prompts, int(fixed["count"]), began=True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder} is not a run that can be gone on with ({error}): delete it to begin again"
        ) from None


def _write(
    plant: Plant,
    request: GenerationRequest,
    what: GenerationPlan,
    aside: Path,
    place: Path,
) -> dict[str, int]:
    """Answer what is left and put the shard in place; returns how the answers ended."""
    journal = AnswerJournal(aside / "answers.jsonl")
    try:
        if len(journal) < what.count:
            try:
                asyncio.run(_answer_all(plant.workspace, request, what, journal, plant.progress))
            except WriterError as error:
                kept = f"{len(journal):,} of {what.count:,} answers are kept: the same command goes on"
                raise WriterError(f"{error}; {kept}" if len(journal) else str(error)) from None
        licences = DataPolicy.load(plant.workspace.policy("data.yaml")).licences
        claimed = {key: one.counts_as(licences) for key, one in counted(plant.ledger, licences).items()}
        barred = {key for key, name in claimed.items() if not licences.of(name).train}
        gone = _taken_out(plant.ledger, what.prompts) | barred
        made = aside / "shard.jsonl"
        ends: Counter[str] = Counter()
        with open(made, "w", encoding="utf-8") as out:
            for number in range(what.count):
                prompt, answer = what.prompt(number), journal.answer(number)
                if prompt.opening_of in claimed:  # maybe by a shard that came since the plan
                    both = [prompt.license or "", claimed[prompt.opening_of]]
                    prompt = replace(prompt, license=strictest(both, licences) or None)
                end = _end(prompt, answer, gone)
                ends[end] += 1
                if end not in LEFT_OUT:
                    out.write(json.dumps(_row(what, number, prompt, answer), ensure_ascii=False) + "\n")
        if not ends.keys() - LEFT_OUT:
            why = _why(ends, what, journal)
            _delete(aside)
            raise InputError(f"{what.writer.name} wrote no document: {why}; nothing was kept")
        put_in_place(made, place)
    finally:
        journal.close()
    return dict(ends)


def _delete(folder: Path) -> None:
    """A run's folder, its plan last: without one it is no run."""
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
    refused = (answer for n in range(what.count) if (answer := journal.answer(n)).end == "refused")
    first = next(refused, None)
    return said + (f" ({first.text})" if first else "")


async def _answer_all(
    workspace: Workspace, request: GenerationRequest, what: GenerationPlan, journal: AnswerJournal, progress: Progress
) -> None:
    policy = AgentsPolicy.load(workspace.policy("agents.yaml")).llm
    async with opened(what.writer, workspace, policy, progress.line) as asking:
        with progress.task(f"{what.writer.name} writes", total=what.count) as task:
            task.advance(len(journal))
            size, requests = asking.at_once
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
    task: Task,
) -> None:
    for numbers in left:  # whole requests, also where some of their answers are there: the same ones are written again
        prompts = [what.prompt(number).content for number in numbers]
        answers = await asking.answers(prompts, request.tokens, request.temperature, seed_of(request.seed, numbers[0]))
        for number, answer in zip(numbers, answers, strict=True):
            if number not in journal:
                journal.add(number, answer)
                task.advance()


def seed_of(seed: int, number: int) -> int:
    """Of the request that begins with document ``number``: 31 bits, which every endpoint can read."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{number}".encode()).digest()[:4]) >> 1


def _taken_out(ledger: Ledger, prompts: list[Prompt]) -> set[str]:
    """Keys of documents whose openings were taken, and which are no training documents any more."""
    found: set[str] = set()
    keys = [prompt.opening_of for prompt in prompts if prompt.opening_of]
    c = documents.c
    for start in range(0, len(keys), 5000):
        there = sa.select(c.key).where(c.key.in_(keys[start : start + 5000]), c.fate == "train")
        found |= {*keys[start : start + 5000]} - {row["key"] for row in ledger.rows(there)}
    return found


def _row(what: GenerationPlan, number: int, prompt: Prompt, answer: Answer) -> dict[str, Any]:
    named = {
        "domain": prompt.domain,
        "source": prompt.source or what.name,
        "license": prompt.license,
        "synthetic_by": what.writer.name,
        "opening_of": prompt.opening_of,
    }
    content = prompt.with_answer(answer.text)
    return {"id": f"{what.name}/{number}", **content, **{key: value for key, value in named.items() if value}}


def _to_inbox(plant: Plant, made: Generated) -> str:
    known = plant.ledger.one(sa.select(shards.c.state).where(shards.c.sha256 == made.sha256))
    if known:
        return f"it was {known['state']} before"
    place = plant.workspace.inbox / made.path.name
    aside = place.with_name(f".{place.name}.part")
    try:
        shutil.copyfile(made.path, aside)
        put_in_place(aside, place)
    finally:
        with suppress(FileNotFoundError):
            aside.unlink()
    return str(place)
