"""``factory upgrade``: what a workspace of an older factory lacks is added, each time after a backup below ``backups/``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory

from factory.backups.backups import back_up_daily, copy_database, stamp
from factory.core.errors import ConfigError, WorkspaceError
from factory.core.workspace import Workspace, code_root, load_yaml
from factory.git.scope import AgentsPolicy
from factory.ledger.engine import sqlite_file
from factory.ledger.journal import BACKUPS, watch
from factory.ledger.ledger import Ledger, meta, metadata
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.ledger.version import SCHEMA, refuse_other_version
from factory.training.segment_folder import mark_owner
from kernels.contract.files import put_in_place, write_atomically
from kernels.contract.strict_yaml import read_yaml
from trainer.contract.strict import parse

# Brings an older ledger to this factory's schema: a backup, then alembic's revisions, in one transaction.
MIGRATIONS = Path(__file__).parent / "migrations"


def upgrade_ledger(workspace: Workspace, has_backup: bool) -> list[str]:
    """Upgrade the workspace's ledger; returns what was done, a line each; empty when it is up to date.

    Killed at any moment, the ledger is as before or upgraded. ``has_backup``: a person has one; SQLite gets one here.

    Raises: WorkspaceError for a newer ledger, and for a PostgreSQL ledger without a backup.
    """
    ledger = Ledger(workspace.ledger_url, workspace.root)
    found = ledger.version()
    if found == SCHEMA:
        return []
    if not found or not found.isdigit() or int(found) > int(SCHEMA):
        refuse_other_version(found, f"the ledger of {workspace.root}")
    where = "a person's backup"
    if ledger.file:
        where = str(_backup(workspace, found or ""))
    elif not has_backup:
        raise WorkspaceError(
            f"the ledger at {ledger.engine.url!r} is upgraded from schema {found} to {SCHEMA} in place: make a backup with "
            "pg_dump, then run 'factory upgrade --i-have-a-backup'"
        )
    script = ScriptDirectory(str(MIGRATIONS), version_locations=[str(MIGRATIONS)])
    made = workspace.root / "root"  # where an older factory made the workspace: its ledger names files there
    roots = [str(workspace.root), *([made.read_text().strip()] if made.exists() else [])]
    with ledger.begin() as tx:
        now = (
            tx.execute(meta.select().where(meta.c.key == "schema")).one().value
        )  # another process may have upgraded it
        with Operations.context(MigrationContext.configure(tx, opts={"roots": roots})):
            for step in reversed(list(script.walk_revisions())):
                if int(step.revision) > int(now):
                    step.module.upgrade()
        watch(tx, metadata)
        tx.execute(meta.update().where(meta.c.key == "schema").values(value=SCHEMA))
    return [f"the ledger is of schema {SCHEMA} now (it was {found}; as it was: {where})"]


def backup_folder(workspace: Workspace) -> Path:
    folder = workspace.root / BACKUPS
    folder.mkdir(exist_ok=True)
    return folder


def _backup(workspace: Workspace, version: str) -> Path:
    """A copy of the SQLite ledger, whole or absent, also while others write to it."""
    for left in backup_folder(workspace).glob(
        ".ledger-*.part*"
    ):  # by an upgrade that was killed, SQLite's logs of it too
        left.unlink()
    path = backup_folder(workspace) / f"ledger-{version}-{stamp()}.db"
    aside = path.with_name(f".{path.name}.part")
    source = sqlite_file(workspace.ledger_url)
    assert source is not None
    copy_database(source, aside)
    put_in_place(aside, path)
    return path


# The key with what belongs to it: indented lines, list items, comments and empty lines among them.
OUT_OF_SCOPE = re.compile(r"^out_of_scope:.*\n(?:(?:[ \t]*(?:#.*)?\n)*[ \t]*-.*\n)*", re.MULTILINE)
HELD_OUT_BY, GROUPS = "hold_out_by", {"source": "source", "content": "document"}
OLD_GROUP = re.compile(r"\bhold_out_by:(\s*)([\"']?)(source|content)\2(?![\w-])")
# Files that older factories listed, and that lie in a contract/ folder now.
IN_KERNELS = "__init__ registry choice machine precision tune host_memory op oracle bench"
IN_TRAINER = (
    "__init__ recipe precision strict errors stopping token_shard data_plan data_order document_stream permutation packing spec "
    "export checkpoint region json_lines feasible run_plan sizing plan_report"
)
MOVED = {f"kernels/{name}.py" for name in IN_KERNELS.split()} | {f"trainer/{name}.py" for name in IN_TRAINER.split()}


@dataclass(frozen=True)
class _NewPolicy:
    """A policy to be rewritten."""

    path: Path
    before: str
    after: str
    said: str


def upgrade(workspace: Workspace, has_backup: bool = False) -> list[str]:
    """Bring a workspace up to this factory; returns what was done, a line each. Safe to repeat, and to kill.

    ``has_backup``: a person has one of a PostgreSQL ledger. Raises: WorkspaceError, ConfigError; nothing was changed then.
    """
    with workspace.lock("model-loop"), workspace.lock("code-loop"), workspace.lock("release"):
        policies = [
            _new_scope(workspace),
            _new_groups(workspace),
        ]  # refuse what they cannot read before anything is changed
        done = upgrade_ledger(workspace, has_backup)
        ledger, made = Ledger.open(workspace.ledger_url, workspace.root), workspace.root / "root"
        if done or made.exists():  # older factories wrote that file, and no owner into the folders of segments
            for row in SegmentRow.select(ledger):
                if Path(row.folder).is_dir():
                    mark_owner(ledger, row)
            made.unlink(missing_ok=True)
            back_up_daily(Plant(workspace, ledger))
        if done and not (workspace.root / "policies" / "data.yaml").exists():
            done += _groups_were_sources(ledger)
        return done + [_rewrite(workspace, policy) for policy in policies if policy]


def _new_scope(workspace: Workspace) -> _NewPolicy | None:
    """The workspace's own agents.yaml may list files in ``out_of_scope``, as before there were ``contract/`` folders.

    Nothing that it protects may lose its protection. Raises: ConfigError.
    """
    path = (workspace.root / "policies" / "agents.yaml").resolve()
    found = load_yaml(path) if path.exists() else None
    policy: dict[str, Any] = found if isinstance(found, dict) else {}
    listed = policy.get("out_of_scope")
    if not isinstance(listed, list) or all(str(name).endswith("/**") for name in listed):
        return None
    names = list(map(str, listed))
    folders = AgentsPolicy.load(code_root() / "policies" / "agents.yaml").out_of_scope
    own = [name if name.endswith("/**") else f"{name.rstrip('/')}/**" for name in names if _is_folder(workspace, name)]
    folders += [name for name in dict.fromkeys(own) if name not in folders]
    before = path.read_text(encoding="utf-8")
    after, count = OUT_OF_SCOPE.subn("out_of_scope:\n" + "".join(f'  - "{folder}"\n' for folder in folders), before)
    if count != 1 or read_yaml(after, str(path), ConfigError) != policy | {"out_of_scope": folders}:
        raise ConfigError(
            f"{path}: 'factory upgrade' cannot edit out_of_scope as it is written there: replace its value by {folders}"
        )
    upgraded = parse(AgentsPolicy, policy | {"out_of_scope": folders}, str(path), ConfigError)
    lost = [
        name for name in names if name not in MOVED and f"{name.rstrip('/')}/**" not in folders and name not in folders
    ]
    lost = [name for name in lost if not upgraded.protected(name)]
    if lost:
        raise ConfigError(
            f"{path}: out_of_scope lists {', '.join(lost)}, but this factory protects folders ({', '.join(folders)}): patches could "
            "change what is listed. Name its folder with /** at the end, move it below a contract/ folder, or remove it from the "
            "list; then run 'factory upgrade' again"
        )
    return _NewPolicy(path, before, after, f"out_of_scope names folders now: {', '.join(folders)}")


def _new_groups(workspace: Workspace) -> _NewPolicy | None:
    """The workspace's own data.yaml may say ``hold_out_by``, which ``group`` took the place of. Raises: ConfigError."""
    path = (workspace.root / "policies" / "data.yaml").resolve()
    found = load_yaml(path) if path.exists() else None
    policy: dict[str, Any] = found if isinstance(found, dict) else {}
    domains: dict[str, Any] = policy["domains"] if isinstance(policy.get("domains"), dict) else {}
    old = [name for name, of in domains.items() if isinstance(of, dict) and HELD_OUT_BY in of]
    if not old:
        return None
    wanted = {name: {_group_key(key): _group(key, value) for key, value in domains[name].items()} for name in old}
    before = path.read_text(encoding="utf-8")
    after = OLD_GROUP.sub(lambda old: f"group:{old[1]}{GROUPS[old[3]]}", before)
    if read_yaml(after, str(path), ConfigError) != policy | {"domains": domains | wanted}:
        raise ConfigError(
            f"{path}: 'factory upgrade' cannot edit {HELD_OUT_BY} as it is written there: write 'group: source' in place of "
            f"'{HELD_OUT_BY}: source', and 'group: document' in place of '{HELD_OUT_BY}: content'"
        )
    return _NewPolicy(path, before, after, f"{HELD_OUT_BY} is 'group' now, of {', '.join(map(str, old))}")


