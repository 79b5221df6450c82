"""The checks of ``factory check``: they examine this machine and a workspace. A failed check says what is wrong and what to do."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from factory.core import devices
from factory.core.errors import ConfigError, FactoryError
from factory.core.faults import find_fault_in
from factory.core.progress import SILENT, Progress
from factory.core.workspace import Workspace, find_checkout_root
from factory.ledger.plant import Plant
from kernels.contract.message import Message

SHOWN = 10  # at most this many faults of a kind are shown

CheckResult = tuple[bool | None, str | list[str]]  # (ok, line or lines)


def run_checks(workspace: Workspace | None, deep: bool = False, progress: Progress = SILENT) -> list[dict[str, Any]]:
    """Run all checks. Returns one row for each: ``check``, ``ok`` (None: for information only), ``detail`` and ``messages``. No check changes
    anything.

    ``detail`` is the text, and ``messages`` are those of its lines that have a code. ``deep`` hashes all files of the workspace, not a sample.
    """
    measured = cache(lambda: _measured(workspace))  # the measurement takes seconds
    checks: list[tuple[str, Callable[[], CheckResult]]] = [
        ("python", lambda: (sys.version_info >= (3, 11), f"{platform.python_version()} at {sys.executable}")),
        ("machine", _machine),
        ("compiler", _compiler),
        ("torch", _torch),
        ("precision", lambda: _precision(*measured())),
        ("kernels", lambda: _kernels(workspace, *measured())),
        ("sandbox", _sandbox),
        ("llm endpoint", lambda: _endpoint(workspace)),
    ]
    if workspace:
        from factory.repairs.workspace_examination import CHECKS

        of_workspace = {
            "workspace": _workspace, "ranks": _ranks, "training": _training, "repository": _repository, "policies": _policies,
            "ledger": _ledger, "backups": _backups, "releasable": _releasable,
        }  # fmt: skip
        checks += [(name, partial(check, workspace)) for name, check in of_workspace.items()]
        checks += [(kind, partial(_work, workspace, kind, deep, progress)) for kind in (*CHECKS, "mlflow")]
    rows = []
    for name, check in checks:
        try:
            ok, found = check()
        except Exception as error:
            fault = None if isinstance(error, FactoryError) else find_fault_in(error)
            if fault is None and not isinstance(
                error, FactoryError | OSError | ValueError | ImportError | RuntimeError
            ):
                raise
            said = getattr(error, "message", str(error))
            if fault:
                said = Message("machine_check.fault", "{fault}: {remedy}", fault=fault.description, remedy=fault.remedy)
            ok, found = False, [said]
        lines = [found] if isinstance(found, str) else found
        coded = [line for line in lines if isinstance(line, Message)]
        rows.append({"check": name, "ok": ok, "detail": "\n".join(lines), "messages": coded})
    return rows


def _machine() -> CheckResult:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return memory >= 3.5, f"{cores} cores, {memory:.1f} GiB, {platform.system()} {platform.release()}"


def _releasable(workspace: Workspace) -> CheckResult:
    """Check whether models trained on the ingested data could be released."""
    from factory.ledger.ledger import Ledger
    from factory.releasable.report import format_report, format_summary, make_report

    lines = make_report(Plant(workspace, Ledger.open(workspace.ledger_url, workspace.root)))
    if not lines:
        return None, "no data yet"
    # Missing data or a missing decision is not a fault of the workspace, so ok is not False.
    return (None if any(line.ok is False for line in lines) else True), [format_summary(lines), *format_report(lines)]


def _compiler() -> CheckResult:
    found = next((path for name in ("g++", "clang++") if (path := shutil.which(name))), None)
    missing = Message(
        "machine_check.no_compiler", "There is no C++ compiler. torch.compile on the CPU needs one. Install g++."
    )
    return bool(found), found or missing


def _torch() -> CheckResult:
    import torch

    if torch.cuda.is_available():
        gpus = [_gpu(number) for number in range(torch.cuda.device_count())]
        return True, [f"{torch.__version__}, CUDA {torch.version.cuda}, {len(gpus)} GPUs", *gpus]
    return True, Message(
        "machine_check.no_gpu",
        "PyTorch {version} finds no GPU, so training uses {threads:,|CPU thread|CPU threads}",
        version=torch.__version__,
        threads=torch.get_num_threads(),
    )


def _gpu(number: int) -> str:
    """Describe one GPU: its name, the peak rate of its data sheet, and the rates that matrix products and copies reach now."""
    import torch

    from trainer.contract.plan.precision import DTYPES, list_supported_precisions
    from trainer.contract.plan.rates import look_up_data_sheet_flops, measure_matmul_rate, measure_memory_rate

    device = torch.device("cuda", number)
    facts = torch.cuda.get_device_properties(device)
    name = list_supported_precisions(device)[-1]
    peak = look_up_data_sheet_flops(device, DTYPES[name])
    return Message(
        "machine_check.gpu",
        "GPU {number} is {name} with capability {capability} and {memory:.0f} GiB. In {precision}, matrix products reached "
        "{products:.0f} TFLOP/s (the data sheet's peak: {peak}). Copies reached {copies:.2f} TB/s",
        number=number,
        name=facts.name,
        capability=f"{facts.major}.{facts.minor}",
        memory=facts.total_memory / 2**30,
        precision=name,
        peak=f"{peak / 1e12:.0f} TFLOP/s" if peak else "unknown (so no MFU)",
        products=measure_matmul_rate(device, DTYPES[name]) / 1e12,
        copies=measure_memory_rate(device) / 1e12,
    )


def _measured(workspace: Workspace | None) -> tuple[Any, dict[str, Any]]:
    """Return (the recipe, the result of a measurement that finds the fastest precision on this machine)."""
    from factory.computing.compute_settings import measure_precision
    from factory.training.planning import load_recipe
    from trainer.contract.recipe import Recipe

    shipped = find_checkout_root() / "policies" / "recipes" / "demo.yaml"
    recipe = load_recipe(workspace) if workspace else Recipe.load(shipped)
    return recipe, measure_precision(recipe)


def _precision(recipe: Any, found: dict[str, Any]) -> CheckResult:
    """Check whether the recipe would train in about the fastest precision of this machine."""
    from kernels.contract.machine import describe_this_machine
    from trainer.contract.plan.precision import WARN

    seconds, rates = found["probe"]["seconds"], found["probe"]["rates"]
    lines: list[str] = [
        Message(
            "machine_check.precision",
            "this machine is {machine}. The recipe {recipe} asks for the precision {asked}. On this machine, training uses "
            "the precision {precision}",
            machine=str(describe_this_machine()),
            recipe=recipe.name,
            asked=found["asked"],
            precision=found["precision"],
        )
    ]
    each = " of one thread" if describe_this_machine().threads else ""
    for name, value in seconds.items():
        lines.append(
            Message(
                "machine_check.step_time",
                "in {precision}, the measured parts of a training step take {milliseconds:.0f} ms together. The "
                "GFLOP/s{each} in each part: {rates}",
                precision=name,
                milliseconds=value * 1e3,
                each=each,
                rates=[f"{part} {rate / 1e9:.3g}" for part, rate in rates[name].items()],
            )
        )
    slow = seconds[found["precision"]] > WARN * min(seconds.values())
    return not slow, [*lines, *([found["warning"]] if found["warning"] else [])]


def _kernels(workspace: Workspace | None, recipe: Any, measured: dict[str, Any]) -> CheckResult:
    """List the kernel that computes each op of the recipe's step on this machine. Ops whose kernel is not the chosen one come first."""
    from factory.computing.tuned_kernels import KERNELS, open_live_kernels_file

    if workspace is None:
        return _computing(None, find_checkout_root() / KERNELS, recipe, measured)
    with open_live_kernels_file(workspace) as (path, _):
        ok, lines = _computing(workspace, path, recipe, measured)
        return ok, [line.replace(str(path), str(workspace.repository / KERNELS)) for line in lines]


