"""Tests of the sandbox with a GPU, for which another device file stands in. The needs of CUDA's driver were observed on an H200."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from factory.core import devices
from factory.sandbox import bubblewrap, filesystem_view
from tests.support.factory.sandboxed import told
from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("isolates")


def test_with_a_gpu_a_command_can_name_its_threads_and_change_nothing_else_in_proc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's driver starts only if it can name its threads (observed on an H200)."""
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
    monkeypatch.setattr(devices, "list_gpu_device_files", lambda every=False: ["/dev/full"])
    found = told(tmp_path, code)
    assert found["a name"] == ("done", "4") and found["locks"] == ("refused", errno.EACCES), (
        "it names processes outside"
    )


def test_with_a_gpu_init_is_protected_without_landlock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the command could change the memory of init, which holds the lock and reports how the command ended."""
    launcher = filesystem_view.LAUNCHER.read_text(encoding="utf-8")
    assert launcher.count(call := '    forbid_writing_outside(rules["writable"])\n') == 1
    (tmp_path / "launch.py").write_text(launcher.replace(call, ""))
    monkeypatch.setattr(bubblewrap, "LAUNCHER", tmp_path / "launch.py")
    monkeypatch.setattr(devices, "list_gpu_device_files", lambda every=False: ["/dev/full"])
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
from factory.sandbox import live_sandbox
folder = Path(sys.argv[1])
with open(folder / "seen", "wb") as out:
    started = live_sandbox.start_in_sandbox(["sh", "-c", "until [ -e go ]; do sleep 0.02; done; cat /proc/self/mountinfo"], writable=[folder],
                         readonly=[], cwd=folder, cache=folder / "cache", environment={}, nodes=["/dev/full"], stdout=out, stderr=out)
subprocess.run(["mount", "-t", "tmpfs", "later", "/proc/fs"], check=True)
(folder / "go").touch()
sys.exit(started.wait(60))
"""


@pytest.mark.skipif(os.geteuid() != 0 or bool(bubblewrap._refused("unshare", "--mount", "true")), reason="not root")
def test_a_later_mount_does_not_appear_inside(tmp_path: Path) -> None:
    """Under systemd mounts are shared: binfmt_misc, mounted while root's sandbox runs, would be writable inside."""
    shared = 'mount --make-rshared / && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", shared, "sh", sys.executable, "-c", SEEN_LATER, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = (tmp_path / "seen").read_text()
    assert " /proc/fs " in seen and " later " not in seen and "master:" not in seen, seen
