"""The kernel engineer in the plant: each failure is one clear error, nothing is left behind, and a run survives ``kill -9``."""

from __future__ import annotations

import importlib.util
import io
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml
from rich.console import Console

from agents.core.proposal import Edit, Proposal
from agents.kernel_engineer.draft import AGENT
from factory.code_loop import proposing, submitting
from factory.code_loop.agent_runs import (
    IMPROVE,
    AgentOptions,
    AgentRun,
    AgentRuns,
    NoModelReplyError,
    find_agent_checkpoint_database,
)
from factory.code_loop.workbench import LiveWorkbench
from factory.core.console import Terminal
from factory.core.devices import run_in_parallel
from factory.core.errors import FactoryError, InputError
from factory.core.workspace import Workspace, WorkspaceConfig, find_checkout_root
from factory.gates.training_start import find_training_start
from factory.git.repository import RepositoryError
from factory.ledger.ledger import agent_runs, exchanges, profiles, proposals
from factory.ledger.plant import Plant
from factory.sandbox.sandbox import SandboxResult
from kernels.contract.message import Message
from tests.support.factory.code_loop import Made, fewer_steps, make
from tests.support.factory.command import Running
from tests.support.factory.engineer import profile, recorded
from tests.support.git import git
from tests.support.messages import codes, refused
from tests.support.patience import PATIENCE_S
from tests.support.replay_server import RecordedSession, ReplayServer


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    case = make()
    policy = case.workspace.root / "policies" / "agents.yaml"
    before = git(case.target, "branch", "--list", "factory/*"), len(case.ledger.select_rows(sa.select(proposals)))
    yield case
    policy.unlink(missing_ok=True)
    with case.ledger.begin() as tx:
        tx.execute(agent_runs.update().where(agent_runs.c.state == "running").values(state="abandoned"))
        tx.execute(exchanges.delete())
    assert case.left_behind() == []
    if "proposed" not in {row["state"] for row in case.ledger.select_rows(sa.select(agent_runs))}:
        assert before == (
            git(case.target, "branch", "--list", "factory/*"),
            len(case.ledger.select_rows(sa.select(proposals))),
        )


def policy(made: Made, **llm: Any) -> None:
    """The workspace's own agents.yaml, with another ``llm``."""
    raw = yaml.safe_load((find_checkout_root() / "policies" / "agents.yaml").read_text())
    quick = {"model": "replay", "attempts": 1, "silence_seconds": 60, "reply_tokens": 4000}
    raw["llm"] = raw.get("llm", {}) | quick | llm
    (made.workspace.root / "policies" / "agents.yaml").write_text(yaml.safe_dump(raw))


def begun(made: Made, asked: str) -> int:
    """A run as one that was profiled and then killed leaves it: the tests need no profile of their own."""
    path = made.workspace.reports / "profile.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(profile("qk_norm_rope" if asked == "qk_norm_rope" else "swiglu")))
    with made.ledger.begin() as tx:
        values = {"code_commit": made.base, "path": str(path), "summary": {}, "created_at": time.time()}
        number = tx.execute(profiles.insert().values(**values)).inserted_primary_key
        assert number is not None
        row = {"agent": AGENT, "asked": asked, "base_commit": made.base, "profile": number[0], "state": "running"}
        run = tx.execute(agent_runs.insert().values(**row, created_at=time.time())).inserted_primary_key
        assert run is not None
        return int(run[0])


def proposed(made: Made, options: AgentOptions, count: int = 1) -> list[int]:
    return proposing.make_proposals(Plant(made.workspace, made.ledger), agent=AGENT, options=options, count=count)


def state_of(made: Made, run: int) -> str:
    row = made.ledger.select_first(sa.select(agent_runs).where(agent_runs.c.id == run))
    assert row is not None
    return str(row["state"])


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (AgentOptions(), "code_loop.no_endpoint"),
        (AgentOptions("llm.invalid"), "llm.wrong_url"),
        (AgentOptions("files:/proc/nowhere"), "llm.no_folder"),
    ],
)
def test_an_invalid_endpoint_is_refused_before_anything_is_measured(
    made: Made, options: AgentOptions, code: str
) -> None:
    policy(made, model="")
    before = len(made.ledger.select_rows(sa.select(profiles)))
    with pytest.raises(InputError) as caught:
        proposed(made, options)
    assert caught.value.code == code and len(made.ledger.select_rows(sa.select(profiles))) == before