def _computing(
    workspace: Workspace | None, path: Path, recipe: Any, measured: dict[str, Any]
) -> tuple[bool | None, list[str]]:
    from factory.computing.compute_settings import choose_compute_settings
    from kernels.contract.bench import BenchSetting
    from kernels.contract.precision import DTYPES
    from kernels.contract.registry import OPS, KernelError, find_implementations_in_use, load_choice, load_fallback

    device = devices.get_device_kind()
    notes: list[str] = []
    try:
        choice = load_choice(path, device)  # raises an error that names the wrong key
        if workspace:
            _, decided, notes = choose_compute_settings(workspace, recipe, path.read_text("utf-8"), measured=measured)
            choice = decided["kernels"]
        fallback = load_fallback(path)
        setting = BenchSetting.from_recipe_mapping(recipe.model_dump() | {"precision": measured["precision"]})
        found = find_implementations_in_use(
            choice, device, DTYPES[setting.precision], setting.compile, fallback, setting.shape
        )
    except KernelError as error:
        return False, [str(error)]
    found.sort(key=lambda kernel: kernel.by == kernel.chosen)
    lines = [f"{kernel} (there are: {', '.join(OPS[kernel.op].implementations)})" for kernel in found]
    head = Message(
        "machine_check.kernels",
        "for the recipe {recipe}, a training step in {precision} on {device} uses these kernels ('fallback' in kernels.yaml is "
        "{fallback}):",
        recipe=recipe.name,
        precision=setting.precision,
        device=device,
        fallback=fallback,
    )
    return all(kernel.by for kernel in found), [head, *notes, *lines]


