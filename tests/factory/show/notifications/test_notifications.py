"""Events reach a real loopback server and a real command in order, each at least once, even after failures and kills."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

import pytest

from factory.core.errors import ConfigError
from factory.core.workspace import Workspace
from factory.duties.runner import run_daemon
from factory.ledger.ledger import Ledger, anomalies, record_event
from factory.ledger.plant import Plant
from factory.ledger.reader import LedgerReader
from factory.ledger.rows import Subject
from factory.release.approvals import record_rejection
from factory.show.notifications.delivery import Notifier
from factory.show.notifications.receivers import NotDeliveredError, NotificationPolicy, Receiver, make_receivers
from factory.status.waiting import ACTION_FAILED, list_items_waiting_for_person
from tests.support.factory.command import FORKS
from tests.support.messages import codes, refused, the
from tests.support.plants.release_scene import add_candidate, add_verdict, approval
from tests.support.said import Said

NEVER_S = 60.0


class Hook:
    """A receiver's server. ``answers``: what the next requests get, a status or seconds of silence; then 200."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.answers: list[int | float] = []
        hook = self
        over = self.over = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                answer = hook.answers.pop(0) if hook.answers else 200
                if isinstance(answer, float):
                    drip_until = time.monotonic() + answer
                    self.wfile.write(b"HTTP/1.1 200 OK\r\n")
                    while time.monotonic() < drip_until and not over.wait(0.05):
                        self.wfile.write(b"X-Slow: 1\r\n")  # each byte in time, the whole never
                    return
                hook.bodies.append(body)
                hook.headers.append(dict(self.headers))
                if answer == 200:
                    hook.got.append(json.loads(body))
                self.send_response(answer)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *words: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook?team=a"

    def close(self) -> None:
        self.over.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    yield made
    made.close()


def write_policy(workspace: Workspace, **keys: Any) -> None:
    quick = {"timeout_seconds": 5.0, "first_wait_seconds": 0.01, "longest_wait_seconds": 0.02}
    (workspace.root / "policies" / "notifications.yaml").write_text(json.dumps(quick | keys))


def happens(ledger: Ledger, *kinds: str) -> None:
    with ledger.begin() as tx:
        for kind in kinds:
            record_event(tx, kind, "daemon", {"what": "judge 1", "error": "no space", "failures": 1})


def subjects(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["event"], message["subject"]) for message in messages]


def test_by_default_no_notification_is_sent_and_no_file_is_written(workspace: Workspace, ledger: Ledger) -> None:
    happens(ledger, ACTION_FAILED)
    Notifier(Plant(workspace, ledger, Said())).deliver_new_events()
    assert not (workspace.root / "notified.json").exists()