@pytest.mark.parametrize(
    ("session", "asked", "llm", "error", "code", "state"),
    [
        ({"key": "sk-right", "turns": []}, "swiglu", {}, NoModelReplyError, "llm.key_refused", "running"),
        ({"turns": [{"status": 503}]}, "swiglu", {}, NoModelReplyError, "llm.no_reply", "running"),
        (
            {"turns": []},
            "swiglu",
            {"per_proposal": {"tokens": 5000, "usd": 1}},
            NoModelReplyError,
            "code_loop.budget_exhausted",
            "nothing",
        ),
        (
            {"turns": []},
            "swiglu",
            {"per_day": {"tokens": 5000, "usd": 1}},
            NoModelReplyError,
            "code_loop.budget_exhausted",
            "running",
        ),
        ({"turns": []}, "swiglo", {}, InputError, "kernel_engineer.unknown_target", "abandoned"),
        (
            {"turns": []},
            "trainer/contract/data/packing.py:9",
            {},
            InputError,
            "kernel_engineer.not_patchable",
            "abandoned",
        ),
    ],
    ids=["wrong key", "failing", "proposal's budget", "day's budget", "no target", "the judge's"],
)
def test_each_failure_of_the_model_is_one_clear_error(
    made: Made,
    monkeypatch: pytest.MonkeyPatch,
    session: dict[str, Any],
    asked: str,
    llm: dict[str, Any],
    error: type[FactoryError],
    code: str,
    state: str,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    policy(made, **llm)
    run = begun(made, asked)
    with ReplayServer(RecordedSession.model_validate(session)) as server, pytest.raises(error) as caught:
        proposed(made, AgentOptions(server.url, target=asked))
    causes = [caught.value.message]
    while isinstance(problem := causes[-1].data.get("problem"), Message):
        causes.append(problem)
    assert code in codes(causes) and "sk-wrong" not in str(caught.value)
    assert state_of(made, run) == state


def test_a_dirty_checkout_and_a_detached_head_are_refused(made: Made) -> None:
    options = AgentOptions("http://127.0.0.1:1/v1", "m")
    file = made.target / "kernels" / "swiglu" / "__init__.py"
    text = file.read_text()
    try:
        file.write_text(text + "# mine\n")
        with pytest.raises(RepositoryError, match=r"kernels/swiglu/__init__.py"):
            proposed(made, options)
        file.write_text(text)
        git(made.target, "checkout", "-q", "--detach")
        with pytest.raises(RepositoryError, match="git switch"):
            proposed(made, options)
    finally:
        file.write_text(text)
        git(made.target, "checkout", "-q", "main")


def test_the_search_proposer_takes_no_endpoint_and_no_target(made: Made) -> None:
    with refused("code_loop.search_options", InputError):
        proposing.make_proposals(
            Plant(made.workspace, made.ledger), agent="search", options=AgentOptions(target="swiglu")
        )


def test_asking_for_a_target_abandons_unfinished_runs_for_other_targets(made: Made) -> None:
    policy(made)
    first, second = begun(made, "attention"), begun(made, "swiglu")
    with ReplayServer(RecordedSession(turns=[])) as server, pytest.raises(NoModelReplyError):
        proposed(made, AgentOptions(server.url, target="swiglu"))
    assert (state_of(made, first), state_of(made, second)) == ("abandoned", "running")


def test_a_person_and_the_daemon_do_not_continue_each_others_runs(made: Made, tmp_path: Path) -> None:
    options = AgentOptions(f"files:{tmp_path}")
    mine, daemons = (AgentRuns.open(Plant(made.workspace, made.ledger), AGENT, options, by=by) for by in ("", IMPROVE))
    run = mine.begin_run(made.base, "")
    assert daemons.find_unfinished(made.base, 1) == []
    own = daemons.begin_run(made.base, "")
    assert [[one.number for one in runs.find_unfinished(made.base, 2)] for runs in (mine, daemons)] == [
        [run.number],
        [own.number],
    ]
    for runs, number in ((mine, run.number), (daemons, own.number)):
        runs.record_run_end(number, "abandoned")


def test_several_runs_wait_for_the_model_in_parallel(made: Made, tmp_path: Path) -> None:
    policy(made, exchanges=1)
    runs = [begun(made, "kernel:swiglu"), begun(made, "kernel:attention")]  # killed: the same command goes on with both
    options, found = AgentOptions(f"files:{tmp_path}", "m"), []
    worker = threading.Thread(target=lambda: found.append(proposed(made, options, count=2)))
    worker.start()
    deadline = time.monotonic() + PATIENCE_S
    while len(requests := list(tmp_path.glob("*.request.json"))) < 2:  # both ask before either is answered
        assert worker.is_alive() and time.monotonic() < deadline
        time.sleep(0.05)
    for path in requests:
        path.with_name(path.name.replace("request", "reply")).write_text(json.dumps({"content": "I would not know."}))
    worker.join(PATIENCE_S)
    assert found == [[]] and [state_of(made, run) for run in runs] == ["nothing", "nothing"]
    assert all(any(f"{AGENT}-{run}-001" in path.name for path in requests) for run in runs)
    with refused("code_loop.count_and_target", InputError):
        proposed(made, AgentOptions(f"files:{tmp_path}", "m", target="swiglu"), count=2)


def test_two_runs_never_have_the_same_target_at_once(
    made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    policy(made)
    options, start = AgentOptions(f"files:{tmp_path}", "m"), find_training_start(made.ledger)
    assert start is not None
    bench = LiveWorkbench(Plant(made.workspace, made.ledger), made.base, start)
    runs = AgentRuns.open(Plant(made.workspace, made.ledger), AGENT, options, 3)
    work_on = lambda: proposing.begin_or_continue_runs(runs, bench, made.base, 3)
    begun(made, "")  # which chose the first target
    number = made.ledger.select_rows(sa.select(profiles).order_by(profiles.c.id))[-1]["id"]
    monkeypatch.setattr(proposing, "profile_live_code", lambda *_: number)
    for _ in range(2):
        assert [run.target for run in work_on()] == ["", "kernel:attention"]  # nothing else is worth it


def test_proposals_judged_in_parallel_do_not_mix(made: Made) -> None:
    edits = [Edit("trainer/optim/schedule.py", f"import socket  # {number}\n") for number in range(4)]
    drafts = [Proposal(AGENT, f"file:{n}", f"Try {n}", "Because.", 1.1, (edit,)) for n, edit in enumerate(edits)]
    numbers = run_in_parallel(
        [partial(submitting.submit_proposal, Plant(made.workspace, made.ledger), d, made.base) for d in drafts]
    )
    rows = {n: made.ledger.select_first(sa.select(proposals).where(proposals.c.number == n)) for n in numbers}
    for number, drafted in zip(numbers, drafts, strict=True):
        row = rows.pop(number)
        assert row and (row["title"], row["state"]) == (drafted.title, "judged")
        text = git(made.target, "show", f"{row['branch']}:trainer/optim/schedule.py")
        assert text == drafted.edits[0].new_text.strip()
        git(made.target, "branch", "-D", row["branch"])
    with made.ledger.begin() as tx:
        tx.execute(proposals.delete().where(proposals.c.number.in_(numbers)))


def test_a_proposal_judged_before_a_kill_is_not_judged_again(made: Made, tmp_path: Path) -> None:
    drafted = Proposal(
        AGENT,
        "file:trainer/optim/schedule.py",
        "Try",
        "Because.",
        1.1,
        (Edit("factory/gates/release/judge.py", "x = 1\n"),),
    )
    runs = AgentRuns.open(Plant(made.workspace, made.ledger), AGENT, AgentOptions(f"files:{tmp_path}"))
    run = AgentRun(begun(made, ""), None, "", 0, time.time())  # type: ignore[arg-type]
    assert runs.find_judged_proposal(run, drafted) is None
    number = submitting.submit_proposal(Plant(made.workspace, made.ledger), drafted, made.base)
    assert runs.find_judged_proposal(run, drafted) == number
    assert runs.find_judged_proposal(replace(run, began=time.time()), drafted) is None  # another run's
    with made.ledger.begin() as tx:
        tx.execute(proposals.delete().where(proposals.c.number == number))


def test_the_last_line_of_untrusted_code_cannot_control_a_terminal() -> None:
    why = SandboxResult(1, "", "Traceback\nOops: \x1b]0;owned\x07\x1b[2Jfine", 1.0, None, 0, 0).describe_ending()
    assert why.endswith("Oops: �]0;owned��[2Jfine")
    screen = io.StringIO()
    Terminal(Console(file=screen)).line("a\x1b[31mb")
    assert screen.getvalue() == "a�[31mb\n"


def test_a_damaged_database_of_agent_checkpoints_is_one_clear_error(made: Made) -> None:
    policy(made)
    begun(made, "swiglu")
    saved = made.workspace.root / "agents.db"
    for ending in ("", "-wal", "-shm"):
        saved.with_name(saved.name + ending).unlink(missing_ok=True)
    saved.write_text("no database" * 1000)
    try:
        with (
            ReplayServer(RecordedSession(turns=[])) as server,
            refused("loop.damaged_checkpoints", NoModelReplyError, file=str(saved)),
        ):
            proposed(made, AgentOptions(server.url, target="swiglu"))
    finally:
        saved.unlink()


def test_agent_checkpoints_are_stored_in_the_ledgers_kind_of_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Workspace.create(tmp_path / "here")
    assert find_agent_checkpoint_database(here) == here.root / "agents.db"
    there = Workspace.create(tmp_path / "there", WorkspaceConfig(ledger_url="postgresql+psycopg://me:secret@host/db"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert find_agent_checkpoint_database(there) == "postgresql://me:secret@host/db"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refused("code_loop.no_driver", InputError) as caught:
        find_agent_checkpoint_database(there)
    assert "secret" not in str(caught.value)


def command(made: Made, *words: str) -> Running:
    return Running("propose", "-w", str(made.workspace.root), *words, log=made.workspace.logs / "proposing.log")


def waited(folder: Path, pattern: str, process: Running) -> Path:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := sorted(folder.glob(pattern))):
        assert process.poll() is None, process.log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found[-1]


@pytest.mark.slow("the command twice, killed once, and a check of what was proposed")
def test_a_killed_run_answered_by_a_person_continues_with_the_same_request(made: Made, tmp_path: Path) -> None:
    policy(made, rounds=1)
    run, words = begun(made, "swiglu"), ("--endpoint", f"files:{tmp_path}", "--target", "swiglu")
    process = command(made, *words)
    first = waited(tmp_path, "*-001-*.request.json", process)
    assert "SwiGLU" in first.read_text() or "swiglu" in first.read_text()
    reply = {"tool_calls": [{"name": "read_file", "arguments": {"path": "kernels/swiglu/__init__.py"}}]}
    first.with_name(first.name.replace("request", "reply")).write_text(json.dumps(reply))
    second = waited(tmp_path, "*-002-*.request.json", process)
    process.kill()
    process.wait()
    cheat = recorded("cheat").answer(0, 0)
    assert cheat is not None and state_of(made, run) == "running"
    reply = {"tool_calls": [{"name": call.name, "arguments": call.arguments} for call in cheat.calls]}
    second.with_name(second.name.replace("request", "reply")).write_text(json.dumps(reply))
    process = command(made, *words)
    code, said = process.wait(PATIENCE_S), process.log.read_text()
    assert code == 0, said
    assert f"run {run} continues" in said and "  nothing proposed: " in said
    assert state_of(made, run) == "nothing"
    rows = made.ledger.select_rows(sa.select(exchanges).where(exchanges.c.run == run).order_by(exchanges.c.id))
    assert [row["state"] for row in rows] == ["done", "reserved", "done"]  # what the killed one had set aside stays so
    assert len(list(tmp_path.glob("*.request.json"))) == 2  # nothing was asked twice


@pytest.mark.long("an agent's whole session, which compiles what it tries, and a whole gate run")
def test_a_recorded_session_goes_through_branch_gate_and_report(made: Made) -> None:
    policy(made, attempts=2)
    run = begun(made, "qk_norm_rope")
    with ReplayServer(recorded("rotated")) as server, fewer_steps(made.workspace):
        process = command(made, "--endpoint", server.url, "--target", "qk_norm_rope")
        code, said = process.wait(PATIENCE_S), process.log.read_text()
    assert code == 0, said
    row = made.ledger.select_first(sa.select(proposals).where(proposals.c.agent == AGENT))
    assert row is not None and row["state"] == "judged" and state_of(made, run) == "proposed"
    verdict = made.verdict_on(row["number"])
    stages = verdict["evidence"]["stages"]
    assert [stages[name]["state"] for name in ("scope", "static", "oracle")] == ["passed"] * 3, verdict["reasons"]
    assert "training" in stages, (list(stages), verdict["reasons"])  # whether it is faster is the machine's to say
    message = git(made.target, "log", "-1", "--format=%B", row["branch"])
    assert (
        f"Agent: {AGENT}" in message
        and "moves 3e+07 bytes less" in message
        and f"Verdict: {verdict['outcome']}" in message
    )
    assert git(made.target, "diff", "--name-only", made.base, row["branch"]).split() == [
        "kernels/qk_norm_rope/__init__.py", "kernels/qk_norm_rope/by_hand.py", "policies/kernels.yaml",
    ]  # fmt: skip
    told = [m["content"] for m in server.requests[-1]["messages"] if m["role"] == "tool"]
    assert len(told) == 2 and all("by-hand is " in text and "x as fast as reference" in text for text in told)
    traced = made.ledger.select_rows(sa.select(exchanges).where(exchanges.c.run == run))
    assert [bool(row["trace"]) for row in traced] == [True] * 3 and sum(row["tokens"] for row in traced) == 19_200
    assert " 19,200 tokens" in said
    assert f"proposal {row['number']} by {AGENT}" in said and Path(row["report"]).is_file()
