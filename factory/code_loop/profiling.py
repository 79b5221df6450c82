"""Profiles the training step: runs the line profiler in its own process.

A profile is a folder of files in ``reports/profiles/``, a row in the ledger and a run in MLflow.

Like training, the profiler runs from the worktree of the live code, in the sandbox. Without a workspace it profiles the checkout itself, and
only writes files.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agents.kernel_engineer.targets import ProfileTarget, describe_offered_targets, find_targets
from factory.computing import compute_settings
from factory.core import devices
from factory.core.errors import FactoryError, InputError, suggest_name
from factory.core.path_removal import remove_path
from factory.core.progress import Progress
from factory.core.untrusted_trainer_files import read_json_object
from factory.core.workspace import Workspace, find_checkout_root
from factory.gates.patch.policy import PatchPolicy
from factory.git import repository
from factory.git.scope import AgentsPolicy
from factory.ledger.ledger import Ledger, profiles, record_event
from factory.ledger.plant import Plant
from factory.ledger.rows import Subject
from factory.ledger.writing import insert_row
from factory.runs.live_code import LiveCode
from factory.runs.trainer_folder import remove_links_and_pipes
from factory.training.planning import find_last_finished_segment
from kernels.contract.machine import describe_this_machine
from kernels.contract.message import Message

PROGRESS = "profile: "  # prefix of the profiler's lines of progress
USER_ERROR = 2  # the profiler's exit code for an error that its user can correct


FORMAT = 4  # equals that of agents.line_profiler.profile_schema, which only the profiler's own process imports
OLDEST_FORMAT = 3  # its lines are those of the eager step
RECENT = 5  # profiles of one commit, recipe and machine that count together
QUIET = 1.25  # a profile whose lines take so many times as long as those of the fastest was made beside other programs, and does not count
REMEMBERED = 20  # profiles of a machine whose rates are remembered: a wrong one is forgotten some day


class ProfileError(FactoryError):
    """The line profiler failed. The message has the profiler's last line of output."""


def read_profile(path: Path) -> dict[str, Any]:
    """Return a parsed profile.json; one of an older format with what it lacks. Raises: ProfileError if another version of the code wrote the file."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if found.get("format") == OLDEST_FORMAT:
        return found | {"compiled": False, "step_s": found["eager_step_s"], "machine": "", "machine_facts": {}}
    if found.get("format") != FORMAT:
        raise ProfileError(
            "code_loop.profile_format",
            "{file} has format {found}, and this factory reads format {expected}. The profiled code and the factory "
            "must have the same version.",
            file=str(path),
            found=found.get("format"),
            expected=FORMAT,
        )
    return found


def read_recent_profiles(ledger: Ledger, number: int) -> list[dict[str, Any]]:
    """Return a profile and the newest other profiles of the same commit, recipe and machine: at most ``RECENT``, without those of busy moments.

    Other programs only add time, and they add it to some lines more than to others: two threads that wait for one another can take a hundred times
    as long. So the fastest profile is right, and those that took more than ``QUIET`` times as long are left out. The profile itself comes first,
    or the fastest one in its place.

    Raises: ProfileError if the profile itself cannot be read. Others that cannot be read are left out.
    """
    row = ledger.read("SELECT path, code_commit FROM profiles WHERE id = :id", id=number)[0]
    found = [read_profile(Path(row["path"]))]
    others = ledger.read(
        "SELECT path FROM profiles WHERE code_commit = :base AND id <> :id ORDER BY id DESC LIMIT 50",
        base=row["code_commit"],
        id=number,
    )
    for other in others:
        if len(found) == RECENT:
            break
        try:
            profile = read_profile(Path(other["path"]))
        except (OSError, ValueError, KeyError, ProfileError):
            continue
        if all(profile.get(key) == found[0].get(key) for key in ("machine", "recipe", "kernels")):
            found.append(profile)
    fastest = min(found, key=lambda one: one["covered_s"])
    quiet = [one for one in found if one["covered_s"] <= QUIET * fastest["covered_s"]]
    return quiet if quiet[0] is found[0] else [fastest, *(one for one in quiet if one is not fastest)]


def find_best_rates(ledger: Ledger, machine: str, precision: str) -> tuple[float, float] | None:
    """Return the best rates, (FLOP/s, bytes/s), that the last profiles of a machine measured in a precision; None if there is no such profile.

    They only advise proposers. No gate reads them.
    """
    rows = ledger.read("SELECT summary FROM profiles ORDER BY id DESC LIMIT 200")
    summaries = [row["summary"] for row in rows if row["summary"].get("machine") == machine]
    alike = [one for one in summaries if one.get("precision") == precision][:REMEMBERED]
    rates = [(one.get("measured_flops_per_s"), one.get("measured_bytes_per_s")) for one in alike]
    known = [pair for pair in rates if all(isinstance(rate, float) and 0 < rate < float("inf") for rate in pair)]
    return (max(pair[0] for pair in known), max(pair[1] for pair in known)) if known else None


def find_least_gain(plant: Plant) -> float:
    """Return the gain of the whole step from which on the patch gate keeps a patch. Raises: ConfigError."""
    return PatchPolicy.load(plant.workspace.policy_path("gates/patch.yaml")).training.min_gain


def find_offered_targets(plant: Plant, number: int) -> tuple[list[ProfileTarget], Message]:
    """Return the targets of a profile that may be proposed, largest attainable gain first, and a line that counts them.

    Raises: ProfileError, ConfigError.
    """
    workspace, least = plant.workspace, find_least_gain(plant)
    agents = AgentsPolicy.load(workspace.policy_path("agents.yaml"))
    commit = plant.ledger.read("SELECT code_commit FROM profiles WHERE id = :id", id=number)[0]["code_commit"]
    files = set(filter(agents.is_patchable, repository.read_file_modes(workspace.repository, commit)))
    profile, *earlier = read_recent_profiles(plant.ledger, number)
    found = find_targets(profile, files, earlier)
    return [target for target in found if target.can_gain(least)], describe_offered_targets(found, least)


@dataclass(frozen=True)
class ProfileOptions:
    """Options of a profile. ``recipe``: a name or a path; None for the workspace's recipe, or the demo's. ``isolation_s``: seconds for timing single
    operations outside the step. ``implementations_s``: seconds for timing the registered implementations of the slowest ops. None for the
    profiler's default."""

    recipe: str | None = None
    isolation_s: float | None = None
    implementations_s: float | None = None

    def to_arguments(self) -> list[str]:
        given = {"--isolation": self.isolation_s, "--implementations": self.implementations_s}
        return [word for flag, value in given.items() if value is not None for word in (flag, str(value))]


