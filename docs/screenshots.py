"""The pictures of ``docs/MLFLOW.md``: MLflow's pages over a finished demo, photographed by a headless Chromium.

    factory demo --workspace /tmp/demo
    python docs/screenshots.py --workspace /tmp/demo --into docs/pictures

``waiting`` needs a candidate that waits for a person: ``approval: manual`` in the demo's policies/gates/release.yaml, then ``factory train``,
``factory anneal`` and ``factory evaluate``; without one it is left out.

Chromium is steered over its debugging pipe (null-terminated JSON), since a page draws its charts only once they are in view, in real time.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factory.core.workspace import Workspace
from factory.ledger.decisions import list_undecided_verdicts
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import ReleaseRow, SegmentRow, Subject, VerdictRow
from factory.release.approvals import APPROVAL_TAG
from factory.show.mlflow.approval_answers import BY_TAG, ApprovalResponder
from factory.show.mlflow.registry import CHAMPION, MODEL, find_candidate_version, list_start_page_addresses
from factory.show.mlflow.releases import REASON_TAG
from factory.show.mlflow.runs import MlflowTracking
from factory.show.mlflow.store import make_mlflow_ui_command, open_client
from factory.show.mlflow.version_page import TRAINING_MODE, RunAddress

PATIENCE = 240.0  # seconds for a page to show what it is waited for
COLOURS = 256  # of a picture's palette: pages have few, and files stay small
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --hide-scrollbars --remote-debugging-pipe about:blank"
)
# What a mouse that is over nothing does not show, and MLflow's own assistant.
HIDE = (
    "document.head.append(Object.assign(document.createElement('style'), {textContent: '.modebar {display: none}'}));"
)
TIDY = HIDE + "document.querySelector('[aria-label=\"Close\"]')?.click()"

OWN = "[...document.querySelectorAll('*')].filter(e => e.textContent.trim() === '%s').pop()"  # the innermost element with this text
TO_TAGS, FOLD_PLOTS = f"{OWN % 'Tags'}.scrollIntoView()", f"{OWN % 'Visualizations'}.click()"


@dataclass(frozen=True)
class Shot:
    name: str
    address: str
    sign: str  # text that the page shows once it is complete; a count of drawn charts is waited for besides
    height: int = 900
    charts: int = 0
    prepare: str = ""  # JavaScript
    width: int = 1360


class Browser:
    """A Chromium with one page."""

    def __init__(self, program: str, profile: Path) -> None:
        (theirs_in, self._to), (self._from, theirs_out) = os.pipe(), os.pipe()
        keep = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        command = ["bash", "-c", keep, "-", program, *FLAGS.split(), f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._left, self._number, self._session = b"", 0, ""
        page = next(one for one in self._call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        self._call("Page.enable")

    def shoot(self, shot: Shot) -> bytes:
        """A PNG. Raises: TimeoutError when the page never shows its sign."""
        size = {"width": shot.width, "height": shot.height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=shot.address)
        self._wait(shot)
        self._run(TIDY)
        if shot.prepare:
            self._run(shot.prepare)
        time.sleep(2)  # drawers close, layout settles: nothing on the page says so
        self._wait(shot)
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _wait(self, shot: Shot) -> None:
        asked = (
            f"document.body?.innerText.includes({json.dumps(shot.sign)}) && "
            "[...document.images].every(image => image.complete) && "
            f"document.querySelectorAll('.js-plotly-plot .main-svg').length >= {shot.charts}"
        )
        until = time.monotonic() + PATIENCE
        while not self._run(asked):
            if time.monotonic() > until:
                said = self._run("document.body?.innerText")
                raise TimeoutError(f"{shot.address} does not show {shot.sign!r}; it shows {str(said)[:400]!r}")
            time.sleep(0.25)

    def _run(self, script: str) -> Any:
        return self._call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._left:
                data = os.read(self._from, 1 << 20)
                if not data:
                    raise ConnectionError("the browser ended; is it a Chromium that takes --remote-debugging-pipe?")
                self._left += data
            line, _, self._left = self._left.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise ConnectionError(f"{method}: {answer['error']}")
                return dict(answer["result"])


def shots(workspace: Workspace, server: str) -> list[Shot]:
    """Of the newest release: raises IndexError where there is none."""
    ledger = Ledger.open(workspace.ledger_url)
    tracking = MlflowTracking.open(Plant(workspace, ledger))
    release = ReleaseRow.select(ledger, "ORDER BY number DESC LIMIT 1")[0]
    verdict = VerdictRow.find_newest(ledger, "release", Subject("candidate", release.candidate))
    assert verdict and verdict.against, "the demo releases twice"
    pages = list_start_page_addresses(workspace, server)
    segment = SegmentRow.select(ledger, "WHERE kind = 'trunk' ORDER BY id DESC LIMIT 1")[0]
    place = lambda subject: RunAddress(*(tracking.find_run_and_experiment(subject) or ("", "")))
    mine, theirs = place(Subject("candidate", release.candidate)), place(Subject.parse(verdict.against))
    version, at = f"{server}/#/models/{MODEL}/versions/{release.mlflow_version}?{TRAINING_MODE}", f"{server}/"
    waiting = [
        Shot(
            "waiting",
            f"{server}/#/models/{MODEL}/versions/{found.version}?{TRAINING_MODE}",
            "what decides",
            860,
            prepare=TO_TAGS,
        )
        for one in list_undecided_verdicts(ledger)
        if (found := find_candidate_version(tracking.client, one.subject_number, one.subject_sha256))
    ][-1:]
    return [
        *waiting,
        Shot("releases", pages["releases"], "factory-lm", 700),
        Shot(
            "segment",
            at + place(Subject("segment", segment.id)).make_page_link("/model-metrics"),
            "loss",
            900,
            charts=3,
        ),
        Shot("version", version, "what decides", 1440),
        Shot("tags", version, "what decides", 860, prepare=TO_TAGS),
        Shot("beside", at + mine.make_comparison_link(theirs), "Run details", 860, prepare=FOLD_PLOTS),
        Shot("report", at + mine.make_page_link("/artifacts/report.html"), "report.html", 900),
    ]


def say_a_word(workspace: Workspace, by: str = "ada") -> None:
    """A person's word about the champion, and its answer. The champion is released already, so it is refused, and nothing else changes."""
    client = open_client(workspace)
    version = client.get_model_version_by_alias(MODEL, CHAMPION).version
    for key, value in ((APPROVAL_TAG, "rejected"), (REASON_TAG, "it swears"), (BY_TAG, by)):
        client.set_model_version_tag(MODEL, version, key, value)
    ApprovalResponder(Plant(workspace, Ledger.open(workspace.ledger_url))).answer_new_decisions()


