"""Live training in the sandbox: hostile code in the live trainer reaches nothing, and the files that it leaves are not trusted."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from factory import machine_check
from factory.core.errors import IsolationError, SegmentError
from factory.core.untrusted_trainer_files import DEPTH, count_lines, read_tail, remove_special_files
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, proposals
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.runs.live_code import LiveCode, decide_live_code_isolation
from factory.runs.trainer_folder import read_result
from factory.sandbox import cgroup
from factory.sandbox.live_limits import LiveLimits
from factory.training.training import read_last_metrics
from tests.support.factory.code_loop import make_target
from tests.support.messages import codes, refused, tree
from tests.support.plants.trained_plant import commit_edit, fill, lenient_plant, make_plant
from trainer.contract.checkpoint.format import format_checkpoint_name

# In the trainer, before it trains: ``SEEN`` tells what it could do of each.
HOSTILE = """
    import ctypes, json, os, pathlib, shutil, signal, socket
    seen = {}
    def tell(name, function):
        try:
            seen[name] = repr(function())[:100]
        except BaseException as error:
            seen[name] = None
    def others():
        found = [p for p in pathlib.Path("/proc").glob("[0-9]*/cmdline") if b"trainer" not in p.read_bytes()]
        return found[0]
    tell("network", lambda: socket.create_connection(("127.0.0.1", PORT), 5))
    tell("abstract socket", lambda: socket.socket(socket.AF_UNIX).connect("\\0factory-test-PORT"))
    tell("ledger", lambda: pathlib.Path("ROOT/plant/ledger.db").read_bytes())
    tell("config", lambda: pathlib.Path("ROOT/plant/factory.yaml").read_bytes())
    tell("home", lambda: os.listdir("HOME"))
    tell("other segment", lambda: os.listdir("ROOT/plant/segments/other"))
    tell("held-out items", lambda: os.listdir("ROOT/plant/shards/raw"))
    tell("write beside the folder", lambda: (folder.parent / "new").write_text("x"))
    tell("write a token shard", lambda: (pathlib.Path(spec.data_plan.token_shards[0].path) / "new").write_text("x"))
    tell("write code", lambda: open(__file__, "a"))
    tell("write beside code", lambda: (pathlib.Path(__file__).parents[1] / "new.py").write_text("x"))
    tell("replace the folder", lambda: os.rename(folder, folder.with_name("other-name")))
    tell("secret", lambda: os.environ["FACTORY_TEST_SECRET"])
    tell("other processes", others)
    tell("signal", lambda: os.kill(PID, 0))
    tell("mount", lambda: 1 / (1 + ctypes.CDLL(None).mount(b"none", b"/tmp", b"tmpfs", 0, None)))
    tell("its folder", lambda: (folder / "mine").write_text("x"))
    tell("temporary files", lambda: pathlib.Path("/tmp/mine").write_text("x"))
    (folder / "seen.json").write_text(json.dumps(seen))
    os.symlink("ROOT/plant/ledger.db", folder / "link")
    os.symlink("ROOT/plant/ledger.db", folder / "segment.lock")
    os.symlink("ROOT/victim", folder / "exit-0")
    os.symlink("ROOT/victim", folder / "certificate")
    os.symlink("ROOT/victim", folder / ".segment.json.part")
    (folder / "deep" / "er").mkdir(parents=True)
    os.mkfifo(folder / "deep" / "er" / "pipe")
    os.mkfifo(folder / "anomalies.jsonl.part")
