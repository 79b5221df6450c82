"""The LLM client against a real server that gives good and bad answers, and with files that a person answers."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.llm.client import LlmClient
from agents.llm.exchange import BudgetError, Exchange, LlmError, Usage, read_reply
from agents.llm.file_endpoint import FileEndpoint
from agents.llm.http_endpoint import HttpEndpoint
from agents.llm.policy import LlmPolicy
from tests.support.messages import refused
from tests.support.patience import PATIENCE_S
from tests.support.replay_server import RecordedSession, ReplayServer

KEY = "sk-a-secret-of-mine"
ASK = [{"role": "user", "content": "Which op is hot?"}]
TOOL = {"type": "function", "function": {"name": "read_file", "parameters": {"type": "object", "properties": {}}}}
POLICY = LlmPolicy(
    model="m", attempts=3, reply_seconds=5, silence_seconds=0.5, longest_wait_seconds=2, reply_tokens=500,
    usd_per_million_input_tokens=1.0, usd_per_million_output_tokens=10.0,
)  # fmt: skip
GOOD = {"text": "attention, surely", "usage": {"prompt_tokens": 100, "completion_tokens": 20}}


class Notes:
    """Books without a budget, or with one of tokens."""

    def __init__(self, tokens: int = 1 << 40) -> None:
        self.most, self.open, self.kept = tokens, 0, list[Exchange]()

    def reserve(self, label: str, tokens: int, usd: float) -> int:
        if tokens + sum(exchange.usage.tokens for exchange in self.kept) > self.most:
            raise BudgetError("llm.exhausted", "exhausted")
        self.open += 1
        return self.open

    def settle(self, entry: int, exchange: Exchange) -> None:
        self.kept.append(exchange)


def session(*turns: Any, **more: Any) -> RecordedSession:
    return RecordedSession.model_validate({"turns": list(turns), **more})


def asked(
    recorded: RecordedSession, notes: Notes, policy: LlmPolicy = POLICY, key: str = KEY
) -> tuple[Any, ReplayServer]:
    """The reply or the error of one question, and the server that answered."""
    with ReplayServer(recorded) as server:
        briefly = lambda seconds: time.sleep(min(seconds, 0.2))
        client = LlmClient(HttpEndpoint(server.url, key, policy), policy, notes, sleep=briefly)
        try:
            return client.ask("turn-1", ASK, [TOOL]), server
        except LlmError as error:
            return error, server


def test_a_streamed_reply_is_read_with_its_tool_calls_and_usage() -> None:
    call = {"name": "read_file", "arguments": {"path": "kernels/rms_norm/__init__.py", "note": "é" * 40}}
    notes = Notes()
    reply, server = asked(
        session({**GOOD, "calls": [call, {"name": "graph", "arguments": {}}]}, model="m", key=KEY), notes
    )
    assert reply.text == GOOD["text"] and reply.finish == "tool_calls"
    assert [c.name for c in reply.tool_calls] == ["read_file", "graph"]
    assert json.loads(reply.tool_calls[0].arguments) == call["arguments"]
    assert server.requests[0]["messages"] == ASK and server.requests[0]["max_completion_tokens"] == 500
    assert server.requests[0]["tools"] == [TOOL] and "temperature" not in server.requests[0]
    (kept,) = notes.kept
    assert kept.usage == Usage(100, 20) and kept.usd == pytest.approx((100 + 200) / 1e6)
    assert kept.request.worst_case_usage.tokens >= kept.usage.tokens
    assert KEY not in repr(kept)


@pytest.mark.parametrize(
    ("faults", "requests"),
    [
        ([{"status": 429, "headers": {"Retry-After": "0.2"}}], 2),
        ([{"status": 503}, {"status": 500}], 3),
        ([{"raw": "data: {nope\n\n"}], 2),
        ([{"raw": 'data: {"choices": 7}\n\n'}], 2),
        ([{"text": "it breaks off", "drop": True}], 2),
        ([{"hang": 2.0}], 2),
    ],
    ids=["busy", "failing", "no JSON", "another shape", "dropped", "silent"],
)
def test_a_request_is_sent_again_after_a_temporary_fault(faults: list[dict[str, Any]], requests: int) -> None:
    notes = Notes()
    reply, server = asked(session([*faults, GOOD]), notes)
    assert not isinstance(reply, LlmError), reply
    assert reply.text == GOOD["text"] and len(server.requests) == requests == len(notes.kept)
    failed = notes.kept[:-1]
    assert all(exchange.error and exchange.reply is None for exchange in failed)
    if faults[0].get("status") == 429:
        assert failed[0].usage.tokens == 0 and notes.kept[-1].began - failed[0].ended >= 0.2
    else:  # it may have worked, and bill for it
        assert failed[0].usage == failed[0].request.worst_case_usage


@pytest.mark.parametrize(
    ("answer", "code", "data", "requests"),
    [
        ({"status": 429, "headers": {"Retry-After": "3600"}}, "llm.wait_too_long", {"asked": 3600}, 1),
        ({"status": 429}, "llm.busy", {}, 2),
        ({"endless": "la "}, "llm.too_many_tokens", {"limit": 500}, 1),
        ({"text": "x" * 300_000}, "llm.too_many_tokens", {"limit": 500}, 1),
        ({"status": 400, "text": "no such parameter"}, "llm.refused", {"status": 400}, 1),
        ({"raw": "data: [1"}, "llm.broke_off", {}, 2),
        ({"raw": 'data: {"error": {"message": "no\\u001b[2J"}}\n\n'}, "llm.failed", {"problem": "no�[2J"}, 2),
    ],
    ids=["come back tomorrow", "always busy", "endless", "too long", "refused", "cut", "an error in the stream"],
)
def test_a_lasting_fault_becomes_one_error(
    answer: dict[str, Any], code: str, data: dict[str, Any], requests: int
) -> None:
    policy = POLICY.model_copy(update={"attempts": 2, "reply_bytes": 1_000_000})
    error, server = asked(session(answer), Notes(), policy)
    assert isinstance(error, LlmError), error
    if error.code != code:
        assert error.code == "llm.no_reply" and error.data["attempts"] == requests
    said = error.message if error.code == code else error.data["problem"]
    assert (said.code, {name: said.data[name] for name in data}) == (code, data), error
    assert len(server.requests) == requests


def test_an_endless_reply_is_cut_off_by_bytes_and_by_seconds_too() -> None:
    by_bytes, _ = asked(session({"endless": "la" * 500}), Notes(), POLICY.model_copy(update={"reply_bytes": 50_000}))
    assert by_bytes.data["problem"].code == "llm.too_many_bytes" and by_bytes.data["problem"].data["limit"] == 50_000
    slowly = POLICY.model_copy(update={"reply_seconds": 0.3, "reply_tokens": 1 << 30, "attempts": 1})
    by_seconds, _ = asked(session({"endless": "la"}), Notes(), slowly)
    assert (
        by_seconds.data["problem"].code == "llm.too_slow" and by_seconds.data["problem"].data["limit"] == 0.3
    )  # no other limit would ever have ended it


def test_errors_about_key_and_model_name_the_remedy_and_never_the_key() -> None:
    notes = Notes()
    wrong, server = asked(session(GOOD, key="another"), notes)
    assert (
        wrong.data["problem"].code == "llm.key_refused"
        and wrong.data["problem"].data["status"] == 401
        and server.requests == []
    )
    unknown, _ = asked(session(GOOD, model="other"), notes)
    assert unknown.data["problem"].code == "llm.not_found" and unknown.data["problem"].data["model"] == "m"
    echoed, _ = asked(session({"text": f"your key is {KEY}"}), notes)
    assert echoed.text == "your key is [key]"
    assert KEY not in str(wrong) + repr(notes.kept) and "[key]" in str(wrong)


@pytest.mark.parametrize(
    ("url", "key", "model", "code"),
    [
        ("ftp://host/v1", KEY, "m", "llm.wrong_url"),
        ("https://me:hidden@host/v1", KEY, "m", "llm.wrong_url"),
        ("https://host/v1", "", "m", "llm.no_key"),
        ("https://host/v1", KEY, "", "llm.no_model"),
    ],
)
def test_an_impossible_endpoint_is_refused_at_once(url: str, key: str, model: str, code: str) -> None:
    with refused(code, LlmError) as caught:
        HttpEndpoint(url, key, POLICY.model_copy(update={"model": model}))
    assert "hidden" not in str(caught.value)


def test_a_missing_server_is_an_error_after_all_attempts() -> None:
    with ReplayServer(session(GOOD)) as server:
        url = server.url
    notes = Notes()
    with refused("llm.no_reply", LlmError, attempts=3) as found:
        LlmClient(HttpEndpoint(url, KEY, POLICY), POLICY, notes, sleep=lambda _: None).ask("t", ASK)
    assert found.value.data["problem"].code == "llm.no_connection"
    assert len(notes.kept) == 3 and all(exchange.usage.tokens == 0 for exchange in notes.kept)


def test_tool_calls_without_an_index_and_the_older_limit_parameter_work() -> None:
    def chunk(delta: dict[str, Any], finish: str | None = None) -> str:
        return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': finish}]})}\n\n"

    call = lambda name, path: {
        "tool_calls": [{"id": name, "function": {"name": name, "arguments": json.dumps({"path": path})}}]
    }
    raw = chunk(call("a", "x")) + chunk(call("b", "y")) + chunk({}, "tool_calls") + "data: [DONE]\n\n"
    reply, server = asked(session({"raw": raw}), Notes(), POLICY.model_copy(update={"limit_parameter": "max_tokens"}))
    assert [(c.name, json.loads(c.arguments)["path"]) for c in reply.tool_calls] == [("a", "x"), ("b", "y")]
    assert server.requests[0]["max_tokens"] == 500 and "max_completion_tokens" not in server.requests[0]
    assert reply.usage is None


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "delta", "tool_calls", "function", "index", "content", "usage", "error"]), inner
        )
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def odd() -> Iterator[tuple[ReplayServer, HttpEndpoint]]:
    with ReplayServer(session(GOOD)) as server:
        yield server, HttpEndpoint(server.url, KEY, POLICY)


@settings(max_examples=60, deadline=None)
@given(
    raw=st.lists(ODD.map(lambda x: f"data: {json.dumps(x)}\n\n") | st.text(max_size=20), min_size=1, max_size=3).map(
        "".join
    )
)
def test_any_stream_of_a_server_becomes_a_reply_or_one_clear_error(
    odd: tuple[ReplayServer, HttpEndpoint], raw: str
) -> None:
    server, endpoint = odd
    server.session = session({"raw": raw})
    try:
        reply = LlmClient(endpoint, POLICY.model_copy(update={"attempts": 1}), Notes()).ask("t", ASK)
    except LlmError as error:
        assert str(error).isprintable() and len(str(error)) < 1000
    else:
        assert reply.text or reply.tool_calls


@given(ODD, ODD)
def test_any_content_of_a_reply_file_becomes_a_reply_or_a_value_error(message: Any, usage: Any) -> None:
    try:
        reply = read_reply(message, usage)
    except ValueError:
        return
    json.dumps(reply.make_assistant_message(), ensure_ascii=False).encode()


def test_a_request_that_could_pass_the_budget_is_not_sent() -> None:
    error, server = asked(session(GOOD), Notes(tokens=550))
    assert isinstance(error, BudgetError) and server.requests == []


# -- files -------------------------------------------------------------------------------------------------------------
def client_of(folder: Path, said: list[str] | None = None, **changes: Any) -> LlmClient:
    policy = POLICY.model_copy(update={"file_wait_seconds": float(PATIENCE_S), **changes})
    said = [] if said is None else said
    return LlmClient(FileEndpoint(folder, policy, said.append), policy, Notes())


def test_a_person_answers_with_a_file_and_can_correct_the_file(tmp_path: Path) -> None:
    said: list[str] = []

    def person() -> None:
        while not (found := list(tmp_path.glob("*.request.json"))):
            time.sleep(0.02)
        body = json.loads(found[0].read_text())
        reply = tmp_path / found[0].name.replace("request", "reply")
        reply.write_text('{"content": "half')
        while not any(getattr(line.data["state"], "code", "") == "llm.reply_unusable" for line in said):
            time.sleep(0.02)
        answer = {
            "content": body["messages"][0]["content"][::-1],
            "tool_calls": [{"name": "graph", "arguments": {"a": 1}}],
        }
        reply.with_suffix(".part").write_text(json.dumps(answer))
        os.replace(reply.with_suffix(".part"), reply)

    thread = threading.Thread(target=person, daemon=True)
    thread.start()
    reply = client_of(tmp_path, said).ask("turn-1", ASK)
    thread.join(PATIENCE_S)
    assert reply.text == ASK[0]["content"][::-1] and json.loads(reply.tool_calls[0].arguments) == {"a": 1}
    # The same question again, as after a kill: the reply is there already.
    assert client_of(tmp_path, file_wait_seconds=0.1).ask("turn-1", ASK) == reply
    assert len(list(tmp_path.glob("*.request.json"))) == 1


def test_a_reply_that_is_not_a_plain_file_or_too_large_is_never_read(tmp_path: Path) -> None:
    with refused("llm.no_reply", LlmError) as found:
        client_of(tmp_path, file_wait_seconds=0.1).ask("t", ASK)
    assert found.value.data["problem"].data["state"].code == "llm.waiting"
    (asked_for,) = tmp_path.glob("*.request.json")
    reply = tmp_path / asked_for.name.replace("request", "reply")
    (tmp_path / "elsewhere").write_text('{"content": "x"}')
    for make, words in (
        (lambda: reply.symlink_to(tmp_path / "elsewhere"), "symbolic"),
        (lambda: os.mkfifo(reply), "not a regular file"),
        (lambda: reply.write_text('{"content": "' + "x" * 5000 + '"}'), "more than 4000 bytes"),
        (lambda: reply.write_text("[" * 3000), ""),
        (lambda: reply.write_text('{"content": 3}'), "'content'"),
    ):
        make()
        with refused("llm.no_reply", LlmError) as found:
            client_of(tmp_path, file_wait_seconds=0.1, reply_bytes=4000).ask("t", ASK)
        state = found.value.data["problem"].data["state"]
        assert state.code == "llm.reply_unusable" and words in state.data["problem"]
        reply.unlink()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused("llm.no_folder", LlmError):
        client_of(tmp_path / "file" / "folder")


@pytest.mark.parametrize(
    "raw", [None, {}, [], {"content": ""}, {"tool_calls": [{}]}, {"tool_calls": "x"}, {"content": 1}]
)
def test_a_value_that_is_not_a_reply_is_an_error(raw: Any) -> None:
    with pytest.raises(ValueError):
        read_reply(raw)
