"""The releasability report names, from the first shard on, each problem that would hold back a release. Its advice removes the problem."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

import factory.cli  # noqa: F401 (registers every command)
from factory.cli.app import app
from factory.core.errors import ConfigError
from factory.core.workspace import Workspace
from factory.duties.runner import run_duty_pass
from factory.ingest.chain import ShardReport
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.releasable.recorded_report import read_newest_report, update_report_if_stale
from factory.releasable.report import ReportLine, format_summary, make_report
from factory.tasks.policy import TasksPolicy
from kernels.contract.message import Message
from tests.support.factory.command import command_here
from tests.support.factory.made_up_text import texts, use_policy
from tests.support.factory.task_files import sums, write_task
from tests.support.messages import codes
from tests.support.said import Said

Ingest = Callable[..., ShardReport]


def by_name(lines: list[ReportLine]) -> dict[str, ReportLine]:
    return {line.name: line for line in lines}


def commands(todo: str) -> list[str]:
    return re.findall(r"'factory ([^']*)'", todo)


def test_the_report_is_empty_before_the_first_shard(workspace: Workspace, ledger: Ledger) -> None:
    assert make_report(Plant(workspace, ledger)) == []


def test_data_of_one_source_can_be_released(workspace: Workspace, ledger: Ledger, ingest: Ingest) -> None:
    ingest([row | {"source": "reviews"} for row in texts(0, 120)])
    found = by_name(make_report(Plant(workspace, ledger)))
    assert found["text"].ok is not False and found["licences"].ok and found["gain"].ok
    said = found["text"].text
    assert isinstance(said, Message) and said.data["needed"] == 8
    assert said.data["groups"] > 0 and said.data["dev_groups"] > 0


def test_too_few_groups_are_mended_by_the_advised_command(workspace: Workspace, ledger: Ledger, ingest: Ingest) -> None:
    use_policy(
        workspace,
        "domains: {default: {group: source}}\ntokenizer: {vocab_size: 400}\nlicences: {known: {MIT: {train: true, release: true}}}\n",
    )
    ingest([row | {"source": f"s{n % 6}"} for n, row in enumerate(texts(0, 120))])
    line = by_name(make_report(Plant(workspace, ledger)))["text"]
    assert isinstance(line.text, Message) and line.ok is False and line.text.code == "releasable.few_groups"
    assert (line.text.data["needed_documents"], line.text.data["needed"]) == (8, 8)
    command = next(one for one in commands(line.todo) if one.startswith("data relabel"))
    assert command_here(*command.split(), "--yes", home=workspace).exit_code == 0
    use_policy(
        workspace,
        "domains: {default: {group: document}}\ntokenizer: {vocab_size: 400}\nlicences: {known: {MIT: {train: true, release: true}}}\n",
    )
    ingest([row | {"source": "s1"} for row in texts(500, 120)], "next.jsonl")
    assert by_name(make_report(Plant(workspace, ledger)))["text"].ok is not False


def test_a_missing_licence_holds_until_the_advised_command_allows_it(
    workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    ingest([{key: value for key, value in row.items() if key != "license"} for row in texts(0, 120)])
    line = by_name(make_report(Plant(workspace, ledger)))["licences"]
    assert isinstance(line.text, Message) and line.ok is False and line.text.code == "releasable.licence_share"
    assert line.text.data["licences"] == ["no licence 100.0%"] and line.text.data["share"] == 1.0
    allow, take_out = map(shlex.split, commands(line.todo))
    assert command_here(*take_out, "--dry-run", home=workspace).exit_code == 0
    assert command_here(*allow, home=workspace).exit_code == 0
    assert "vocab_size: 400" in (workspace.root / "policies" / "data.yaml").read_text(), "the rest of the policy stays"
    assert by_name(make_report(Plant(workspace, ledger)))["licences"].ok


@pytest.mark.parametrize("which", [0, 2])
def test_an_unlisted_licence_is_allowed_or_removed_by_the_advised_command(
    which: int, workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    ingest([*texts(0, 120), *(row | {"license": "My Own 1.0"} for row in texts(200, 60))])
    said = commands(by_name(make_report(Plant(workspace, ledger)))["licences"].todo)
    assert len(said) == 3
    yes = ["--yes"] if which else []
    assert command_here(*shlex.split(said[which]), *yes, home=workspace).exit_code == 0
    assert by_name(make_report(Plant(workspace, ledger)))["licences"].ok


def test_a_licence_name_from_a_file_is_never_part_of_an_advised_command(
    workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    """A person pastes it into a shell."""
    ingest([row | {"license": "$(touch pwned)"} for row in texts(0, 120)])
    todo = by_name(make_report(Plant(workspace, ledger)))["licences"].todo
    assert isinstance(todo, Message) and todo.code == "releasable.odd_licence" and commands(todo) == []


def test_a_licence_that_only_copies_of_documents_have_is_settled_by_claims(
    workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    """No document has this licence in its own row, so no document could be relabelled."""
    ingest(texts(0, 120))
    ingest([row | {"license": "My Own 1.0"} for row in texts(0, 60)], "copies.jsonl")
    todo = by_name(make_report(Plant(workspace, ledger)))["licences"].todo
    assert "data claims" in todo and "relabel" not in todo


def test_the_report_says_how_much_data_is_missing(workspace: Workspace, ledger: Ledger, ingest: Ingest) -> None:
    ingest(texts(0, 6))
    line = by_name(make_report(Plant(workspace, ledger)))["text"]
    assert line.ok is False and codes([line.text, line.todo]) == [
        "releasable.few_groups",
        "releasable.more_or_other_domain",
    ]
    said = format_summary([line])
    assert isinstance(said, Message) and (said.code, said.data["names"]) == ("releasable.held", ["text"])


def test_a_small_task_is_no_guard_and_the_report_names_the_needed_size(
    workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    ingest(texts(0, 60))
    write_task(workspace, "sums", sums(40), kind="maths")
    line = by_name(make_report(Plant(workspace, ledger)))["task sums"]
    assert isinstance(line.text, Message) and line.ok is None and line.text.code == "releasable.informs_only"
    assert line.text.data["items"] == 40 and line.text.data["size"].data["items"] > 1000


def test_a_bad_benchmark_file_is_reported_with_a_command_that_checks_it(
    workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    """It has no YAML file beside it."""
    ingest(texts(0, 60))
    folder = workspace.root / "policies" / "tasks"
    folder.mkdir(parents=True)
    (folder / "few.jsonl").write_text('{"question": "2 + 2?", "answer": "#### 4"}\n')
    line = next(line for line in make_report(Plant(workspace, ledger)) if line.name.startswith("task "))
    [command] = commands(line.todo)
    assert line.ok is False and "items_min" in line.text
    assert str(command_here(*shlex.split(command), home=workspace).exception) == line.text


@pytest.mark.parametrize(("name", "others"), [("sums", "{}"), ("my.sums", "{tier: each}")])
def test_the_advised_margin_makes_a_task_a_guard(
    name: str, others: str, workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    """The command runs as it stands, and leaves the task its tier."""
    ingest(texts(0, 60))
    write_task(workspace, name, sums(40), kind="maths")
    (workspace.root / "policies" / "tasks.yaml").write_text(f"others: {others}\n")
    tier = TasksPolicy.load(workspace.policy_path("tasks.yaml")).get_settings_of_task(name).tier
    command = re.search(
        r"'factory (config set .*)'$", by_name(make_report(Plant(workspace, ledger)))[f"task {name}"].todo
    )
    assert command
    done = CliRunner().invoke(app, [*shlex.split(command[1]), "--workspace", str(workspace.root)])
    assert done.exit_code == 0, done.output
    assert by_name(make_report(Plant(workspace, ledger)))[f"task {name}"].ok is True
    assert TasksPolicy.load(workspace.policy_path("tasks.yaml")).get_settings_of_task(name).tier == tier


def test_the_report_is_recorded_once_and_again_when_its_input_changes(
    workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    ingest(texts(0, 60))
    said = Said()
    update_report_if_stale(Plant(workspace, ledger, said))
    update_report_if_stale(Plant(workspace, ledger, said))
    count = lambda: ledger.read("SELECT COUNT(*) AS n FROM events WHERE kind = 'releasable'")[0]["n"]
    assert count() == 1 and any("recipe" in line for line in said.lines)
    kept = read_newest_report(workspace, ledger)
    assert (
        kept
        and not kept["stale"]
        and [line["name"] for line in kept["lines"]] == [line.name for line in make_report(Plant(workspace, ledger))]
    )
    shown = command_here("status", home=workspace).stdout
    assert "release   held by recipe" in shown and "since this report" not in shown
    use_policy(workspace, "tokenizer: {vocab_size: 401}\n")
    assert "since this report" in command_here("status", home=workspace).stdout
    ingest(texts(100, 60), "more.jsonl")
    update_report_if_stale(Plant(workspace, ledger, said))
    assert count() == 2


def test_the_daemon_makes_the_report_even_if_it_can_plan_nothing(
    workspace: Workspace, ledger: Ledger, ingest: Ingest
) -> None:
    """A recipe that does not fit ends a pass before its first action."""
    ingest(texts(0, 60))
    with pytest.raises(ConfigError, match="vocab_size"):
        run_duty_pass(Plant(workspace, ledger, Said()))
    kept = read_newest_report(workspace, ledger)
    assert kept and [line["name"] for line in kept["lines"] if line["ok"] is False] == ["recipe"]