"""
BEFORE = "    ranks = Ranks.join(spec.recipe.parallel, spec.recipe.model)\n"
REACHED = {"its folder", "temporary files"}


@pytest.fixture
def server() -> Iterator[tuple[int, list[socket.socket]]]:
    """A TCP server on the loopback device and an abstract Unix socket named after its port. Both would accept a connection."""
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        port = tcp.getsockname()[1]
        abstract.bind(f"\0factory-test-{port}")
        abstract.listen()
        yield port, [tcp, abstract]


def weights_of(ledger: Ledger, number: int) -> str:
    row = SegmentRow.get(ledger, number)
    assert row.state == "done" and row.last_step == 20
    blob = (Path(row.folder) / "checkpoints" / format_checkpoint_name(20) / "model.safetensors").read_bytes()
    return hashlib.sha256(blob).hexdigest()


def test_hostile_live_code_reaches_nothing_outside_the_sandbox_and_trains_the_same_result(
    tmp_path: Path, server: tuple[int, list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, listening = server
    home, victim = tmp_path / "home", tmp_path / "victim"
    home.mkdir()
    victim.mkdir()
    (victim / "kept").write_text("kept")
    monkeypatch.setenv("FACTORY_TEST_SECRET", "secret")
    monkeypatch.setenv("HOME", str(home))

    _, honest = make_plant(tmp_path / "honest", make_target(tmp_path / "honest" / "code"))
    code = make_target(tmp_path / "hostile" / "code")
    hostile = HOSTILE.replace("PORT", str(port)).replace("HOME", str(home)).replace("PID", str(os.getpid()))
    commit_edit(code, "trainer/segment.py", BEFORE, hostile.replace("ROOT", str(tmp_path / "hostile")) + BEFORE)
    workspace = lenient_plant(tmp_path / "hostile", code)
    other = workspace.root / "segments" / "other"
    other.mkdir(parents=True)
    (other / "metrics.jsonl").write_text("{}\n")
    ledger = fill(workspace)

    assert weights_of(ledger, 1) == weights_of(honest, 1)
    folder = Path(SegmentRow.get(ledger, 1).folder)
    seen = json.loads((folder / "seen.json").read_text())
    seen.pop(
        "write beside the folder"
    )  # of a workspace below /tmp it writes in its own /tmp: below we look for the file
    assert {name for name, what in seen.items() if what is not None} == REACHED and len(seen) == 17
    for one in listening:
        one.setblocking(False)
        with pytest.raises(BlockingIOError):
            one.accept()
    odd = [path for path in folder.rglob("*") if path.is_symlink() or not (path.is_file() or path.is_dir())]
    assert not odd and (victim / "kept").read_text() == "kept"
    assert not list(workspace.segments.glob("new")) and not Path("/tmp/mine").exists()


def test_code_reaches_local_servers_only_without_the_sandbox(
    tmp_path: Path, server: tuple[int, list[socket.socket]], workspace: Workspace
) -> None:
    """This shows that the sandbox stops the code, and not the test's set-up."""
    port, listening = server
    script = tmp_path / "script.py"
    tries = "import socket, sys\nfor family, name in ((2, ('127.0.0.1', int(sys.argv[1]))), (1, '\\0factory-test-' + sys.argv[1])):\n"
    script.write_text(tries + "    socket.socket(family).connect(name)\n")
    for isolated, code in ((True, 1), (False, 0)):
        live = LiveCode(tmp_path, tmp_path / "cache", isolated)
        assert live.run_python(str(script), str(port)).returncode == code
    listening[0].accept()


def without_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FACTORY_BWRAP", "/none-such/bwrap")


