"""Errors in OpenAI's form, which answer a request that fails."""

from __future__ import annotations

from typing import Any

from kernels.contract.message import CodedError, Message


class ApiError(CodedError):
    """An error that answers a request. ``status``: the HTTP status. ``param``: the parameter that is wrong.

    ``openai_code``: a code that clients of OpenAI's API know. Without it, the body has the code of ``message``.
    """

    def __init__(self, status: int, message: Message, param: str | None = None, openai_code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.openai_code = status, param, openai_code

    def make_body(self) -> dict[str, Any]:
        """Return the body of the answer: OpenAI's ``{"error": …}``."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 401:
            kind = "authentication_error"
        code = self.openai_code or self.code or None
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": code}}