def _sandbox() -> CheckResult:
    from factory.sandbox.sandbox import describe_sandbox

    facts = describe_sandbox()
    return not facts["isolation"].startswith("none"), "; ".join(f"{key}: {value}" for key, value in facts.items())


def _endpoint(workspace: Workspace | None) -> CheckResult:
    from factory.code_loop.agent_runs import AgentOptions, choose_endpoint
    from factory.git.scope import AgentsPolicy

    path = workspace.policy_path("agents.yaml") if workspace else find_checkout_root() / "policies" / "agents.yaml"
    policy = AgentsPolicy.load(path).llm
    where = choose_endpoint(policy, AgentOptions())
    if not where:
        return None, Message(
            "machine_check.no_endpoint",
            "No endpoint is set, so only the search proposer works. Set llm.endpoint in agents.yaml, or OPENAI_BASE_URL.",
        )
    key = "set" if os.environ.get("OPENAI_API_KEY") else "not set"
    return None, Message(
        "machine_check.endpoint",
        "the endpoint is {endpoint}, the model is {model}, and OPENAI_API_KEY is {key}",
        endpoint=where,
        model=policy.model or "not named (llm.model)",
        key=key,
    )


def _workspace(workspace: Workspace) -> CheckResult:
    from factory.retention.policy import RetentionPolicy

    room = shutil.disk_usage(workspace.root)
    try:
        floor = RetentionPolicy.load(workspace.policy_path("retention.yaml")).compute_free_space_floor(room.total)
    except ConfigError as error:
        return False, error.message
    if room.free >= floor:
        return True, Message(
            "machine_check.disk", "{folder} has {free:.1f} GB free", folder=workspace.root, free=room.free / 1e9
        )
    return False, Message(
        "machine_check.disk_low",
        "{folder} has {free:.1f} GB free. Below {floor:.1f} GB, training waits (floor_bytes, floor_share in policies/retention.yaml).",
        folder=workspace.root,
        free=room.free / 1e9,
        floor=floor / 1e9,
    )


def _ranks(workspace: Workspace) -> CheckResult:
    from factory.core.launching import build_launcher_command, count_ranks

    count = count_ranks(workspace)
    return (
        True,
        f"{count}, started by: {' '.join(build_launcher_command(workspace))} -m trainer"
        if count > 1
        else "1: one process",
    )


def _training(workspace: Workspace) -> CheckResult:
    """Check whether the live code trains in the sandbox, and list what it can access there."""
    from factory.ledger.ledger import Ledger
    from factory.runs.live_code import decide_live_code_isolation

    isolated, why = decide_live_code_isolation(Plant(workspace, Ledger.open(workspace.ledger_url, workspace.root)))
    if not isolated:
        return False, Message(
            "machine_check.no_sandbox",
            "The live code trains WITHOUT the sandbox: {reason}. It can use the network and all files of this user.",
            reason=why,
        )
    return True, Message(
        "machine_check.sandboxed",
        "The live code trains in the sandbox. It can read its own code, the token shards and one checkpoint. "
        "It can write its segment's folder and its commit's compile cache. It can use these devices: {devices}. "
        "Its ranks communicate over a private loopback interface. It cannot access the network, the home folder, the ledger or other processes.",
        devices=", ".join(devices.list_gpu_device_files(all_gpus=True)) or "no GPU",
    )


def _repository(workspace: Workspace) -> CheckResult:
    from factory.git.repository import get_live_commit

    return True, f"{workspace.repository} at {get_live_commit(workspace.repository)[:12]}"