def test_without_a_sandbox_training_stops_once_a_patch_of_an_agent_is_merged(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger.create(workspace.ledger_url)
    policy = lambda name: replace(workspace, config=replace(workspace.config, training_sandbox=name))
    assert decide_live_code_isolation(Plant(workspace, ledger)) == (True, "")
    without_a_sandbox(monkeypatch)
    with pytest.raises(IsolationError, match="training_sandbox is 'required'.*none-such.*factory check"):
        decide_live_code_isolation(Plant(policy("required"), ledger))
    assert decide_live_code_isolation(Plant(workspace, ledger))[0] is False
    merged = {
        "agent": "kernels",
        "target": "loss_head",
        "title": "t",
        "hypothesis": "h",
        "base_commit": "0",
        "branch": "b",
    }
    with ledger.begin() as tx:
        tx.execute(proposals.insert().values(number=7, state="rejected", created_at=0.0, **merged))
    assert decide_live_code_isolation(Plant(workspace, ledger))[0] is False
    with ledger.begin() as tx:
        tx.execute(sa.update(proposals).values(state="approved"))
    with refused("runs.sandbox_for_agents", IsolationError, proposal=7) as error:
        decide_live_code_isolation(Plant(workspace, ledger))
    assert "none-such" in str(error.value) and "'training_sandbox: off'" in str(error.value)
    isolated, why = decide_live_code_isolation(Plant(policy("off"), ledger))
    assert not isolated and why == f"training_sandbox is off in {workspace.root / 'factory.yaml'}"
    row = next(row for row in machine_check.run_checks(policy("off")) if row["check"] == "training")
    assert row["ok"] is False and "WITHOUT the sandbox" in row["detail"]


def test_processes_of_a_launcher_are_reported_as_not_isolated(workspace: Workspace) -> None:
    ledger = Ledger.create(workspace.ledger_url)
    several = replace(workspace, config=replace(workspace.config, launcher="srun torchrun", ranks=2))
    isolated, why = decide_live_code_isolation(Plant(several, ledger))
    assert not isolated and "launcher" in why


def test_links_and_pipes_that_a_trainer_leaves_are_not_read(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text('{"step": 1}\n')
    (tmp_path / "link").symlink_to(target)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "none"):
        assert read_tail(tmp_path / name, 100) == b"" and count_lines(tmp_path / name) == 0
        assert read_last_metrics(tmp_path / name) is None
    assert read_tail(target, 3) == b"1}\n" and count_lines(target) == 1
    assert read_last_metrics(target) == {"step": 1}
    folder = tmp_path / "swept"
    (folder / "kept").mkdir(parents=True)
    (folder / "kept" / "file").touch()
    (folder / "kept" / "link").symlink_to(tmp_path)
    assert remove_special_files(folder) == ["kept/link"] and (folder / "kept" / "file").exists() and target.exists()
    folder.joinpath(*["d"] * (DEPTH + 1)).mkdir(parents=True)
    with pytest.raises(SegmentError, match="folders deep"):
        remove_special_files(folder)


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ("[]", "not a JSON object"),
        ("[" * 100_000, "cannot be read"),
        ('{"last_step": 5, "checkpoint": "CHECKPOINTS/step-00000005"}', "manifest_sha256 is missing"),
        ('{"last_step": 4, "checkpoint": "CHECKPOINTS/step-00000004", "manifest_sha256": ""}', "Step 5 and"),
        ('{"last_step": 5, "checkpoint": "/elsewhere/step-00000005", "manifest_sha256": ""}', "Step 5 and"),
    ],
)
def test_a_result_of_another_segment_is_refused(tmp_path: Path, result: str, says: str) -> None:
    (tmp_path / "result.json").write_text(result.replace("CHECKPOINTS", str(tmp_path / "checkpoints")))
    with pytest.raises(SegmentError, match=says):
        read_result(tmp_path, 5)


BOMB = """
    import os, time
    while True:
        try:
            os.fork()
        except OSError:
            time.sleep(0.01)
"""


def test_a_trainer_that_forks_without_end_ends_its_segment_with_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cgroup.make_control_groups(10) as groups:
        if not groups.limits_tasks:
            pytest.skip("no control group can be made here: without one, a bomb fills this machine for a moment")
    limits = replace(LiveLimits.of_this_machine(), tasks=200)
    monkeypatch.setattr(LiveLimits, "of_this_machine", classmethod(lambda cls: limits))
    code = make_target(tmp_path / "code")
    commit_edit(code, "trainer/segment.py", BEFORE, BOMB + BEFORE)
    with pytest.raises(SegmentError) as raised:
        fill(lenient_plant(tmp_path, code))
    assert "sandbox.live_tasks" in codes(tree(raised.value.message)), raised.value
