"""``factory check``: what this machine offers, what is in force, what is missing and what to do about it."""

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
from factory.core.faults import fault_of
from factory.core.progress import SILENT, Progress
from factory.core.workspace import Workspace, code_root
from factory.ledger.plant import Plant

SHOWN = 10  # faults of a kind


def examine(workspace: Workspace | None, deep: bool = False, progress: Progress = SILENT) -> list[dict[str, Any]]:
    """One row a check: ``{"check", "ok", "detail"}``; ``ok`` None: for information only. No check changes anything.

    ``deep``: all of the workspace's work is hashed, not a sample of it.
    """
    measured = cache(lambda: _measured(workspace))  # for seconds
    checks: list[tuple[str, Callable[[], tuple[bool | None, str]]]] = [
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
        from factory.repairs.examining import CHECKS

        of_workspace = {
            "workspace": _workspace, "ranks": _ranks, "training": _training, "repository": _repository, "policies": _policies,
            "ledger": _ledger, "backups": _backups, "releasable": _releasable,
        }  # fmt: skip
        checks += [(name, partial(check, workspace)) for name, check in of_workspace.items()]
        checks += [(kind, partial(_work, workspace, kind, deep, progress)) for kind in (*CHECKS, "mlflow")]
    rows = []
    for name, check in checks:
        try:
            ok, detail = check()
        except Exception as error:
            fault = None if isinstance(error, FactoryError) else fault_of(error)
            if fault is None and not isinstance(
                error, FactoryError | OSError | ValueError | ImportError | RuntimeError
            ):
                raise
            ok, detail = False, f"{fault.says}: {fault.do}" if fault else str(error)
        rows.append({"check": name, "ok": ok, "detail": detail})
    return rows


def _machine() -> tuple[bool | None, str]:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return memory >= 3.5, f"{cores} cores, {memory:.1f} GiB, {platform.system()} {platform.release()}"


def _releasable(workspace: Workspace) -> tuple[bool | None, str]:
    """Could what is ingested be released?"""
    from factory.ledger.ledger import Ledger
    from factory.releasable.gathering import describe, look, verdict

    lines = look(Plant(workspace, Ledger.open(workspace.ledger_url, workspace.root)))
    if not lines:
        return None, "no data yet"
    # What is missing is data, or a word of a person's: nothing is wrong with the workspace.
    return (None if any(line.ok is False for line in lines) else True), "\n".join([verdict(lines), *describe(lines)])


def _compiler() -> tuple[bool | None, str]:
    found = next((path for name in ("g++", "clang++") if (path := shutil.which(name))), None)
    return bool(found), found or "no C++ compiler: install g++ (torch.compile on CPU needs it)"


def _torch() -> tuple[bool | None, str]:
    import torch

    if torch.cuda.is_available():
        gpus = [_gpu(number) for number in range(torch.cuda.device_count())]
        return True, "\n".join([f"{torch.__version__}, CUDA {torch.version.cuda}, {len(gpus)} GPUs", *gpus])
    return True, f"{torch.__version__}, no GPU: training on {torch.get_num_threads()} CPU threads"


def _gpu(number: int) -> str:
    """One GPU: what it is, its data sheet's peak, and what products and copies reach now."""
    import torch

    from trainer.contract.plan.precision import DTYPES, precisions
    from trainer.contract.plan.rates import data_sheet_peak, matmul_rate, memory_rate

    device = torch.device("cuda", number)
    facts = torch.cuda.get_device_properties(device)
    name = precisions(device)[-1]
    peak = data_sheet_peak(device, DTYPES[name])
    sheet = f"data sheet {peak / 1e12:.0f} TFLOP/s" if peak else "data sheet not known: no MFU"
    return (
        f"GPU {number}: {facts.name}, capability {facts.major}.{facts.minor}, {facts.total_memory / 2**30:.0f} GiB; {name}: {sheet}, "
        f"products reach {matmul_rate(device, DTYPES[name]) / 1e12:.0f} TFLOP/s now; copies {memory_rate(device) / 1e12:.2f} TB/s"
    )


def _measured(workspace: Workspace | None) -> tuple[Any, dict[str, Any]]:
    """(the recipe, what trains fastest here, measured now)."""
    from factory.computing.computing import measured_precision
    from factory.training.planning import load_recipe
    from trainer.contract.recipe import Recipe

    shipped = code_root() / "policies" / "recipes" / "demo.yaml"
    recipe = load_recipe(workspace) if workspace else Recipe.load(shipped)
    return recipe, measured_precision(recipe)


def _precision(recipe: Any, found: dict[str, Any]) -> tuple[bool | None, str]:
    """What trains fastest here, and what the recipe would train in."""
    from kernels.contract.machine import here
    from trainer.contract.plan.precision import WARN

    seconds, rates = found["probe"]["seconds"], found["probe"]["rates"]
    lines = [f"{here()}; recipe {recipe.name} has precision {found['asked']}: it trains in {found['precision']}"]
    each = " of one thread" if here().threads else ""
    for name, value in seconds.items():
        parts = ", ".join(f"{part} {rate / 1e9:.3g}" for part, rate in rates[name].items())
        lines.append(f"{name}: {value * 1e3:.0f} ms a step for these parts; GFLOP/s{each}: {parts}")
    slow = seconds[found["precision"]] > WARN * min(seconds.values())
    return not slow, "\n".join([*lines, *([found["warning"]] if found["warning"] else [])])


def _kernels(workspace: Workspace | None, recipe: Any, measured: dict[str, Any]) -> tuple[bool | None, str]:
    """What computes each op of the recipe's step here: a line each, those first that are not as chosen."""
    from factory.computing.tuned_kernels import KERNELS, live_kernels

    if workspace is None:
        return _computing(None, code_root() / KERNELS, recipe, measured)
    with live_kernels(workspace) as (path, _):
        ok, said = _computing(workspace, path, recipe, measured)
        return ok, said.replace(str(path), str(workspace.repository / KERNELS))


def _computing(
    workspace: Workspace | None, path: Path, recipe: Any, measured: dict[str, Any]
) -> tuple[bool | None, str]:
    from factory.computing.computing import decide
    from kernels.contract.bench import Setting
    from kernels.contract.precision import DTYPES
    from kernels.contract.registry import OPS, KernelError, computing, load_choice, load_fallback

    device = devices.kind()
    notes: list[str] = []
    try:
        choice = load_choice(path, device)  # says what is wrong with it, by key
        if workspace:
            _, decided, notes = decide(workspace, recipe, path.read_text("utf-8"), measured=measured)
            choice = decided["kernels"]
        fallback = load_fallback(path)
        setting = Setting.of_mapping(recipe.model_dump() | {"precision": measured["precision"]})
        found = computing(choice, device, DTYPES[setting.precision], setting.compile, fallback, setting.shape)
    except KernelError as error:
        return False, str(error)
    found.sort(key=lambda kernel: kernel.by == kernel.chosen)
    lines = [f"{kernel} (there are: {', '.join(OPS[kernel.op].implementations)})" for kernel in found]
    head = f"recipe {recipe.name} in {setting.precision} on {device}; fallback: {fallback}"
    return all(kernel.by for kernel in found), "\n".join((head, *notes, *lines))


def _sandbox() -> tuple[bool | None, str]:
    from factory.sandbox.sandbox import describe

    facts = describe()
    return not facts["isolation"].startswith("none"), "; ".join(f"{key}: {value}" for key, value in facts.items())


def _endpoint(workspace: Workspace | None) -> tuple[bool | None, str]:
    from factory.code_loop.agent_runs import AgentOptions, endpoint_of
    from factory.git.scope import AgentsPolicy

    path = workspace.policy("agents.yaml") if workspace else code_root() / "policies" / "agents.yaml"
    policy = AgentsPolicy.load(path).llm
    where = endpoint_of(policy, AgentOptions())
    if not where:
        return None, "none set (llm.endpoint in agents.yaml, OPENAI_BASE_URL): the search proposer works without one"
    key = "set" if os.environ.get("OPENAI_API_KEY") else "not set"
    return None, f"{where}, model {policy.model or 'not named (llm.model)'}, OPENAI_API_KEY {key}"


def _workspace(workspace: Workspace) -> tuple[bool | None, str]:
    from factory.retention.policy import RetentionPolicy

    room = shutil.disk_usage(workspace.root)
    try:
        floor = RetentionPolicy.load(workspace.policy("retention.yaml")).floor(room.total)
    except ConfigError as error:
        return False, str(error)
    said = f"{workspace.root}, {room.free / 1e9:.1f} GB free"
    few = f": less than the {floor / 1e9:.1f} GB (floor_bytes, floor_share in policies/retention.yaml) below which training waits"
    return room.free >= floor, said if room.free >= floor else said + few


def _ranks(workspace: Workspace) -> tuple[bool | None, str]:
    from factory.core.launching import launcher, ranks

    count = ranks(workspace)
    return True, f"{count}, started by: {' '.join(launcher(workspace))} -m trainer" if count > 1 else "1: one process"


def _training(workspace: Workspace) -> tuple[bool | None, str]:
    """Whether live code runs in the sandbox, and what it reaches."""
    from factory.ledger.ledger import Ledger
    from factory.runs.live_code import isolation

    isolated, why = isolation(Plant(workspace, Ledger.open(workspace.ledger_url, workspace.root)))
    if not isolated:
        return False, f"NOT in the sandbox: {why}. Live code may use the network and all files of this user"
    gpus = ", ".join(devices.nodes(every=True)) or "no GPU"
    return True, (
        "in the sandbox: it reads its own code, token shards and one checkpoint, and writes its segment's folder and its commit's compile "
        f"cache; {gpus}; ranks meet on a loopback of their own; no network, no home, no ledger, no other process"
    )


def _repository(workspace: Workspace) -> tuple[bool | None, str]:
    from factory.git.repository import live_commit

    return True, f"{workspace.repository} at {live_commit(workspace.repository)[:12]}"


def _policies(workspace: Workspace) -> tuple[bool | None, str]:
    from factory.gates.release.policy import ReleasePolicy
    from factory.ingest.rules.policy import DataPolicy
    from factory.training.planning import load_recipe

    recipe = load_recipe(workspace)
    DataPolicy.load(workspace.policy("data.yaml"))
    release = ReleasePolicy.load(workspace.policy("gates/release.yaml"))
    return True, f"recipe {recipe.name}, data.yaml, gates/release.yaml (approval: {release.approval})"


def _ledger(workspace: Workspace) -> tuple[bool | None, str]:
    from factory.ledger.ledger import Ledger, metadata, sa
    from factory.repairs.examining import database_faults

    if fault := next((fault for fault in database_faults(workspace) if fault.kind == "ledger"), None):
        return False, f"{fault.what}; {fault.remedy}"
    ledger = Ledger.open(workspace.ledger_url, workspace.root)
    names = ("shards", "documents", "segments", "candidates", "releases", "proposals")
    count = lambda name: ledger.rows(sa.select(sa.func.count().label("n")).select_from(metadata.tables[name]))[0]["n"]
    return True, ", ".join(f"{count(name)} {name}" for name in names)


def _backups(workspace: Workspace) -> tuple[bool | None, str]:
    from factory.backups.backups import DAY_SECONDS, LEDGER, PG_DUMP, about, database_damage
    from factory.ledger.engine import sqlite_file
    from factory.ledger.journal import NAME, backups_of, damage_of, folders_of

    if sqlite_file(workspace.ledger_url) is None:
        return None, PG_DUMP
    backups = backups_of(workspace.root)
    unread = [path for path in folders_of(workspace.root) if path not in backups]
    faults = [f"{path} is no backup any more: its backup.json cannot be read" for path in unread]
    if backups:
        fault = database_damage(backups[-1] / LEDGER)
        faults += [f"{backups[-1] / LEDGER} is damaged: {fault}"] if fault else []
        faults += [damage for damage in (damage_of(backups[-1] / NAME),) if damage]
    if faults:
        return False, "; ".join(faults) + ": 'factory backup' makes a new one; then remove what is damaged"
    if not backups:
        return False, "none: 'factory backup' makes one, 'factory run' one a day"
    hours = (time.time() - about(backups[-1])["made_at"]) / 3600
    return hours < 2 * DAY_SECONDS / 3600, f"{len(backups)}, the newest {backups[-1].name}, {hours:.1f} hours old"


def _work(workspace: Workspace, kind: str, deep: bool, progress: Progress) -> tuple[bool | None, str]:
    """All of one kind that the ledger names, against what is there."""
    from factory.ledger.ledger import Ledger
    from factory.repairs.examining import CHECKS, database_faults

    if kind == "mlflow":
        faults = [fault for fault in database_faults(workspace) if fault.kind == kind]
        said = f"{workspace.mlflow_uri}"
    else:
        found = CHECKS[kind](Plant(workspace, Ledger.open(workspace.ledger_url, workspace.root), progress), deep)
        faults, said = found.faults, f"{found.count} there, {found.hashed} of them hashed"
        said = "none" if kind == "orphans" else said
    lines = [f"{fault.what}: {fault.remedy}" for fault in faults[:SHOWN]]
    more = [f"and {len(faults) - SHOWN} more ('--json' lists every one)"] if len(faults) > SHOWN else []
    return not faults, "\n".join([*lines, *more]) or said