def _policies(workspace: Workspace) -> CheckResult:
    from factory.gates.release.policy import ReleasePolicy
    from factory.ingest.rules.policy import DataPolicy
    from factory.training.planning import load_recipe

    recipe = load_recipe(workspace)
    DataPolicy.load(workspace.policy_path("data.yaml"))
    release = ReleasePolicy.load(workspace.policy_path("gates/release.yaml"))
    return True, Message(
        "machine_check.policies",
        "the recipe {recipe}, data.yaml and gates/release.yaml are valid. Releases get {approval} approval",
        recipe=recipe.name,
        approval=release.approval,
    )


def _ledger(workspace: Workspace) -> CheckResult:
    from factory.ledger.ledger import Ledger, metadata, sa
    from factory.repairs.workspace_examination import find_damaged_databases

    if fault := next((fault for fault in find_damaged_databases(workspace) if fault.kind == "ledger"), None):
        return False, f"{fault.problem}; {fault.remedy}"
    ledger = Ledger.open(workspace.ledger_url, workspace.root)
    names = ("shards", "documents", "segments", "candidates", "releases", "proposals")
    count = lambda name: ledger.select_rows(sa.select(sa.func.count().label("n")).select_from(metadata.tables[name]))[
        0
    ]["n"]
    return True, ", ".join(f"{count(name)} {name}" for name in names)


def _backups(workspace: Workspace) -> CheckResult:
    from factory.backups.backups import DAY_SECONDS, LEDGER, POSTGRESQL_ADVICE, find_database_damage, read_backup_info
    from factory.ledger.engine import get_sqlite_file
    from factory.ledger.journal import NAME, describe_journal_damage, list_backup_folders, list_backups

    if get_sqlite_file(workspace.ledger_url) is None:
        return None, POSTGRESQL_ADVICE
    backups = list_backups(workspace.root)
    unread = [path for path in list_backup_folders(workspace.root) if path not in backups]
    bad_backup = lambda path: Message(
        "machine_check.bad_backup", "{folder} is not a usable backup: its backup.json cannot be read", folder=path
    )
    faults: list[str] = [bad_backup(path) for path in unread]
    if backups:
        fault = find_database_damage(backups[-1] / LEDGER)
        faults += [f"{backups[-1] / LEDGER} is damaged: {fault}"] if fault else []
        faults += [damage for damage in (describe_journal_damage(backups[-1] / NAME),) if damage]
    if faults:
        return False, Message(
            "machine_check.damaged_backups",
            "{faults}. Make a new backup with 'factory backup', then remove the damaged files",
            faults="; ".join(faults),
        )
    if not backups:
        return False, Message(
            "machine_check.no_backup",
            "There is no backup. 'factory run' makes one each day. To make a backup now: 'factory backup'",
        )
    hours = (time.time() - read_backup_info(backups[-1])["made_at"]) / 3600
    return hours < 2 * DAY_SECONDS / 3600, Message(
        "machine_check.backups",
        "{backups:,|backup exists|backups exist}. The newest, {newest}, is {hours:.1f} hours old",
        backups=len(backups),
        newest=backups[-1].name,
        hours=hours,
    )


def _work(workspace: Workspace, kind: str, deep: bool, progress: Progress) -> CheckResult:
    """Check all files of one kind that the ledger names, and list their faults."""
    from factory.ledger.ledger import Ledger
    from factory.repairs.workspace_examination import CHECKS, find_damaged_databases

    if kind == "mlflow":
        faults = [fault for fault in find_damaged_databases(workspace) if fault.kind == kind]
        said = workspace.mlflow_uri
    else:
        found = CHECKS[kind](Plant(workspace, Ledger.open(workspace.ledger_url, workspace.root), progress), deep)
        faults = found.faults
        said = Message(
            "machine_check.sound",
            "{count:,|entry is|entries are} in the ledger and on disk. The factory checked the hashes of "
            "{hashed:,|entry|entries}",
            count=found.count,
            hashed=found.hashed,
        )
        said = "none" if kind == "orphans" else said
    lines: list[str] = [
        Message("machine_check.damaged", "{what}: {remedy}", what=fault.problem, remedy=fault.remedy)
        for fault in faults[:SHOWN]
    ]
    if len(faults) > SHOWN:
        lines.append(
            Message("machine_check.more_faults", "and {faults:,|more fault|more faults}", faults=len(faults) - SHOWN)
        )
    return not faults, lines or said
