"""``factory upgrade``: what a workspace of an older factory lacks is added, each time after a backup below ``backups/``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factory.backups.backups import back_up_daily, stamp
from factory.backups.upgrading import backup_folder, upgrade_ledger
from factory.core.errors import ConfigError
from factory.core.workspace import Workspace, code_root, load_yaml
from factory.git.scope import AgentsPolicy
from factory.ledger.ledger import Ledger
from factory.ledger.rows import SegmentRow
from factory.training.segment_folder import mark_owner
from kernels.contract.files import write_atomically
from kernels.contract.strict_yaml import read_yaml
from trainer.contract.strict import parse

# The key with what belongs to it: indented lines, list items, comments and empty lines among them.
OUT_OF_SCOPE = re.compile(r"^out_of_scope:.*\n(?:(?:[ \t]*(?:#.*)?\n)*[ \t]*-.*\n)*", re.MULTILINE)
# Files that older factories listed, and that lie in a contract/ folder now.
IN_KERNELS = "__init__ registry choice machine precision tune host_memory op oracle bench"
IN_TRAINER = (
    "__init__ recipe precision strict errors stopping token_shard data_plan data_order document_stream permutation packing spec "
    "export checkpoint region json_lines feasible run_plan sizing plan_report"
)
MOVED = {f"kernels/{name}.py" for name in IN_KERNELS.split()} | {f"trainer/{name}.py" for name in IN_TRAINER.split()}


@dataclass(frozen=True)
class _NewScope:
    """An agents.yaml to be rewritten."""

    path: Path
    before: str
    after: str
    folders: list[str]


def upgrade(workspace: Workspace, has_backup: bool = False) -> list[str]:
    """Bring a workspace up to this factory; returns what was done, a line each. Safe to repeat, and to kill.

    ``has_backup``: a person has one of a PostgreSQL ledger. Raises: WorkspaceError, ConfigError; nothing was changed then.
    """
    with workspace.lock("model-loop"), workspace.lock("code-loop"), workspace.lock("release"):
        scope = _new_scope(workspace)  # refuses what it cannot read before anything is changed
        done = upgrade_ledger(workspace, has_backup)
        ledger, made = Ledger.open(workspace.ledger_url, workspace.root), workspace.root / "root"
        if done or made.exists():  # older factories wrote that file, and no owner into the folders of segments
            for row in SegmentRow.select(ledger):
                if Path(row.folder).is_dir():
                    mark_owner(ledger, row)
            made.unlink(missing_ok=True)
            back_up_daily(workspace, ledger)
        return done + (_rewrite(workspace, scope) if scope else [])


def _new_scope(workspace: Workspace) -> _NewScope | None:
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
    return _NewScope(path, before, after, folders)


def _is_folder(workspace: Workspace, name: str) -> bool:
    return name.endswith(("/", "/**")) or (workspace.repository / name).is_dir()


def _rewrite(workspace: Workspace, scope: _NewScope) -> list[str]:
    kept = backup_folder(workspace) / f"agents-{stamp()}.yaml"
    write_atomically(kept, scope.before)
    write_atomically(scope.path, scope.after)
    return [f"{scope.path}: out_of_scope names folders now: {', '.join(scope.folders)} (as it was: {kept})"]
