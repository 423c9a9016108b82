"""Errors of the gateway, in the format that each API's clients expect."""

from __future__ import annotations

from typing import Any, Literal

ApiStyle = Literal["openai", "anthropic"]
MAX_MESSAGE_CHARACTERS = 1000
"""Maximum length of a message, which may quote a large body."""

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class ApiError(Exception):
    """`status` is the HTTP status, `code` is for programs, `param` names the invalid request field."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        message = message if len(message) <= MAX_MESSAGE_CHARACTERS else f"{message[:MAX_MESSAGE_CHARACTERS]}…"
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param

    def body(self, style: ApiStyle) -> dict[str, Any]:
        if style == "anthropic":
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": self.message, "code": self.code}}
        kind = _OPENAI_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, code, message, param)


def unsupported(param: str, why: str) -> ApiError:
    return ApiError(400, "unsupported_parameter", f"{param}: {why}", param)
