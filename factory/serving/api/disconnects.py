"""Cancels work for a client that closed its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import Request

WorkResult = TypeVar("WorkResult")
POLL_SECONDS = 1.0


class ClientDisconnectedError(Exception):
    """The client closed its connection."""


async def cancel_if_client_disconnects(request: Request, answer: Awaitable[WorkResult]) -> WorkResult:
    """Return the result of ``answer``. The body of ``request`` must have been read.

    Raises: ClientDisconnectedError, after ``answer`` was cancelled.
    """
    task = asyncio.ensure_future(answer)
    try:
        while not (await asyncio.wait([task], timeout=POLL_SECONDS))[0]:
            if await request.is_disconnected():
                raise ClientDisconnectedError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
