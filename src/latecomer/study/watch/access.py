"""Access control of the live page: host names, tokens, cross-site requests, security headers."""

import hmac
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

COOKIE = "latecomer_token"
# Plotly adds one empty style sheet, which it fills by script; this is the hash of the empty text.
EMPTY = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; script-src 'self'; style-src 'self' {EMPTY};"
        " img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def new_token() -> str:
    return secrets.token_urlsafe(24)


class AccessControl:
    """Middleware that refuses requests (403) and adds the security headers to every response.

    Without a token, only requests to loopback host names are allowed, against DNS rebinding.
    Requests that change something need a header that other sites cannot send.
    """

    def __init__(self, app: App, token: str | None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *more]}
            await send(message)

        query = scope.get("query_string", b"").decode("latin-1")
        if self.token and (given := parse_qs(query).get("token")):
            if hmac.compare_digest(given[0].encode(), self.token.encode()):
                await _respond(guarded, 303, "", {"location": "/", "set-cookie": _cookie(given[0])})
            else:
                await _respond(guarded, 403, "The token is wrong.")
            return
        if (problem := self._problem(scope["method"], headers)) is not None:
            await _respond(guarded, 403, problem)
            return
        await self.app(scope, receive, guarded)

    def _problem(self, method: str, headers: Mapping[str, str]) -> str | None:
        host = headers.get("host", "")
        if self.token is None:
            if not is_loopback(_name_of(host)):
                return "This page is served on loopback addresses only."
        elif not hmac.compare_digest(_given(headers).encode(), self.token.encode()):
            return "A token is needed: open the address that `latecomer watch` printed."
        if method not in ("GET", "HEAD"):
            origin = headers.get("origin")
            foreign = origin is not None and origin.partition("://")[2] != host
            if headers.get("x-latecomer") != "1" or foreign:
                return "Only the live page may send this request."
        return None


def _name_of(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # such as an open bracket
        return ""


def _given(headers: Mapping[str, str]) -> str:
    bearer = headers.get("authorization", "")
    if bearer.startswith("Bearer "):
        return bearer.removeprefix("Bearer ")
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


def _cookie(token: str) -> str:
    return f"{COOKIE}={token}; HttpOnly; SameSite=Strict; Path=/"


async def _respond(
    send: Send, status: int, text: str, headers: Mapping[str, str] | None = None
) -> None:
    named = {"content-type": "text/plain; charset=utf-8", **(headers or {})}
    pairs = [(k.encode(), v.encode()) for k, v in named.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": text.encode()})