def _group_key(key: str) -> str:
    return "group" if key == HELD_OUT_BY else key


def _group(key: str, value: Any) -> Any:
    return GROUPS.get(value, value) if key == HELD_OUT_BY else value


def _groups_were_sources(ledger: Ledger) -> list[str]:
    """Of a workspace that follows the shipped data.yaml, where these domains were held out by source before schema 4."""
    sql = "SELECT DISTINCT domain FROM documents WHERE domain IN ('code', 'docs', 'chat') AND group_key IS NOT NULL ORDER BY domain"
    domains = [row["domain"] for row in ledger.read(sql)]
    words = "the shipped data.yaml holds out single documents now, where it held out whole sources; what is held out stays so. For what quotes"
    return (
        [f"{', '.join(domains)}: {words} one another write 'group: source' in the workspace's own policies/data.yaml"]
        if domains
        else []
    )


def _is_folder(workspace: Workspace, name: str) -> bool:
    return name.endswith(("/", "/**")) or (workspace.repository / name).is_dir()


def _rewrite(workspace: Workspace, policy: _NewPolicy) -> str:
    kept = backup_folder(workspace) / f"{policy.path.stem}-{stamp()}.yaml"
    write_atomically(kept, policy.before)
    write_atomically(policy.path, policy.after)
    return f"{policy.path}: {policy.said} (as it was: {kept})"
