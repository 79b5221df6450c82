"""``factory upgrade``: what a workspace of an older factory lacks is added, each time after a backup below ``backups/``."""

from __future__ import annotations

import re
from pathlib import Path

from factory.core.errors import ConfigError
from factory.core.workspace import Workspace, code_root
from factory.core.yaml_file import load_yaml
from factory.git.scope import AgentsPolicy
from factory.ledger.upgrading import backup_folder, stamp, upgrade_ledger
from kernels.contract.files import write_atomically

# The key with what belongs to it: indented lines, list items, comments and empty lines among them.
OUT_OF_SCOPE = re.compile(r"^out_of_scope:.*\n(?:(?:[ \t]*(?:#.*)?\n)*[ \t]*-.*\n)*", re.MULTILINE)


def upgrade(workspace: Workspace, has_backup: bool = False) -> list[str]:
    """Bring a workspace up to this factory; returns what was done, a line each. Safe to repeat, and to kill.

    ``has_backup``: a person has one of a PostgreSQL ledger. Raises: WorkspaceError, ConfigError; what they name is unchanged.
    """
    with workspace.lock("model-loop"), workspace.lock("code-loop"), workspace.lock("release"):
        return upgrade_ledger(workspace, has_backup) + _upgrade_scope(workspace)


def _upgrade_scope(workspace: Workspace) -> list[str]:
    """The workspace's own agents.yaml may list files in ``out_of_scope``, as before there were ``contract/`` folders."""
    path = workspace.root / "policies" / "agents.yaml"
    policy = load_yaml(path) if path.exists() else None
    listed = policy.get("out_of_scope") if isinstance(policy, dict) else None
    if not isinstance(listed, list) or all(str(name).endswith("/**") for name in listed):
        return []
    folders = AgentsPolicy.load(code_root() / "policies" / "agents.yaml").out_of_scope
    folders += [name for name in map(str, listed) if name.endswith("/**") and name not in folders]
    text = path.read_text(encoding="utf-8")
    lines = "".join(f'  - "{folder}"\n' for folder in folders)
    new, count = OUT_OF_SCOPE.subn(f"out_of_scope:\n{lines}", text)
    aside = backup_folder(workspace) / f".agents-{stamp()}.new.yaml"
    aside.write_text(new, encoding="utf-8")
    try:
        upgraded = AgentsPolicy.load(aside)
    finally:
        aside.unlink()
    lost = [
        name
        for name in map(str, listed)
        if not upgraded.protected(name) and (Path(workspace.repository) / name).is_file()
    ]
    if lost or count != 1:
        raise ConfigError(
            f"{path}: out_of_scope lists files, but this factory reads folders ({', '.join(folders)}). Files outside them that "
            f"patches could change then: {', '.join(lost) or 'not known'}. Move them below a contract/ folder, or remove them "
            "from the list, and run 'factory upgrade' again"
        )
    kept = backup_folder(workspace) / f"agents-{stamp()}.yaml"
    write_atomically(kept, text)
    write_atomically(path, new)
    return [f"{path}: out_of_scope names folders now: {', '.join(folders)} (as it was: {kept})"]
