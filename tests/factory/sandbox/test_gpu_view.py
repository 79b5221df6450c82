"""The sandbox beside a GPU. Any device file stands for the GPU's here: what CUDA's driver needs was seen on an H200."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from factory.core import devices
from factory.sandbox import bubblewrap, view
from tests.support.factory.sandboxed import told
from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("isolates")


def test_beside_a_gpu_threads_can_be_named_and_nothing_else_in_proc_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's driver starts only where it can name its threads: seen on an H200. Any device file stands for a GPU's here."""
    code = """
        import threading
        name = f'/proc/self/task/{threading.get_native_id()}/comm'
        tell('a name', lambda: open(name, 'w').write('cuda'))
        writable = []
        for folder, folders, files in os.walk('/proc'):
            if folder == '/proc':
                folders[:] = [name for name in folders if not name.isdigit() and name != 'self']
            for path in (os.path.join(folder, name) for name in files):
                try:
                    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                    writable.append(path)
                except OSError:
                    pass
        assert not writable, writable
        tell('locks', lambda: open('/proc/locks').read() and 1 / 0)
    """
    assert told(tmp_path, code)["a name"] == ("refused", errno.EROFS)
    monkeypatch.setattr(devices, "nodes", lambda every=False: ["/dev/full"])
    found = told(tmp_path, code)
    assert found["a name"] == ("done", "4") and found["locks"] == ("refused", errno.EACCES), (
        "it names processes outside"
    )


def test_init_is_out_of_reach_beside_a_gpu_without_landlock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the command could write its own end into init, which holds the lock and says how the command ended."""
    launcher = view.LAUNCHER.read_text(encoding="utf-8")
    assert launcher.count(call := '    forbid_writing_outside(rules["writable"])\n') == 1
    (tmp_path / "launch.py").write_text(launcher.replace(call, ""))
    monkeypatch.setattr(bubblewrap, "LAUNCHER", tmp_path / "launch.py")
    monkeypatch.setattr(devices, "nodes", lambda every=False: ["/dev/full"])
    code = """
        tell('memory', lambda: open('/proc/1/mem', 'r+b'))
        tell('score', lambda: open('/proc/1/oom_score_adj', 'w').write('9'))
        tell('descriptors', lambda: os.listdir('/proc/1/fd'))
        tell('own', lambda: open('/proc/self/mem', 'r+b'))
    """
    found = told(tmp_path, code)
    assert found.pop("own")[0] == "done" and {how for how, _ in found.values()} == {"refused"}, found


SEEN_LATER = """
import subprocess, sys
from pathlib import Path
from factory.sandbox import live
folder = Path(sys.argv[1])
with open(folder / "seen", "wb") as out:
    started = live.start(["sh", "-c", "until [ -e go ]; do sleep 0.02; done; cat /proc/self/mountinfo"], writable=[folder],
                         readonly=[], cwd=folder, cache=folder / "cache", environment={}, nodes=["/dev/full"], stdout=out, stderr=out)
subprocess.run(["mount", "-t", "tmpfs", "later", "/proc/fs"], check=True)
(folder / "go").touch()
sys.exit(started.wait(60))
"""


@pytest.mark.skipif(os.geteuid() != 0 or bool(bubblewrap._refused("unshare", "--mount", "true")), reason="not root")
def test_what_is_mounted_later_does_not_appear_inside(tmp_path: Path) -> None:
    """Where mounts have peers, as under systemd: binfmt_misc mounted during a run of root's would be writable in it."""
    shared = 'mount --make-rshared / && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", shared, "sh", sys.executable, "-c", SEEN_LATER, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = (tmp_path / "seen").read_text()
    assert " /proc/fs " in seen and " later " not in seen and "master:" not in seen, seen
