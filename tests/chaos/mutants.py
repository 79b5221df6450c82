"""All calls of fsync and rename in the factory and the contract, each with the test or scenario that notices its removal.

``python -m tests.chaos.mutants`` deletes them one by one in a copy of this checkout, and runs the check that must notice: a power cut behind an
effect of a scenario (``Cut``), the scenario itself (an empty ``Cut``), or a test. A fast test ensures that the list is complete.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.chaos.shim import Effect
from tests.support.git import git
from tests.support.paths import ROOT

CALLS = frozenset({"fsync", "fdatasync", "sync_folder", "sync_tree", "rename", "renames", "move", "replace"})
RANKS = "tests/trainer/parallel/test_parallel.py::test_a_layout_does_not_change_the_training"
TABLE_LINE = '"'  # the first character of a line in a table; deleting it leaves no statement
# A mutant that runs so many times longer than the original code counts as hung.
TIMES, LEAST_S = 5, 60.0
LIVE = ("trainer/", "kernels/")
LOOKED_AT = ("factory", "trainer/contract", "kernels/contract")
COPIED = ("factory", "trainer", "models", "kernels", "agents", "policies", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Cut:
    """A power cut at the next flush of the ledger after the last effect like ``after`` ('kind place'), or at the end of the scenario.

    A mutant is noticed if the scenario ends differently, the ledger names a lost file, or the next run ends differently.
    """

    scenario: str
    after: str = ""
    at_once: bool = False  # immediately after the effect


@dataclass(frozen=True)
class Mutant:
    path: str
    line: str  # the line with the call, which the file has once
    notices: Cut | str  # a power cut in a scenario, or the node id of a test
    replacement: str = ""  # the new line; '': the line is deleted


# Calls without a mutant: the files that they protect can be made again, at the cost of time only.
ONLY_TIME = {
    ("factory/status/daemon_log.py", "os.replace(newer, older)"): "a log",
    ("factory/status/daemon_log.py", "os.replace(aside, self.note)"): "what the daemon does now",
    ("factory/retention/disk.py", "os.replace(aside, path)"): "samples of free room",
    ("factory/gates/patch/paired_rounds.py", 'compiled.rename(folder / "cache")'): "a compile cache",
    ("factory/demo/demo.py", "measured_with.rename(own)"): "a compile cache",
    (
        "factory/code_loop/try_driver.py",
        '(place / "result.tmp").rename(place / "result.json")',
    ): "in the sandbox's own folder",
    (
        "factory/code_loop/try_driver.py",
        '(folder / "spec.tmp").rename(folder / "segment.json")',
    ): "in the sandbox's own folder",
    ("factory/demo/import_demo.py", "os.rename(aside, folder)"): "a corpus that is made again",
    (
        "factory/demo/public_model.py",
        "(aside / wheel.file).rename(cache / wheel.file)",
    ): "a download, whose hash is checked",
    ("factory/demo/public_model.py", "aside.rename(target)"): "a file that is unpacked again",
    ("factory/runs/compile_cache.py", "aside.rename(own)"): "a compile cache",
    ("factory/retrying/failure_waits.py", 'os.replace(log, log.with_name("errors.old.log"))'): "a log",
}
INGEST, RELEASE, MERGE, SEGMENT, STORE = (Cut(name) for name in ("ingest", "release", "merge", "segment", "store"))
SHARD = "trainer/contract/data/token_shard.py"
FORMAT = "trainer/contract/checkpoint/format.py"
FILES = "kernels/contract/files.py"
PLACED = "tests/chaos/test_flushes.py::test_a_file_put_in_place_survives_a_power_cut"
DAILY = "tests/chaos/test_flushes.py::test_a_daily_backup_and_its_journal_are_whole_after_a_power_cut"
SPLIT = "tests/chaos/test_flushes.py::test_rows_appended_to_a_filed_shard_survive_a_power_cut"
TOGETHER = "tests/chaos/test_flushes.py::test_small_files_that_became_one_shard_survive_a_power_cut"
DEMO = "tests/factory/demo/test_demo.py::test_the_corpus_is_written_once_and_copied_whole_into_the_inbox"

MUTANTS = (
    Mutant(FILES, "os.fsync(out.fileno())", INGEST),
    Mutant(FILES, "os.replace(aside, path)", INGEST),
    Mutant(FILES, "sync_folder(path.parent)", INGEST),
    Mutant(FILES, "os.fsync(descriptor)", INGEST),
    Mutant(FILES, "sync_tree(path)", "tests/kernels/test_files.py::test_a_tree_is_flushed_whole"),
    Mutant(FILES, "sync_folder(path)", RELEASE),
    Mutant(FILES, "sync_folder(folder)", RELEASE),
    Mutant(SHARD, "os.fsync(handle.fileno())", INGEST),
    Mutant(SHARD, "sync_folder(aside)", INGEST),
    Mutant(SHARD, "os.rename(aside, target)", INGEST),
    Mutant(
        SHARD,
        "sync_folder(parent)  # also for a folder that a killed process renamed",
        Cut("ingest", "rename plant/shards/#"),
    ),
    Mutant(
        "factory/ingest/hash_index.py",
        "sync_folder(path.parent.parent)  # needed too if a killed process made the folder",
        Cut("ingest", "mkdir plant/shards/raw"),
    ),
    Mutant(FORMAT, "os.fsync(out.fileno())", SEGMENT),
    Mutant(FORMAT, "sync_folder(aside)", SEGMENT),
    Mutant(FORMAT, "os.rename(aside, target)", SEGMENT),
    Mutant(FORMAT, "sync_folder(parent)", SEGMENT),
    Mutant(FORMAT, 'os.rename(aside / f".share-{rank:05d}", aside / f"share-{rank:05d}.json")', RANKS),
    Mutant(FORMAT, "path.rename(away)", "tests/trainer/contract/checkpoint/test_checkpoint.py"),
    Mutant("factory/training/segment_folder.py", "sync_folder(folder.parent)", SEGMENT),
    Mutant("factory/audit/kept_checkpoints.py", "sync_tree(aside)", SEGMENT),
    Mutant(
        "factory/audit/kept_checkpoints.py",
        "os.rename(aside, target)",
        "tests/factory/diagnosis/test_bench.py::test_kept_checkpoints_remain_after_the_trainer_removes_its_own",
    ),
    Mutant("factory/training/exporting.py", "sync_tree(folder)  # before the ledger names it", RELEASE),
    Mutant("factory/training/exporting.py", "os.rename(aside, target)", RELEASE),
    Mutant(
        "factory/training/exporting.py",
        "sync_folder(target.parent)  # also when a killed process made the export",
        Cut("release", "rename plant/exports/segment-#"),
    ),
    Mutant("factory/release/published_link.py", "os.replace(new_link, folder / CHAMPION_LINK)", RELEASE),
    Mutant("factory/release/published_link.py", "sync_folder(folder)", RELEASE),
    Mutant(
        "factory/show/mlflow/store.py",
        'return subprocess.run(["sync", "--", *files], stdin=subprocess.DEVNULL, capture_output=True).returncode == 0',
        SEGMENT,
        replacement="return True",
    ),
    Mutant(
        "factory/show/mlflow/store.py",
        "os.replace(aside, path)  # flush_store later flushes the new name too",
        STORE,
    ),
    Mutant(
        "factory/git/git_store.py",
        "os.fsync(noted.fileno())",
        Cut("merge", "create target/.git/index.lock", at_once=True),
    ),
    Mutant("factory/git/git_store.py", "os.fsync(out.fileno())", MERGE),
    Mutant(
        "factory/git/git_store.py",
        '"core.fsync": "all",  # commits that the ledger names must survive a power cut',
        MERGE,
    ),
    Mutant("factory/git/repository.py", "aside.replace(repository / path)", MERGE),
    Mutant("factory/git/repository.py", "sync_folder(folder)", MERGE),
    Mutant(
        "factory/git/repository.py",
        "os.rename(aside, target)",
        "tests/factory/demo/test_demo_code.py::test_a_fork_is_a_separate_repository_with_one_file_edited",
    ),
    Mutant("factory/ledger/engine.py", '"synchronous=FULL", ', INGEST, replacement='"synchronous=OFF", '),
    Mutant(FILES, "sync_folder(made)", PLACED),
    Mutant(FILES, "os.replace(made, place)", PLACED),
    Mutant(FILES, "sync_folder(place.parent)", PLACED),
    Mutant(FILES, "sync_tree(made)", PLACED),
    Mutant("factory/ledger/journal.py", "os.fsync(out.fileno())", DAILY),
    Mutant(  # in a scenario the file would be ingested for ever
        "factory/ingest/filing.py",
        "shutil.move(path, place)",
        "tests/factory/ingest/test_inbox.py::test_a_file_whose_name_is_not_utf8_is_ingested_under_an_escaped_name",
    ),
    Mutant(
        "factory/ingest/filing.py",
        'shutil.move(place, plant.workspace.inbox / f"{time.time_ns()}-{path.name[-LONGEST_NAME:]}")',
        "tests/chaos/test_flushes.py::test_a_file_with_the_name_of_an_ingested_one_returns_to_the_inbox",
    ),
    Mutant(
        "factory/ingest/filing.py",
        "shutil.move(path, original)",
        "tests/factory/ingest/test_packed_files.py::test_a_table_becomes_a_shard_of_json_lines_and_the_original_file_is_kept",
    ),
    Mutant(
        "factory/ingest/file_groups.py",
        "sync_folder(path)  # the file that was converted may be deleted next",
        TOGETHER,
    ),
    Mutant("factory/ingest/filing.py", "sync_folder(back)", SPLIT),
    Mutant(
        "factory/ingest/filing.py",
        "sync_folder(back.parent)  # before the old name stands for the ingested content",
        SPLIT,
    ),
    Mutant(
        "factory/ingest/filing.py",
        "shutil.move(path, back)",
        "tests/factory/ingest/test_filing.py::test_a_filed_shard_whose_first_rows_changed_returns_to_the_inbox",
    ),
    Mutant(
        "factory/ingest/filing.py",
        "os.rename(path, back)",
        "tests/factory/ingest/test_filing.py::test_a_repaired_quarantined_file_is_tried_again",
    ),
    Mutant(
        "factory/ingest/inbox.py",
        "os.rename(path, target)",
        "tests/factory/ingest/test_inbox.py::test_a_file_whose_name_is_not_utf8_is_ingested_under_an_escaped_name",
    ),
    Mutant(
        "factory/retention/cleaning.py",
        "os.rename(choice.folder.path, aside)",
        "tests/factory/retention/test_cleaning.py::test_cleaning_keeps_what_the_policy_names",
    ),
    Mutant(
        "factory/audit/kept_checkpoints.py",
        "os.rename(target / format_checkpoint_name(step), aside)",
        "tests/factory/audit/test_audit_keeping.py::test_a_checkpoint_removed_from_the_ladder_is_whole_or_gone",
    ),
    Mutant(
        "factory/backups/backups.py",
        "os.rename(old, hidden)  # so that half a backup never has the name of a backup",
        "tests/factory/repairs/test_lost_ledger.py::test_the_newest_backups_stay_and_a_damaged_one_is_skipped",
    ),
    Mutant(
        "factory/core/path_removal.py",
        "os.rename(inner, moved, src_dir_fd=folder, dst_dir_fd=top)",
        "tests/factory/core/test_removal.py",
    ),
    Mutant(
        "factory/erasing/erasing.py",
        "sync_folder(plant.workspace.shards)  # before the ledger records that the text is gone",
        Cut("erase"),
    ),
    Mutant("factory/demo/demo.py", "os.rename(aside, folder)", DEMO),
    Mutant("factory/demo/demo.py", "os.replace(aside, plant.workspace.inbox / path.name)", DEMO),
    Mutant(
        "factory/evals/probes/server_probe.py",
        'os.replace(answer_path + ".part", answer_path)',
        "tests/factory/evals/test_server_probe.py",
    ),
    Mutant(
        "factory/runs/trainer_folder.py",
        'os.rename(PART_NAME, "segment.json", src_dir_fd=folder, dst_dir_fd=folder)',
        "tests/factory/gates/test_patch_training.py",
    ),
)


def mutated(text: str, mutant: Mutant) -> str:
    """Return the file without the line, or with the replacement. Raises: AssertionError unless the file has the line once."""
    lines = text.splitlines(keepends=True)
    if mutant.replacement:
        assert text.count(mutant.line) == 1, f"{mutant.path} holds {mutant.line!r} {text.count(mutant.line)} times"
        return text.replace(mutant.line, mutant.replacement)
    found = [number for number, line in enumerate(lines) if line.strip() == mutant.line]
    assert len(found) == 1, f"{mutant.path} holds {mutant.line!r} {len(found)} times"
    indent = lines[found[0]][: len(lines[found[0]]) - len(lines[found[0]].lstrip())]
    lines[found[0]] = f"{indent}pass\n" if not mutant.line.startswith(TABLE_LINE) else ""
    return "".join(lines)


def notices(cut: Cut, work: Path, outlines: Path) -> list[str]:
    """Return what is wrong with this checkout's code, as found by a power cut or already by an undisturbed run.

    The first run of a scenario, with the code without a mutant, writes its outline to ``outlines``.
    """
    from tests.chaos import power
    from tests.chaos.campaign import Site
    from tests.chaos.state import broken, differences, lost, outline, state_of

    site = Site(work)
    try:
        try:
            straight = site.straight(cut.scenario)
        except AssertionError as error:
            return [f"undisturbed: {str(error)[-500:]}"]
        effects, want = straight.effects, straight.state
        known, found = outlines / f"{cut.scenario}.json", outline(want)
        if not known.exists():
            known.write_text(json.dumps(found))
        if wrong := differences(json.loads(known.read_text()), found):
            return [f"undisturbed: {line}" for line in wrong]
        for loss in power.LOSSES:
            site.start(cut.scenario)
            site.cut(cut.scenario, _number(cut, effects, site.site), loss)
            found = [] if cut.at_once else lost(site.site, cut.scenario)
            if not found:
                answers = [site.run(cut.scenario) for _ in range(2)]
                found = [f"it ended with {answers[-1]['code']}"] if answers[-1]["code"] else []
                found += broken(site.site) + differences(want, state_of(site.site))
            wrong += [f"{loss}: {line}" for line in found]
        return wrong
    finally:
        site.close()


def _number(cut: Cut, effects: list[Effect], root: Path) -> int:
    made = [e for e in effects if not e.error]
    if not cut.after:
        return made[-1].number
    last = [e.number for e in made if f"{e.kind} {e.place(root)}" == cut.after][-1]
    if cut.at_once:
        return last
    return next(
        e.number for e in made if e.number > last and e.kind == "fdatasync" and e.path.endswith("ledger.db-wal")
    )


def run(mutant: Mutant | None, check: Cut | str, tree: Path, work: Path, patience: float | None) -> tuple[bool, str]:
    """Run the check with the mutant in the copied tree. Returns whether and how it was noticed. ``patience``: seconds; None: no limit."""
    if mutant:
        (tree / mutant.path).write_text(mutated((ROOT / mutant.path).read_text(), mutant))
    if isinstance(check, Cut):
        # Training runs the code of the workspace's repository, which is made once in a folder of work.
        own = work.with_name("work-of-one") if mutant and mutant.path.startswith(LIVE) else work
        shutil.rmtree(work.with_name("work-of-one"), ignore_errors=True)
        words = ["-m", "tests.chaos.mutants", "--check", json.dumps(asdict(check)), "--work", str(own)]
    else:
        words = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0", check]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *words], cwd=tree, env=environment, capture_output=True, text=True, timeout=patience
        )
    except subprocess.TimeoutExpired:
        return True, "it hangs"
    finally:
        if mutant:
            shutil.copy(ROOT / mutant.path, tree / mutant.path)
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return done.returncode != 0, next(
        (line for line in said if "power cut" in line or line.startswith(("FAILED", "E  "))), (said or [""])[-1]
    )[:200]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.mutants", description=__doc__)
    parser.add_argument("--only", help="mutants of files whose path or line holds this")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.check:
        wrong = notices(Cut(**json.loads(given.check)), given.work, given.work.parent)
        print("\n".join(wrong))
        return 1 if wrong else 0
    chosen = [m for m in MUTANTS if not given.only or given.only in f"{m.path}: {m.line}"]
    survived = 0
    with tempfile.TemporaryDirectory(prefix="factory-mutants-") as folder:
        tree, work = Path(folder) / "tree", Path(folder) / "work"
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, tree / name)
        git(tree, "init", "--quiet", "--initial-branch=main")
        git(tree, "add", "--all")
        git(tree, "commit", "--quiet", "--message=the code as it stands")
        patience: dict[Cut | str, float] = {}
        for mutant in chosen:
            if mutant.notices not in patience:
                began = time.monotonic()
                red, why = run(None, mutant.notices, tree, work, None)
                seconds = time.monotonic() - began
                patience[mutant.notices] = TIMES * seconds + LEAST_S
                print(
                    f"{'✗' if red else '✓'} without a mutant, {seconds:.0f} s: {mutant.notices} {why if red else ''}",
                    flush=True,
                )
                survived += red
            red, why = run(mutant, mutant.notices, tree, work, patience[mutant.notices])
            print(
                f"{'✓' if red else '✗ NOT NOTICED'} {mutant.path}: {mutant.line[:70]}: {why if red else ''}", flush=True
            )
            survived += not red
    print(f"{len(chosen)} mutants, {survived} not noticed or wrong")
    return 1 if survived else 0


def calls_in(root: Path = ROOT) -> set[tuple[str, str]]:
    """Return (file, line) of each call that flushes a file or names one; str.replace does not count."""
    found = set()
    for folder in LOOKED_AT:
        for path in (root / folder).rglob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and _names(node):
                    found.add((str(path.relative_to(root)), text.splitlines()[node.lineno - 1].strip()))
    return found


def _names(node: ast.Call) -> bool:
    function = node.func
    name = (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
    if name not in CALLS:
        return False
    of_module = (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id in ("os", "shutil")
    )
    if name == "replace":  # str.replace takes two arguments; dataclasses.replace is not an attribute
        return of_module or (isinstance(function, ast.Attribute) and len(node.args) == 1 and not node.keywords)
    return of_module or name != "move"


if __name__ == "__main__":
    sys.exit(main())