def test_a_webhook_gets_signed_notifications_of_new_events_in_order(
    workspace: Workspace, ledger: Ledger, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FACTORY_WEBHOOK_SECRET", "s3cret")
    approval(workspace, "manual")
    write_policy(workspace, webhook=hook.url)
    happens(ledger, ACTION_FAILED)  # before anybody was to be told
    notifier = Notifier(Plant(workspace, ledger, Said()))
    notifier.deliver_new_events()
    assert hook.got == []
    add_candidate(workspace, ledger)
    verdict = add_verdict(ledger, 1)
    with ledger.begin() as tx:
        record_event(tx, "judged", Subject("candidate", 1), {"verdict": verdict, "outcome": "promote"})
        record_event(tx, "evaluated", Subject("candidate", 1), {})  # nothing to tell
        tx.execute(anomalies.insert().values(segment=1, step=7, kind="loss_spike", detail={}))
        record_event(tx, "segment_done", Subject("segment", 1), {"loss": float("nan")})
        record_event(tx, "segment_failed", Subject("segment", 99), {})  # there is no such segment
    happens(ledger, ACTION_FAILED, "works_again")
    notifier.deliver_new_events()
    record_rejection(Plant(workspace, ledger), verdict, "ada", "too early")
    notifier.deliver_new_events()
    assert subjects(hook.got) == [
        ("judged", "candidate:1"), ("segment_done", "segment:1"), ("segment_failed", "segment:99"), ("action_failed", "daemon"),
        ("works_again", "daemon"), ("rejected", "verdict:1"),
    ]  # fmt: skip
    first = hook.got[0]
    assert first["kinds"] == ["verdict", "approval"] and first["title"].startswith("candidate 1 has the verdict")
    assert "factory releases approve 1" in first["text"] and first["workspace"] == "workspace"
    assert (
        hook.got[1]["text"] == "anomaly 1: loss_spike at step 7" and hook.got[-1]["title"] == "ada rejected verdict 1"
    )
    expected = hmac.new(b"s3cret", hook.bodies[0], hashlib.sha256).hexdigest()
    assert hook.headers[0]["X-Factory-Signature"] == f"sha256={expected}"
    assert [int(sent["X-Factory-Event"]) for sent in hook.headers] == sorted({m["id"] for m in hook.got})
    write_policy(workspace, webhook=hook.url, kinds=["release"])
    happens(ledger, ACTION_FAILED)
    notifier.deliver_new_events()
    assert len(hook.got) == 6


def test_a_failing_receiver_gets_the_same_notification_again_and_delays_no_other(
    workspace: Workspace, ledger: Ledger, hook: Hook, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    words = ["sh", "-c", f"cat >> '{told}'"]
    said = Said()
    notifier = Notifier(Plant(workspace, ledger, said))
    write_policy(workspace, webhook=hook.url, command=words)
    notifier.deliver_new_events()
    happens(ledger, ACTION_FAILED, ACTION_FAILED, "works_again")
    write_policy(workspace, webhook=hook.url, timeout_seconds=1.0, command=words)
    hook.answers = [500, 302, NEVER_S, 200, 503]
    for _ in range(3):
        notifier.deliver_new_events()
        assert hook.got == []
        time.sleep(0.05)
    failures = [
        line.data["reason"]
        for line in said.lines
        if codes([line]) == ["notifications.failed"] and line.data["receiver"] == "webhook"
    ]
    assert codes(failures)[:2] == ["notifications.receiver_failed", "notifications.slow"]
    assert failures[0].data["reason"].endswith("500") and failures[1].data["seconds"] == 1.0
    waits = the(
        [one["what"] for one in list_items_waiting_for_person(workspace, LedgerReader(workspace))],
        "waiting.notifications",
    )
    assert waits.data["receiver"] == "webhook" and waits.data["reason"].startswith("the webhook at 127.0.0.1 ")
    for _ in range(3):
        notifier.deliver_new_events()
        time.sleep(0.05)
    assert subjects(hook.got) == [("action_failed", "daemon")] * 2 + [("works_again", "daemon")]
    assert len({message["id"] for message in hook.got}) == 3 and "notifications.works_again" in codes(said.lines)
    while (
        len(told.read_text().splitlines() if told.exists() else []) < 3
    ):  # a busy machine may need longer for it than the limit
        write_policy(workspace, webhook=hook.url, command=words, timeout_seconds=30.0)
        notifier.deliver_new_events()
        time.sleep(0.05)
    ids = [json.loads(line)["id"] for line in told.read_text().splitlines()]
    assert sorted(set(ids)) == ids[-3:] == [message["id"] for message in hook.got]
    assert "waiting.notifications" not in codes(
        one["what"] for one in list_items_waiting_for_person(workspace, LedgerReader(workspace))
    )
    hook.close()
    happens(ledger, ACTION_FAILED)
    notifier.deliver_new_events()
    assert "ConnectionRefusedError" in said.lines[-1]


def test_a_command_that_fails_hangs_or_is_missing_is_reported_and_tried_again(
    workspace: Workspace, ledger: Ledger, tmp_path: Path
) -> None:
    said, child = Said(), tmp_path / "child"
    cases = {
        "failed: it is full": ["sh", "-c", "echo it is full >&2; exit 3"],
        "did not end within": ["sh", "-c", f"echo $$ > '{child}'; exec sleep 600"],
        "cannot be run: No such file": ["no-such-program-anywhere"],
    }
    write_policy(workspace, command=["true"])
    Notifier(Plant(workspace, ledger, said)).deliver_new_events()
    happens(ledger, ACTION_FAILED)
    for why, words in cases.items():
        write_policy(workspace, command=words, timeout_seconds=1.0)
        Notifier(Plant(workspace, ledger, said)).deliver_new_events()
        assert why in said.lines[-1], said.lines
    with pytest.raises(ProcessLookupError):
        os.kill(int(child.read_text()), 0)
    noted = json.loads((workspace.root / "notified.json").read_text())
    assert noted["command"]["event"] == 0 and "No such file" in noted["command"]["failing"]


@contextmanager
def mail_server() -> Iterator[tuple[int, list[str]]]:
    """A port of a server that speaks as much SMTP as one mail needs, and the mails that it got."""
    got: list[str] = []

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 ready\r\n")
            while line := self.rfile.readline().strip().upper():
                if line == b"DATA":
                    self.wfile.write(b"354 go on\r\n")
                    got.append(b"".join(iter(self.rfile.readline, b".\r\n")).decode())
                self.wfile.write(b"250 ok\r\n" if line != b"QUIT" else b"221 bye\r\n")

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server.server_address[1], got
        server.shutdown()


def test_apprise_delivers_to_a_server_and_by_mail(
    workspace: Workspace, ledger: Ledger, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each receiver has a position of its own; what a server sends elsewhere, or refuses, was not delivered."""
    at = hook.url.removeprefix("http://")
    monkeypatch.setenv("ROOM", "a/b")
    with mail_server() as (port, mails):
        mail = f"mailto://127.0.0.1:{port}?smtp=127.0.0.1&from=factory@example.org&to=team@example.org"
        write_policy(workspace, receivers={"chat": f"json://{at}&:room=$ROOM", "mail": mail}, timeout_seconds=60.0)
        notifier = Notifier(Plant(workspace, ledger, said := Said()))
        notifier.deliver_new_events()
        happens(ledger, ACTION_FAILED, "works_again")
        hook.answers = [302, 500]
        for _ in range(3):
            notifier.deliver_new_events()
            time.sleep(0.05)
    assert [sent["title"] for sent in hook.got] == ["workspace: judge 1 failed", "workspace: judge 1 works again"], (
        said.lines
    )
    assert hook.got[0]["type"] == "failure" and hook.got[0]["message"] == "no space\n(event 1)"
    assert hook.got[0]["room"] == "a/b", "what stands in a variable is escaped"
    assert [re.findall(r"^Subject: (.*?)\r$", mail, re.M) for mail in mails] == [[sent["title"]] for sent in hook.got]
    assert "notifications.works_again" in codes(said.lines)
    failures = [line.data for line in said.lines if codes([line]) == ["notifications.failed"]]
    assert {one["receiver"] for one in failures} == {"chat"}
    assert any("Failed to send JSON" in one["reason"].data["reason"] for one in failures)
    assert set(json.loads((workspace.root / "notified.json").read_text())) == {"chat", "mail"}


def test_a_secret_is_in_no_log_message_or_file(
    workspace: Workspace, ledger: Ledger, hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails: a server that refuses, an address that apprise does not take, a variable that is not set."""
    monkeypatch.setenv("SHORT", "word-7f3a")
    monkeypatch.setenv("WHOLE", "slack://word-7f3a")
    held = tmp_path / "address"
    held.write_text(f"json://me:word-7f3a@127.0.0.1:{hook.server.server_address[1]}/word-7f3a\n")
    cases = {
        "slack://$SHORT": "apprise refuses the address: An invalid Slack",
        "$WHOLE": "apprise refuses the address: An invalid Slack",
        "json://me:$SHORT@127.0.0.1:9/": "A Connection error occurred sending JSON notification to 127.0.0.1",
        str(held): "error=500",
        "slack://$NOT_SET": "variable NOT_SET is not set",
        "/no/such/file": "/no/such/file cannot be read",
        "json://$SHORT@example.org/": "sends without encryption",
        "mailto://me:$SHORT@example.org": "sends without encryption",
    }
    write_policy(
        workspace, receivers={f"r{number}": address for number, address in enumerate(cases)}, timeout_seconds=60.0
    )
    notifier = Notifier(Plant(workspace, ledger, said := Said()))
    notifier.deliver_new_events()
    happens(ledger, ACTION_FAILED)
    hook.answers = [500]
    notifier.deliver_new_events()
    for number, why in enumerate(cases.values()):
        assert why in said.about(f"notification to r{number} failed")[0], said.lines
    assert len(hook.bodies) == 1
    shown = "\n".join(said.lines) + (workspace.root / "notified.json").read_text()
    assert "7f3a" not in shown and "7f3a" not in repr(ledger.read("SELECT * FROM events"))
    policy = NotificationPolicy(receivers={"r": str(held)})
    assert "7f3a" not in repr(make_receivers(policy, tmp_path)), "nor in the words of the process"
    echo = Receiver("it", (sys.executable, "-c", "import sys; sys.exit(sys.stdin.read())"), 60.0, tmp_path, str(held))
    with pytest.raises(NotDeliveredError) as failed:
        echo.deliver({"id": 1})
    assert "json" not in str(failed.value) and '"id": 1' in str(failed.value) and "7f3a" not in str(failed.value)


KILLER = """
import sys, os, signal, pathlib
told = pathlib.Path(sys.argv[1])
first = not told.exists()
with open(told, "a") as file:
    file.write(sys.stdin.read())
if first:
    os.kill(os.getppid(), signal.SIGKILL)
"""


def delivers(root: Path) -> None:
    workspace = Workspace.open(root)
    Notifier(Plant(workspace, Ledger.open(workspace.ledger_url, workspace.root))).deliver_new_events()


def test_after_a_kill_between_delivery_and_position_an_event_is_delivered_again(
    workspace: Workspace, ledger: Ledger, tmp_path: Path
) -> None:
    """The command itself kills whoever delivers, after it has the message."""
    told = tmp_path / "told"
    write_policy(workspace, command=[sys.executable, "-c", KILLER, str(told)], timeout_seconds=60.0)
    Notifier(Plant(workspace, ledger, Said())).deliver_new_events()
    happens(ledger, ACTION_FAILED, "works_again")
    ends = []
    for _ in range(2):
        process = FORKS.Process(target=delivers, args=(workspace.root,))
        process.start()
        process.join()
        ends.append(process.exitcode)
    assert ends == [-signal.SIGKILL, 0]
    ids = [json.loads(line)["id"] for line in told.read_text().splitlines()]
    assert ids == [1, 1, 2], "the first one again, none lost, in order"


def test_after_a_restore_of_the_ledger_delivery_continues_by_time(
    workspace: Workspace, ledger: Ledger, hook: Hook
) -> None:
    write_policy(workspace, webhook=hook.url)
    Notifier(Plant(workspace, ledger, Said())).deliver_new_events()
    happens(ledger, *[ACTION_FAILED] * 3)
    Notifier(Plant(workspace, ledger, Said())).deliver_new_events()
    with ledger.begin() as tx:  # a backup that lacks the last two; another one happens since
        tx.exec_driver_sql("DELETE FROM events WHERE id > 1")
    happens(ledger, "works_again")
    Notifier(Plant(workspace, ledger, Said())).deliver_new_events()
    assert [message["event"] for message in hook.got] == [ACTION_FAILED] * 3 + ["works_again"]
    (workspace.root / "notified.json").write_text('{"webhook": {"event": "7"}}')
    with refused("notifications.unread_positions", ConfigError, file=workspace.root / "notified.json"):
        Notifier(Plant(workspace, ledger, Said())).deliver_new_events()
    assert codes([list_items_waiting_for_person(workspace, LedgerReader(workspace))[-1]["what"]]) == [
        "waiting.unread_positions"
    ]


def test_run_once_delivers_the_events_of_its_own_pass(workspace: Workspace, ledger: Ledger, hook: Hook) -> None:
    write_policy(workspace, webhook=hook.url)
    (workspace.inbox / "broken.jsonl").write_text("no json\n")
    run_daemon(Plant(workspace, ledger, Said()), once=True)
    assert (workspace.root / "notified.json").exists()
    happens(ledger, ACTION_FAILED)
    run_daemon(Plant(workspace, ledger, Said()), once=True)
    assert ("action_failed", "daemon") in subjects(hook.got)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"webhook": "http://example.org/x"}, "http is allowed only to this machine"),
        ({"webhook": "ftp://example.org"}, "expected an https:// address"),
        ({"webhook": "https://user:word@example.org"}, "a password in this address"),
        ({"webhook": "https://example.org/a b"}, "expected a plain address"),
        ({"webhook": "http://127.0.0.1:99999/"}, "webhook"),
        ({"command": "send it"}, "command"),
        ({"command": [""]}, "the program first"),
        ({"receivers": {"team": "slakc://a/b/c"}}, "team: apprise knows no slakc://; did you mean 'slack'?"),
        ({"receivers": {"team": "word"}}, "team: expected an address of apprise"),
        ({"receivers": {"webhook": "slack://a/b/c"}}, "'webhook' is not a valid name"),
        ({"kinds": ["verdicts"]}, "kinds"),
        ({"webhok": ""}, "did you mean 'webhook'"),
        ({"timeout_seconds": 0.0}, "timeout_seconds"),
    ],
)
def test_an_invalid_notification_policy_is_refused_with_its_key(
    workspace: Workspace, keys: dict[str, Any], why: str
) -> None:
    write_policy(workspace, **keys)
    with pytest.raises(ConfigError, match="notifications.yaml") as wrong:
        NotificationPolicy.load(workspace.policy_path("notifications.yaml"))
    assert why in str(wrong.value)


def test_a_long_secret_is_removed_before_an_error_text_is_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver's error repeats it until it lies across every place where a text may be cut."""
    secret = "".join(f"{number:03d}abcdefg" for number in range(20))
    monkeypatch.setenv("HOOK", secret)
    repeats = "import json, sys; sys.exit((json.load(sys.stdin)['url'] + ' ') * 5)"
    receiver = Receiver("team", (sys.executable, "-I", "-c", repeats), 60.0, tmp_path, "slack://$HOOK")
    with pytest.raises(NotDeliveredError) as told:
        receiver.deliver({})
    assert "slack://***" in str(told.value) and not re.search("[0-9]{3}abcdefg", str(told.value))
