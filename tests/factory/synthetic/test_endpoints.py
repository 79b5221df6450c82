"""Endpoints that answer wrongly, late or never: a real HTTP server on the loopback says what each test wants."""

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

from factory.core.workspace import Workspace, code_root
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.synthetic.generating import Generated, GenerationRequest, generate
from factory.synthetic.writers import WriterError

GOOD = {"choices": [{"text": " flows to the sea.", "finish_reason": "stop"}]}
NEVER = "a byte now and then"


class Server(ThreadingHTTPServer):
    """``answers``: (status, body) by the prompt's first word, gone through once; the last one stays."""

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
) -> Generated:
    """A document for each of the prompts that ``answers`` names."""
    policy = yaml.safe_load((code_root() / "policies" / "agents.yaml").read_text())
    policy["llm"] |= {"attempts": 2, "longest_wait_seconds": 0.0, "reply_seconds": 1.0}
    (workspace.root / "policies").mkdir(exist_ok=True)
    (workspace.root / "policies" / "agents.yaml").write_text(yaml.safe_dump(policy))
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"{word} river\n" for word in answers))
    server.answers = answers
    url = f"http://127.0.0.1:{server.server_port}/v1"
    return generate(Plant(workspace, ledger), GenerationRequest(endpoint=url, model="m", prompts=prompts))


def test_what_never_ends_is_cut_off_and_the_rest_is_kept(
    workspace: Workspace, ledger: Ledger, server: Server, tmp_path: Path
) -> None:
    started = time.monotonic()
    with pytest.raises(
        WriterError, match=r"no whole answer within 1 s .*; 1 of 2 answers are kept: the same command goes on"
    ):
        asked(workspace, ledger, server, tmp_path, one=[(200, GOOD)], two=[(200, NEVER)])
    assert time.monotonic() - started < 120  # of hours: the bytes never end
    made = asked(workspace, ledger, server, tmp_path, one=[(500, {})], two=[(200, GOOD)])
    assert made.documents == 2 and made.ends == {"stop": 2}


def test_an_answer_that_cannot_be_read_is_asked_for_again(
    workspace: Workspace, ledger: Ledger, server: Server, tmp_path: Path
) -> None:
    said = {"error": {"message": "out of credits"}}
    odd = [(200, body) for body in (b"<html>", said, {"choices": []}, {"choices": [{"text": 5}]}, [1])]
    for body in odd:
        assert asked(workspace, ledger, server, tmp_path, one=[body, (200, GOOD)]).documents == 1
        for path in (workspace.root / "generated").glob("*.jsonl"):
            path.unlink()
    with pytest.raises(WriterError, match="cannot be read .KeyError.: out of credits .tried 2 times"):
        asked(workspace, ledger, server, tmp_path, one=[(200, said)])


def test_what_says_nothing_is_left_out_and_half_a_character_is_no_text(
    workspace: Workspace, ledger: Ledger, server: Server, tmp_path: Path
) -> None:
    nothing = {"choices": [{"message": {"role": "assistant"}, "finish_reason": "content_filter"}]}
    half = b'{"choices": [{"text": " is \\ud83d wide \\ud83d\\ude00", "finish_reason": "stop"}]}'
    made = asked(workspace, ledger, server, tmp_path, one=[(200, nothing)], two=[(200, half)])
    assert made.ends == {"empty": 1, "stop": 1}
    assert json.loads(made.path.read_text())["text"] == "two river is \ufffd wide \U0001f600"


def test_a_redirect_says_what_to_do(workspace: Workspace, ledger: Ledger, server: Server, tmp_path: Path) -> None:
    with pytest.raises(WriterError, match="status 302: .*name that one with --endpoint"):
        asked(workspace, ledger, server, tmp_path, one=[(302, b"")])
