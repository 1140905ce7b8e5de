"""Access control of the live page: host names, tokens, cross-site requests, security headers."""

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class AccessControl:
    """Middleware that refuses requests (403) and adds the security headers to every response.

    Without a token, only requests to loopback host names are allowed, against DNS rebinding.
    Requests that change something need a header that other sites cannot send.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._answer(Request(scope))(scope, receive, guarded)

    def _answer(self, request: Request) -> ASGIApp:
        """The page, or the response to a request that does not reach it."""
        given = request.query_params.get("token")
        if self.token and given:
            if not self._is_token(given):
                return PlainTextResponse("The token is wrong.", 403)
            found = RedirectResponse("/", 303)
            found.set_cookie(COOKIE, given, httponly=True, samesite="strict")
            return found
        problem = self._problem(request)
        return self.app if problem is None else PlainTextResponse(problem, 403)

    def _problem(self, request: Request) -> str | None:
        headers, host = request.headers, request.headers.get("host", "")
        if self.token is None:
            if not is_loopback(_name_of(host)):
                return "This page is served on loopback addresses only."
        else:
            scheme, _, bearer = headers.get("authorization", "").partition(" ")
            if not self._is_token(
                bearer if scheme == "Bearer" else request.cookies.get(COOKIE, "")
            ):
                return "A token is needed: open the address that `latecomer watch` printed."
        if request.method not in ("GET", "HEAD"):
            origin = headers.get("origin")
            foreign = origin is not None and origin.partition("://")[2] != host
            if headers.get("x-latecomer") != "1" or foreign:
                return "Only the live page may send this request."
        return None

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self.token or "").encode())


def _name_of(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # such as an open bracket
        return ""
