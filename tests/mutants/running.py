"""Runs tests over mutants, each in a fork of a process that has every library of these tests imported already.

The code lies in a copy of the checkout, so that processes which tests start see the mutant too; no process imports a module of ours before the fork.
Of its own tests a mutant inside a function meets those that run its line when nothing is changed, the shortest first.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Generator, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.operators import Mutant
from tests.support.git import git
from tests.support.plants.kept import STATE

OURS = ("agents", "benchmarks", "factory", "kernels", "models", "tests", "trainer")
FAST = "not slow and not long"
# What these read when they are imported, tests may yet set.
NOT_AHEAD = ("triton", "torch._inductor", "torch._dynamo")
TIMES, LEAST_S = (
    4.0,
    20.0,
)  # a mutant under which tests take longer than so often their time, and so many seconds more, hangs


def copied(root: Path, tree: Path) -> Path:
    """What git knows of a checkout, changed files as they are, in a repository of its own."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, tree / name)
    git(tree, "init", "--quiet", "--initial-branch=main")
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message=the code as it stands")
    return tree


@cache
def imports(path: Path) -> set[str]:
    """Every name that a file imports, inside functions too: ``from a import b`` is a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_tests(root: Path, module: str) -> list[str]:
    """Of the folder that mirrors a module's own, or of the nearest above that has tests, and of those above it, the files that import the
    module; where none does, those of that folder that reach it."""
    folder, top = Path("tests") / Path(module).parent, Path("tests") / Path(module).parts[0]
    while folder != top and not list((root / folder).glob("test_*.py")):
        folder = folder.parent
    name = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    places = [place for place in (folder, *folder.parents) if place.is_relative_to(top)]
    near = [path for place in places for path in (root / place).glob("test_*.py")]
    found = [str(path.relative_to(root)) for path in near if name in imports(path)]
    return sorted(found) or [path for path in _reaching(root, module) if Path(path).parent == folder]


def distant_tests(root: Path, module: str) -> list[str]:
    """The other test files that import the module, by whatever way; the nearest first."""
    own = set(own_tests(root, module))
    return [path for path in _reaching(root, module) if path not in own]


@cache
def _reaching(root: Path, module: str) -> list[str]:
    files = {path: imports(path) for top in OURS for path in (root / top).rglob("*.py")}
    names = {str(p.relative_to(root).with_suffix("")).removesuffix("/__init__").replace("/", "."): p for p in files}
    reached, ring = {root / module}, {root / module}
    found: list[str] = []
    while ring:
        wanted = {name for name, path in names.items() if path in ring}
        ring = {path for path, imported in files.items() if path not in reached and imported & wanted}
        reached |= ring
        tests = (p.relative_to(root) for p in ring if p.name.startswith("test_") and p.is_relative_to(root / "tests"))
        found += sorted(map(str, tests))
    return found


class Watch:
    """A plugin of pytest: which lines of the watched files each test runs, in its own process, and how long it takes alone, with what
    fixtures it shares with others."""

    def __init__(self, watched: Iterable[Path]) -> None:
        self.watched = {str(path) for path in watched}
        self.lines: dict[str, set[str]] = {}  # 'path:line' by test
        self.seconds: dict[str, float] = {}
        self.shared: dict[str, float] = {}  # seconds of fixtures that outlive a test, by name
        self.uses: dict[str, list[str]] = {}  # fixtures of each test
        self.bad: list[str] = []
        self.set_up: dict[str, set[str]] = {}  # by test file: what fixtures of one test run, others may share
        self.now: set[str] = set()

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in self.watched:
            return None
        self.now.add(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return self._trace

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        began, before = time.monotonic(), sum(self.shared.values())
        result = yield
        self.seconds[item.nodeid] = time.monotonic() - began - (sum(self.shared.values()) - before)
        self.uses[item.nodeid] = getattr(item, "fixturenames", [])
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        began = time.monotonic()
        result = yield
        if request.scope != "function":
            self.shared[fixturedef.argname] = time.monotonic() - began
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        yield from self._watched(self.set_up.setdefault(str(item.path), set()))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        yield from self._watched(self.lines.setdefault(item.nodeid, set()))

    def _watched(self, into: set[str]) -> Generator[None, object, object]:
        self.now = into
        sys.settrace(self._trace)
        threading.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.bad.append(report.nodeid)

    def told(self) -> dict[str, Any]:
        of = lambda test: (
            self.lines.get(test, set()) | self.set_up.get(str(Path.cwd() / test.partition("::")[0]), set())
        )
        alone = lambda test: self.seconds[test] + sum(self.shared.get(name, 0.0) for name in self.uses[test])
        site = tuple(set(map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))))
        libraries = [
            name for name, module in sys.modules.items()
            if (getattr(module, "__file__", None) or "").startswith(site) and not name.startswith((*OURS, *NOT_AHEAD))
        ]  # fmt: skip
        return {
            "tests": {t: [alone(t), sorted(of(t))] for t in self.seconds},
            "bad": self.bad,
            "libraries": libraries,
        }


class Warm:
    """A copy of the checkout, and a process that forks."""

    def __init__(self, root: Path, work: Path) -> None:
        self.tree, self.work = copied(root, work / "tree"), work
        os.chdir(self.tree)
        sys.path[:] = [str(self.tree), *(p for p in sys.path if p and Path(p).resolve() != root)]
        os.environ |= {"PYTHONPATH": str(self.tree), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        # Plants that tests keep are of the code without a mutant: to train one for each would be most of its time.
        os.environ[STATE] = "without a mutant"
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode = False
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(work / "compiled")

    def baseline(self, tests: list[str], watched: Iterable[str]) -> dict[str, Any]:
        """What ``Watch`` saw of these fast tests; its libraries are imported here from now on. Raises: SystemExit when none ran."""
        watch, said = Watch(self.tree / path for path in watched), self.work / "watched.json"
        self._forked(tests, None, [watch], lambda: said.write_text(json.dumps(watch.told())))
        if not said.exists():
            raise SystemExit(f"these tests end without a result: {(self.work / 'said').read_text()[-2000:]}")
        seen = json.loads(said.read_text())
        said.unlink()
        for name in seen["libraries"]:
            try:
                importlib.import_module(name)
            except Exception:  # one that only another imports, in its own order
                continue
        return seen

    def killed(self, mutant: Mutant, source: str, tests: list[str], seconds: float) -> str:
        """The test that notices a mutant, or 'time'; empty: it survives these tests. Of a test whose cases are named by what the mutant
        changes, some are not there under their names, which is no failure: all that it has now are run."""
        path, number = self.tree / mutant.path, time.time()
        path.write_text(mutant.applied(source))
        os.utime(path, (number, number - 10_000_000))  # else Python may take what it compiled before
        try:
            ended = self._forked(tests, TIMES * seconds + LEAST_S, [], lambda: None, "-x")
            if ended == pytest.ExitCode.USAGE_ERROR and (gone := self._not_found()):
                whole = [case if (test := case.partition("[")[0]) not in gone else test for case in tests]
                ended = self._forked([*dict.fromkeys(whole)], TIMES * seconds + LEAST_S, [], lambda: None, "-x")
        finally:
            path.write_text(source)
            os.utime(path, (number, number - 20_000_000))
        if ended == 0:
            return ""
        said = (self.work / "said").read_text(errors="replace").splitlines()
        failed = [line.split()[1] for line in said if line.startswith(("FAILED ", "ERROR ")) and "::" in line]
        return "time" if ended is None else next(iter(failed), f"pytest ended with {ended}")

    def _not_found(self) -> set[str]:
        """The tests of which pytest was given a case that it did not find."""
        begin = f"ERROR: not found: {self.tree}/"
        said = (self.work / "said").read_text(errors="replace").splitlines()
        return {line.removeprefix(begin).partition("[")[0] for line in said if line.startswith(begin)}

    def _forked(
        self, tests: list[str], patience: float | None, plugins: list[Any], then: Callable[[], object], *words: str
    ) -> int | None:
        """pytest's code in a fork; None: it was stopped after ``patience`` seconds."""
        scratch = self.work / "scratch"
        if not (child := os.fork()):
            try:
                os.setsid()
                out = os.open(self.work / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                for stream in (1, 2):
                    os.dup2(out, stream)
                if patience:
                    sys.dont_write_bytecode = True
                    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
                for name in [n for n in sys.modules if n.partition(".")[0] in OURS]:
                    del sys.modules[name]
                code = pytest.main(
                    [
                        *tests,
                        *words,
                        "-q",
                        "-p",
                        "no:cacheprovider",
                        "-m",
                        FAST,
                        "--rootdir",
                        str(self.tree),
                        "--basetemp",
                        str(scratch),
                    ],
                    plugins,
                )
                then()
                sys.stdout.flush()
                os._exit(int(code))
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", flush=True)
                os._exit(99)
        until, ended = time.monotonic() + (patience or 1e9), (0, 0)
        try:
            while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until:
                time.sleep(0.02)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # it, or what it left behind
            if not ended[0]:
                os.waitpid(child, 0)
            shutil.rmtree(scratch, ignore_errors=True)
        return os.waitstatus_to_exitcode(ended[1]) if ended[0] else None