def small(png: bytes) -> bytes:
    """The same with a palette of its most frequent colours, so that plain ones stay as they are."""
    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB")
    counted = sorted(image.getcolors(1 << 24) or [], reverse=True)[:COLOURS]
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for _, colour in counted for part in colour])
    written = io.BytesIO()
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(written, "PNG", optimize=True)
    return written.getvalue()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def until_it_listens(port: int) -> None:
    until = time.monotonic() + PATIENCE
    while socket.socket().connect_ex(("127.0.0.1", port)):
        if time.monotonic() > until:
            raise TimeoutError(f"no MLflow on port {port}")
        time.sleep(0.25)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--chromium", default="chromium")
    parser.add_argument("--only", default="", help="names that match this pattern")
    asked = parser.parse_args()
    workspace, port = Workspace.open(asked.workspace), free_port()
    command, environment = make_mlflow_ui_command(workspace, port, "127.0.0.1", None)
    say_a_word(workspace)
    asked.into.mkdir(parents=True, exist_ok=True)
    server = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until_it_listens(port)
        with tempfile.TemporaryDirectory(prefix="factory-pictures-", ignore_cleanup_errors=True) as profile:
            browser = Browser(asked.chromium, Path(profile))
            try:
                for shot in shots(workspace, f"http://127.0.0.1:{port}"):
                    if re.search(asked.only, shot.name):
                        path = asked.into / f"{shot.name}.png"
                        path.write_bytes(small(browser.shoot(shot)))
                        print(f"{path}: {path.stat().st_size // 1000} kB", flush=True)
            finally:
                browser.close()
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
