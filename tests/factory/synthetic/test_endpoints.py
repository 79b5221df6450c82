"""Endpoints that answer wrongly, late or never: a real HTTP server on the loopback gives the answers of each test."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from factory.core.workspace import Workspace, find_checkout_root
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.synthetic.generating import GeneratedShard, GenerationRequest, generate_shard
from factory.synthetic.writers import WriterError
from tests.support.messages import refused

GOOD = {"choices": [{"text": " flows to the sea.", "finish_reason": "stop"}]}
NEVER = "a byte now and then"


class Server(ThreadingHTTPServer):
    """``answers``: by the prompt's first word, (status, body) of one answer after another; the last is repeated."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, list[tuple[int, Any]]] = {}
        self.closed = threading.Event()

    def next_answer(self, prompt: str) -> tuple[int, Any]:
        left = self.answers[prompt.split()[0]]
        return left.pop(0) if len(left) > 1 else left[0]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None: ...

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, body = self.server.next_answer(asked["prompt"])
        self.send_response(status)
        if body == NEVER:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while not self.server.closed.wait(0.05):
                self.wfile.write(b"1\r\n \r\n")
                self.wfile.flush()
            return
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, args=(0.02,))
    thread.start()
    yield made
    made.closed.set()
    made.shutdown()
    thread.join()
    made.server_close()


def asked(
    workspace: Workspace, ledger: Ledger, server: Server, folder: Path, **answers: list[tuple[int, Any]]
) -> GeneratedShard:
    """Generate one document for each prompt that ``answers`` names."""
    policy = yaml.safe_load((find_checkout_root() / "policies" / "agents.yaml").read_text())
    policy["llm"] |= {"attempts": 2, "longest_wait_seconds": 0.0, "reply_seconds": 1.0}
    (workspace.root / "policies").mkdir(exist_ok=True)
    (workspace.root / "policies" / "agents.yaml").write_text(yaml.safe_dump(policy))
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"{word} river\n" for word in answers))
    server.answers = answers
    url = f"http://127.0.0.1:{server.server_port}/v1"
    return generate_shard(Plant(workspace, ledger), GenerationRequest(endpoint=url, model="m", prompts=prompts))


def test_an_endless_answer_is_cut_off_and_other_answers_are_kept(
    workspace: Workspace, ledger: Ledger, server: Server, tmp_path: Path
) -> None:
    started = time.monotonic()
    with refused("synthetic.interrupted", WriterError, kept=1, count=2) as caught:
        asked(workspace, ledger, server, tmp_path, one=[(200, GOOD)], two=[(200, NEVER)])
    slow = caught.value.data["why"].data["why"]
    assert (slow.code, slow.data["seconds"]) == ("synthetic.slow_answer", 1)
    assert time.monotonic() - started < 120  # of hours: the bytes never end
    made = asked(workspace, ledger, server, tmp_path, one=[(500, {})], two=[(200, GOOD)])
    assert made.documents == 2 and made.ends == {"stop": 2}


def test_an_unreadable_answer_is_requested_again(
    workspace: Workspace, ledger: Ledger, server: Server, tmp_path: Path
) -> None:
    said = {"error": {"message": "out of credits"}}
    odd = [(200, body) for body in (b"<html>", said, {"choices": []}, {"choices": [{"text": 5}]}, [1])]
    for body in odd:
        assert asked(workspace, ledger, server, tmp_path, one=[body, (200, GOOD)]).documents == 1
        for path in (workspace.root / "generated").glob("*.jsonl"):
            path.unlink()
    with refused("synthetic.gave_up", WriterError, attempts=2) as caught:
        asked(workspace, ledger, server, tmp_path, one=[(200, said)])
    why = caught.value.data["why"]
    assert (why.code, why.data) == ("synthetic.unreadable_answer", {"kind": "KeyError", "answer": "out of credits"})


def test_an_empty_answer_is_left_out_and_an_incomplete_character_is_replaced(
    workspace: Workspace, ledger: Ledger, server: Server, tmp_path: Path
) -> None:
    nothing = {"choices": [{"message": {"role": "assistant"}, "finish_reason": "content_filter"}]}
    half = b'{"choices": [{"text": " is \\ud83d wide \\ud83d\\ude00", "finish_reason": "stop"}]}'
    made = asked(workspace, ledger, server, tmp_path, one=[(200, nothing)], two=[(200, half)])
    assert made.ends == {"empty": 1, "stop": 1}
    assert json.loads(made.path.read_text())["text"] == "two river is \ufffd wide \U0001f600"


def test_the_error_for_a_redirect_says_what_to_do(
    workspace: Workspace, ledger: Ledger, server: Server, tmp_path: Path
) -> None:
    with refused("synthetic.refused", WriterError) as caught:
        asked(workspace, ledger, server, tmp_path, one=[(302, b"")])
    assert caught.value.data["why"].data["status"] == 302
    assert caught.value.data["advice"].data["advice"].code == "synthetic.redirected"
