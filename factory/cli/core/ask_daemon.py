"""Lets a command hold the model loop's lock, or ask the running daemon to do the command's work."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from factory.cli.core.options import get_current_user
from factory.core.errors import WorkspaceError
from factory.core.workspace import MODEL_LOOP
from factory.ledger.plant import Plant
from kernels.contract.message import Message


def take_lock_or_ask_daemon(stack: ExitStack, plant: Plant, errands: Sequence[str], **how: Any) -> str:
    """Take the model loop's lock into ``stack`` and return ''. If a daemon holds the lock, ask the daemon to do the errands, and return a line
    for the person.

    ``errands``: actions of the daemon, such as 'judge 3'. ``how``: their options, which ``factory.retrying.daemon_requests.list_open_requests``
    returns. Raises: WorkspaceError if another command holds the lock.
    """
    from factory.retrying.daemon_requests import request_actions
    from factory.status.daemon_state import read_daemon_facts

    try:
        stack.enter_context(plant.workspace.hold_lock(MODEL_LOOP))
    except WorkspaceError as busy:
        command = read_daemon_facts(plant.workspace).get("command", "").split()
        if command[:1] == ["factory"] and command[1:2] not in (["run"], ["demo"]):
            raise  # another command, such as 'factory train', does not do errands
        request_actions(plant.ledger, errands, get_current_user(), **how)
        return Message(
            "ask_daemon.asked",
            "The running daemon does this in its next pass: {errands}. This command cannot do it now, because {busy}",
            errands=list(errands),
            busy=str(busy).removesuffix(f". {busy.data.get('remedy')}"),
        )
    return ""
