"""The command ``factory ingest``: ingests files, given as paths, folders, patterns or addresses."""

from __future__ import annotations

import getpass
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factory.cli.core.options import AnswerPrinter, register_command
from factory.core.errors import InputError, WorkspaceError
from factory.core.progress import Progress
from factory.core.workspace import Workspace
from factory.ledger.plant import Plant
from kernels.contract.message import Message

if TYPE_CHECKING:
    from factory.ingest.chain import ShardReport
    from factory.ingest.input_files import GatheredFiles

commands = typer.Typer()


@register_command(commands)
def ingest(
    plant: Plant,
    say: AnswerPrinter,
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files, folders, patterns ('data/*.csv') or addresses (s3://…, hf://datasets/…). Formats: JSON lines and arrays, Parquet, "
            "Arrow, CSV, text, code, HTML, WARC, notebooks, each also compressed or in zip and tar files, and Hugging Face data sets on disk."
        ),
    ] = None,
    again: Annotated[
        bool,
        typer.Option("--again", help="Try quarantined files again: the named ones, or all files in quarantine/."),
    ] = False,
    small_vocabulary: Annotated[
        bool,
        typer.Option(
            "--small-vocabulary",
            help="Train the tokenizer now, though there is less text than data.yaml asks for. A tokenizer is trained only once.",
        ),
    ] = False,
    preview: Annotated[
        bool,
        typer.Option(
            "--preview",
            help="Show how the first rows of each file are read, and which rows are dropped. Store nothing.",
        ),
    ] = False,
) -> None:
    """Ingest shards: clean, deduplicate and tokenise their documents, and record what happened to each document.

    Look at a new kind of data with --preview first. While the daemon runs, put shards into the inbox instead. With --again, the running
    daemon tries the files in quarantine/ again in its next pass. A file that cannot be read does not stop the others. The exit code is 2 if
    no file was ingested.
    """
    from factory.core.workspace import MODEL_LOOP
    from factory.ingest.filing import list_quarantined_files, request_retry
    from factory.ingest.inbox import read_ingest_times
    from factory.ingest.input_files import GatheredFiles, gather_files
    from factory.ingest.replay_corpus import find_waiting_replay_corpus, ingest_replay_corpus
    from factory.ledger.file_events import SMALL_VOCABULARY
    from factory.ledger.ledger import record_event
    from factory.releasable.recorded_report import update_report_if_stale

    if preview:
        if not paths or again or small_vocabulary:
            raise InputError(
                "ingest.preview_options",
                "--preview needs the names of files, and cannot be used with --again or --small-vocabulary.",
            )
        _preview(plant.workspace, gather_files(plant, paths), say)
        return
    if small_vocabulary:
        with plant.ledger.begin() as tx:
            record_event(tx, SMALL_VOCABULARY, "tokenizer", {"by": getpass.getuser()})
    waiting = find_waiting_replay_corpus(plant)
    if not paths and not again and not waiting:
        if small_vocabulary:
            said = Message(
                "ingest.trains_tokenizer",
                "The next ingest trains the tokenizer, even if there is less text than data.yaml asks for.",
            )
            say({"files": [], "says": said}, f"  {said}")
            return
        raise InputError(
            "ingest.no_shards",
            "Give the files to ingest. To try all files in quarantine/ again: 'factory ingest --again'",
        )
    with ExitStack() as held:
        try:
            held.enter_context(plant.workspace.hold_lock(MODEL_LOOP))
        except WorkspaceError as busy:
            files = gather_files(plant, paths).files if paths else list_quarantined_files(plant.workspace)
            if not again or any(path.resolve().parent != plant.workspace.quarantine.resolve() for path in files):
                raise WorkspaceError(
                    "ingest.daemon_runs",
                    "{busy}. While 'factory run' works, put the files into {inbox}: the daemon ingests files from "
                    "there.",
                    busy=busy,
                    inbox=plant.workspace.inbox,
                ) from None
            request_retry(plant.ledger, files)
            again_later = Message(
                "ingest.tries_again",
                "In its next pass, the running daemon tries {files:,|quarantined file|quarantined files} again.",
                files=len(files),
            )
            said = again_later if files else Message("ingest.no_quarantined", "No file is in quarantine.")
            say({"files": [path.name for path in files], "says": said}, f"  {said}")
            return
        found = _gathered(plant, paths) if paths or again else GatheredFiles()
        done = _Done(plant.progress, found.broken, read_ingest_times(plant.ledger))
        if waiting:
            ingest_replay_corpus(plant, waiting, done.ingested)
        _ingest_all(plant, found, done, again)
        update_report_if_stale(plant)
    say([vars(report) for report in done.reports])
    done.end(found)