QUICK = ProfileOptions(isolation_s=0)  # for proposers
QUICKEST = ProfileOptions(isolation_s=0, implementations_s=0)  # for a proposer that measures implementations itself


def profile_live_code(plant: Plant, options: ProfileOptions = ProfileOptions()) -> int:
    """Time every line of the live code's training step, and return the profile's id.

    Raises: RepositoryError, ConfigError, InputError; ProfileError if the profiler fails.
    """
    recipe = plant.workspace.recipe_path() if options.recipe is None else find_recipe(options.recipe, plant.workspace)
    commit = repository.get_live_commit(plant.workspace.repository)
    code = LiveCode.check_out_commit(plant, commit)
    changed = repository.list_changed_files(plant.workspace.repository)
    if changed:
        plant.progress.line(
            Message(
                "code_loop.not_committed",
                "  the live code does not contain these uncommitted changes: {files}",
                files=list(changed[:5]),
            )
        )
    folder = plant.workspace.reports / "profiles" / f"{commit[:12]}-{time.time_ns()}"
    folder.mkdir(parents=True)
    given = plant.workspace.root / "cache" / "profiled"
    given.mkdir(parents=True, exist_ok=True)
    arguments = [*_as_trained(plant, recipe, code.folder, given), "--out", str(folder)]
    try:
        run_profiler(code, [*arguments, *options.to_arguments()], plant.progress, writable=[folder], readonly=[given])
        remove_links_and_pipes(folder, plant.progress)
        found = read_json_object(folder / "profile.json")
    except BaseException:
        remove_path(folder)
        raise
    summary = {key: value for key, value in found.items() if isinstance(value, (str, int, float, bool))}
    path = plant.ledger.to_stored_path(folder / "profile.json")
    with plant.ledger.begin() as tx:
        number = insert_row(tx, profiles, code_commit=commit, path=path, summary=summary, created_at=time.time())
        record_event(tx, "profiled", Subject("profile", number), {"commit": commit})
    plant.print_line(find_offered_targets(plant, number)[1])
    return number


def _as_trained(plant: Plant, path: Path, code: Path, folder: Path) -> list[str]:
    """Return the profiler's arguments for a recipe, with the precision and kernels that a segment would have if it were planned now, and with
    the best rates that are known of this machine."""
    from trainer.contract.errors import RecipeError
    from trainer.contract.recipe import Recipe

    try:
        recipe = Recipe.load(path)
    except RecipeError as error:
        raise InputError(error.message) from None
    last = find_last_finished_segment(plant.ledger, "trunk")
    before = last.recipe_json["precision"] if last and last.recipe == recipe.name else ""
    kernels = (code / "policies" / "kernels.yaml").read_text("utf-8")
    recipe, computed, _ = compute_settings.choose_compute_settings(plant.workspace, recipe, kernels, before)
    given = folder / "recipe.yaml"
    given.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    rates = find_best_rates(plant.ledger, str(describe_this_machine()), recipe.precision)
    return [
        *("--recipe", str(given)),
        *("--kernels", str(compute_settings.write_kernels_file(folder, computed))),
        *(["--rates", *map(repr, rates)] if rates else []),
    ]