def _preview(workspace: Workspace, found: GatheredFiles, say: AnswerPrinter) -> None:
    """Print how the first rows of each file are read. Raises: InputError if no file can be read."""
    from factory.ingest.file_groups import FileGroup
    from factory.ingest.preview import preview_file_group
    from factory.ingest.reading.rows import ShardProblem

    shown, broken = [], dict(found.broken)
    for pack in [*found.packs, *map(FileGroup.of_file, found.files)]:
        try:
            shown.append(preview_file_group(workspace, pack))
        except (ShardProblem, InputError) as error:
            broken[pack.name] = str(error)
            continue
        for line in shown[-1].format_lines():
            say.print_line(f"  {line}")
    stored = Message(
        "ingest.previewed",
        "The preview stored nothing. The preview does not look for duplicates or for quotes of held-out documents, but ingest "
        "does.",
    )
    lines = [*(f"{name}: {why}" for name, why in broken.items()), stored]
    say({"files": [one.to_json() for one in shown], "broken": broken}, (f"  {line}" for line in lines))
    if not shown:
        for why in broken.values():
            raise InputError("ingest.nothing_readable", "No file can be read. The first reason: {reason}", reason=why)
        raise InputError("ingest.no_files", "There is no file to read.")


def _gathered(plant: Plant, paths: list[str] | None) -> GatheredFiles:
    from factory.ingest.filing import list_quarantined_files
    from factory.ingest.input_files import GatheredFiles, gather_files

    if not paths:
        found = GatheredFiles(files=list_quarantined_files(plant.workspace))
        if not found.files:
            plant.progress.line(Message("ingest.quarantine_empty", "  No file is in quarantine."))
        return found
    found = gather_files(plant, paths)
    if words := found.describe_unsupported_files():
        plant.progress.line(f"  {words}")
    for why in found.broken.values():
        plant.progress.line(f"  {why}")
    if found.known:
        known = Message("ingest.known_files", "  {files:,|file was|files were} ingested before.", files=found.known)
        plant.progress.line(known)
    return found