def profile_checkout(out: Path, progress: Progress, options: ProfileOptions = ProfileOptions()) -> Path:
    """Profile this checkout without a workspace, and return the path of profile.json.

    Raises: InputError for an unknown recipe or a folder that cannot be written; ProfileError.
    """
    recipe = find_recipe(options.recipe or "demo", None)
    _run_checkout(out, ["--recipe", str(recipe), *options.to_arguments()], progress)
    return out / "profile.json"


def _run_checkout(out: Path, arguments: list[str], progress: Progress, module: str = "agents.line_profiler") -> None:
    """Profile this checkout into ``out``. Raises: InputError if the folder cannot be made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            "code_loop.no_out",
            "--out {folder}: the folder cannot be made: {problem}",
            folder=str(out),
            problem=error.strerror,
        ) from None
    code = find_checkout_root()
    own = ["--kernels", str(code / "policies" / "kernels.yaml"), "--out", str(out.resolve())]
    run_profiler(LiveCode(code, None, False), [*own, *arguments], progress, module=module)


@dataclass(frozen=True)
class SweepOptions:
    """The flags of ``python -m agents.line_profiler.sweep.sweep``. None stands for a flag's default."""

    models: str | None = None
    batches: str | None = None
    sequences: str | None = None
    workers: int | None = None
    ray: str | None = None
    budget_s: float | None = None

    def to_arguments(self) -> list[str]:
        given = {"--models": self.models, "--batches": self.batches, "--sequences": self.sequences}
        given |= {"--workers": self.workers, "--ray": self.ray, "--budget": self.budget_s}  # type: ignore[dict-item]
        return [word for flag, value in given.items() if value is not None for word in (flag, str(value))]


def profile_model_shapes(out: Path, progress: Progress, options: SweepOptions) -> Path:
    """Profile layers of large model shapes with this checkout's code, and return the path of sweep.json. Raises: InputError, ProfileError."""
    _run_checkout(out, options.to_arguments(), progress, "agents.line_profiler.sweep.sweep")
    return out / "sweep.json"


def run_profiler(
    code: LiveCode,
    arguments: list[str],
    progress: Progress,
    writable: Sequence[Path] = (),
    readonly: Sequence[Path] = (),
    module: str = "agents.line_profiler",
) -> None:
    """Run ``python -m module arguments`` from ``code``, and show its progress. Raises: InputError, ProfileError."""
    command = [sys.executable, "-m", module, "--json", *arguments]
    last_lines: list[str] = []
    with (
        progress.task(Message("code_loop.profiling", "profiling the training step")) as task,
        tempfile.TemporaryFile() as output,
    ):
        process = code.start(
            command,
            writable=writable, readonly=readonly, environment=devices.make_device_environment(), stdout=output, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            for line in process.read_error_lines():
                if line.startswith(PROGRESS):
                    task.advance(1, line.removeprefix(PROGRESS).strip())
                elif line.strip():
                    last_lines = [*last_lines[-20:], line.strip()]
            exit_code = process.wait()
        finally:
            process.kill()
    if exit_code and process.exceeded_limit:
        last_lines = [process.exceeded_limit]
    if exit_code == USER_ERROR:
        raise InputError("code_loop.profiler_refused", "{line}", line=" ".join(last_lines[-1:])[:500])
    if exit_code:
        raise ProfileError(
            "code_loop.profiler_failed",
            "The line profiler ended with exit code {exit_code}: {line}",
            exit_code=exit_code,
            line=" ".join(last_lines[-1:])[:500],
        )


def find_recipe(name: str, workspace: Workspace | None) -> Path:
    """Return the file of a recipe, given its path, or its name in the workspace or the checkout. Raises: InputError that names the nearest recipe."""
    given = Path(name)
    if given.is_file():
        return given.resolve()
    folders = [
        root / "policies" / "recipes" for root in ([workspace.root] if workspace else []) + [find_checkout_root()]
    ]
    for folder in folders:
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    known = {path.stem for folder in folders for path in folder.glob("*.yaml")}
    raise InputError(
        "code_loop.no_recipe", "No recipe or file is named {name!r}{near}", name=name, near=suggest_name(name, known)
    )