class _Done:
    """Collects and prints the result for each file, and the summary at the end."""

    def __init__(self, progress: Progress, failed: dict[str, str], before: dict[str, float]) -> None:
        self.progress = progress
        self.before = before  # by SHA-256 of a shard, when it was ingested
        self.new: list[ShardReport] = []
        self.reports: list[ShardReport] = []
        self.failed = dict(failed)

    def ingested(self, name: str, report: ShardReport) -> None:
        """Keep and print the report of a shard. ``name``: the file or folder that contained the shard."""
        from factory.ingest.inbox import describe_report

        self.reports.append(report)
        self.progress.line(describe_report(name, report, self.before))
        if report.state == "ingested" and report.sha256 not in self.before:
            self.new.append(report)
            self.before[report.sha256] = time.time()

    def end(self, found: GatheredFiles) -> None:
        """Print the summary. Raises: InputError if no file was ingested although files were given."""
        good = [report for report in self.reports if report.state == "ingested"]
        bad, known = len(self.reports) - len(good), len(good) - len(self.new)
        if len(self.reports) + len(self.failed) > 1:
            counts: Counter[str] = Counter()
            for report in self.new:
                counts.update({key: report.counts[key] for key in ("train", "held_out")})
            words: list[str] = [
                Message(
                    "ingest.summary",
                    "{shards:,|shard|shards}: {train:,|document|documents} to train on, {held_out:,} held out",
                    shards=len(self.new),
                    train=counts["train"],
                    held_out=counts["held_out"],
                )
            ]
            words += [f"{known:,} ingested before"] * (known > 0)
            words += [f"{bad:,} quarantined"] * (bad > 0)
            words += [f"{len(self.failed):,} not ingested ({', '.join(list(self.failed)[:4])})"] * bool(self.failed)
            self.progress.line(f"  {'; '.join(words)}")
        if not good and (self.reports or self.failed or found.left_out):
            why = next((f". The first reason: {reason}" for reason in self.failed.values()), "")
            raise InputError(
                "ingest.nothing_ingested",
                "No file was ingested. {quarantined:,|file is|files are} quarantined, {failed:,|file|files} could "
                "not be ingested, and {unknown:,|file has|files have} an unknown format{reason}",
                quarantined=bad,
                failed=len(self.failed),
                unknown=found.left_out.total(),
                reason=why,
            )


def _ingest_all(plant: Plant, found: GatheredFiles, done: _Done, again: bool) -> None:
    """Ingest each file. A file that fails because there is too little text for a tokenizer is tried again after the others."""
    from factory.ingest.file_groups import ingest_file_group
    from factory.ingest.inbox import concerns_only_this_file, ingest_path
    from factory.ingest.remote import record_fetched_file
    from factory.ingest.vocabulary import TooLittleTextError

    def settled(path: Path, reports: list[ShardReport]) -> None:
        if address := found.addresses.get(path):
            record_fetched_file(plant, path, address, reports)

    def file(path: Path, other_files: list[Path]) -> None:
        how: dict[str, Any] = {
            "again": again,
            "ingested": partial(done.ingested, path.name),
            "other_files": other_files,
        }
        settled(path, ingest_path(plant, path, **how))

    def pack(number: int, other_files: list[Path]) -> None:
        say = partial(done.ingested, found.packs[number].name)
        unread: set[Path] = set()
        how: dict[str, Any] = {"again": again, "ingested": say, "other_files": other_files, "unread": unread}
        reports = ingest_file_group(plant, found.packs[number], **how)
        for path in (path for _, path in found.packs[number].files if path in found.addresses):
            if path in unread:  # it goes into quarantine/, so that it is not fetched again
                file(path, other_files)
            else:
                settled(path, reports)

    todo: list[tuple[str, Callable[[list[Path]], None], list[Path]]] = [
        (one.name, partial(pack, number), [path for _, path in one.files]) for number, one in enumerate(found.packs)
    ]
    of_name = Counter(path.name for path in found.files)
    shown = lambda path: path.name if of_name[path.name] == 1 else str(path)  # files in two folders may have one name
    todo += [(shown(path), partial(file, path), [path]) for path in found.files]
    alone = len(todo) == 1
    while todo:
        waiting = []
        for number, (name, call, _) in enumerate(todo):
            try:
                call([path for _, _, files in todo[number + 1 :] for path in files])
                done.failed.pop(name, None)
            except TooLittleTextError as error:
                if alone:
                    raise
                waiting.append(todo[number])
                done.failed[name] = str(error)
            except Exception as error:
                if alone or not concerns_only_this_file(error):
                    raise
                done.failed[name] = str(error)
                plant.progress.line(
                    Message("ingest.not_ingested", "  {file} is not ingested: {reason}", file=name, reason=error)
                )
        if len(waiting) == len(todo) or not any(report.state == "ingested" for report in done.reports):
            break
        todo = waiting
