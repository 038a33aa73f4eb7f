"""The planning service's web application: access checks, limits, and the form of error responses."""

import asyncio
import hmac
import json
import logging
import re
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Any

from ebbtide.simulator.drawing import style_sheet
from ebbtide.simulator.rules import BrokenRule, RuleError, broken, shortened
from ebbtide.tuner.service.pool import BusyError, InvalidError, WorkerError
from ebbtide.tuner.service.requests import controls_of_a_job
from ebbtide.tuner.service.resources import Service
from ebbtide.tuner.service.responses import Health
from ebbtide.tuner.service.routes import routes
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
LOG = logging.getLogger("uvicorn.error")
API = "/api/v1"
MOST_ERRORS = 8  # most errors in the answer to one request
SENT = "ebbtide.sent"  # key of a request's scope that holds the parsed body
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
# No inline scripts or styles, nothing from other hosts, and no other site may show the page in a frame.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


def create_app(service: Service) -> FastAPI:
    """Build the service's web application. The service's worker processes start and end with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        recovered = service.jobs.start()
        if recovered:
            LOG.info("%d jobs were interrupted when an earlier server ended", recovered)
        warming = asyncio.create_task(service.pool.light.warm())
        try:
            yield
        finally:
            warming.cancel()
            await service.jobs.stop()
            service.pool.close()
            service.store.close()

    app = FastAPI(
        title="ebbtide what-if service",
        version=metadata.version("ebbtide"),
        lifespan=lifespan,
        openapi_url=f"{API}/openapi.json",
        docs_url=None,
        redoc_url=None,
    )
    app.include_router(routes(service), prefix=API)
    _health(app, service)
    _unknown(app)
    app.mount("/", PageFiles(packages=[("ebbtide.tuner.service", "static")], html=True))
    for error, handler in (
        (RequestValidationError, _unprocessable),
        (RuleError, _invalid),
        (BusyError, _busy),
        (WorkerError, _broken),
        (HTTPException, _refused),
        (sqlite3.Error, _unstored),
    ):
        app.add_exception_handler(error, handler)  # type: ignore[arg-type]
    app.add_middleware(Guard, service=service)
    return app


def _health(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", responses={503: {"description": "the database does not answer"}})
    async def healthz() -> Health:
        """Report that the server takes requests and that its database works. This needs no token."""
        try:
            waiting = await asyncio.to_thread(service.store.waiting)
        except sqlite3.Error as error:
            raise HTTPException(503, f"the database does not answer: {error}") from None
        return Health(status="ok", version=app.version, jobs_waiting=waiting)

    @app.get("/palette.css", include_in_schema=False)
    async def palette() -> Response:
        """Send the colors of the page's pictures."""
        return Response(style_sheet(), media_type="text/css", headers=NO_CACHE)

    @app.get("/form.js", include_in_schema=False)
    async def form() -> Response:
        """Send the controls of the page's form that follow from the fields of `Job`."""
        script = f"export const OF_A_JOB = {json.dumps(controls_of_a_job())};\n"
        return Response(script, media_type="text/javascript", headers=NO_CACHE)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """Redirect to the web page that lists the service's routes."""
        return RedirectResponse("/docs.html")


def _unknown(app: FastAPI) -> None:
    @app.api_route(API + "/{path:path}", methods=METHODS, include_in_schema=False)
    async def unknown(request: Request) -> Response:
        known = ((compile_path(path)[0], methods) for path, methods in app.openapi()["paths"].items())
        mine = [methods for pattern, methods in known if pattern.match(request.url.path)]
        allowed = sorted({method.upper() for methods in mine for method in methods})
        if not allowed:
            raise HTTPException(404, f"the path must be one that {API}/openapi.json lists")
        allowed += ["HEAD"] if "GET" in allowed else []
        headers = {"allow": ", ".join(allowed)}
        raise HTTPException(
            405, f"the method for this path must be {' or '.join(allowed)}, but is {request.method}", headers
        )


NO_CACHE = {"cache-control": "no-cache"}


class PageFiles(StaticFiles):
    """The files of the service's web page, sent so that browsers ask each time if there is a newer version."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(NO_CACHE)
        return response


# -- refusals --------------------------------------------------------------------------------


def problem(status: int, *errors: dict[str, Any], **headers: str) -> JSONResponse:
    """Build an error response: ``{"errors": [{"key", "rule", "value"}]}``."""
    return JSONResponse({"errors": list(errors)}, status, headers=headers or None)


def broken_rule(key: str, rule: str, value: Any = None) -> dict[str, Any]:
    """Return an entry for the service's error response: the key, the violated rule and the sent value."""
    # The value is shortened text, so that nothing harmful is sent back.
    return BrokenRule(key, rule, None if value is None else shortened(value))._asdict()


async def _unprocessable(request: Request, error: RequestValidationError) -> Response:
    posted = getattr(request.scope.get("route"), "body_field", None)
    rows = broken(error, error.body, posted and posted.field_info.annotation)
    return problem(422, *(_with_value(row, error.body) for row in rows[:MOST_ERRORS]))


async def _invalid(request: Request, error: RuleError) -> Response:
    rows = error.rows if isinstance(error, InvalidError) else (BrokenRule(error.key, str(error)),)
    sent = request.scope.get(SENT)
    return problem(422, *(_with_value(row, sent) for row in rows[:MOST_ERRORS]))


def _with_value(row: BrokenRule, sent: Any) -> dict[str, Any]:
    value = sent
    for part in row.key.split(".") if row.value is None and row.key else ():
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            value = value.get(part) if isinstance(value, dict) else None
    single = row.value is None and row.key and isinstance(value, str | int | float | bool)
    return (row._replace(value=shortened(value)) if single else row)._asdict()


async def _busy(_: Request, error: BusyError) -> Response:
    return problem(429, broken_rule("", str(error)), **{"retry-after": "5"})


async def _broken(_: Request, error: WorkerError) -> Response:
    LOG.error("a worker failed: %s", error)
    return problem(500, broken_rule("", f"the answer could not be computed: {error}"))


async def _unstored(_: Request, error: sqlite3.Error) -> Response:
    LOG.error("the database failed: %s", error)
    full = getattr(error, "sqlite_errorname", "") == "SQLITE_FULL" or "is full" in str(error)
    if full:
        rule = "the server's disk is full, and nothing was stored: free space on the disk of --db, then try again"
        return problem(507, broken_rule("", rule))
    return problem(503, broken_rule("", "the server's database cannot be used: the server's log says why"))


async def _refused(_: Request, error: HTTPException) -> Response:
    return problem(error.status_code, broken_rule("", str(error.detail)), **(error.headers or {}))


# -- the guard -------------------------------------------------------------------------------


class Refusal(Exception):  # noqa: N818 - it is an answer, not a fault
    """An exception that answers a request to the service with an error response, before any route runs."""

    def __init__(self, status: int, key: str, rule: str, value: Any = None) -> None:
        self.status, self.error = status, broken_rule(key, rule, value)


class Guard:
    """The outermost layer of the service's web application, which checks each request before any route runs.

    It checks the host name, the token, and the body of the request: the size, the nesting of the JSON, and the time
    until the body has arrived. It also adds headers to each response.
    """

    def __init__(self, app: Any, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            self._check_head(scope, headers)
            if scope["method"] == "POST":
                receive = await self._body(scope, headers, receive)
            elif scope["method"] == "HEAD" and scope["path"].startswith(API):
                scope, send = {**scope, "method": "GET"}, _without_body(send)
        except Refusal as refusal:
            response = problem(refusal.status, refusal.error)
            response.headers["connection"] = "close"  # the rest of the body is not read
            await response(scope, receive, _with_headers(send))
            return
        await self._answer(scope, receive, _with_headers(send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = False

        async def noted(message: MutableMapping[str, Any]) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            LOG.exception("a request failed")
            if began:
                raise
            rule = "the request failed: the server's log says why"
            await problem(500, broken_rule("", rule))(scope, receive, send)

    def _check_head(self, scope: Scope, headers: dict[bytes, str]) -> None:
        # Refuse requests of a web page on another site whose host name resolves to this machine (DNS rebinding).
        if scope["path"] == "/healthz":  # a health probe asks by IP address, and its answer contains no data
            return
        host = re.sub(r":\d+$", "", headers.get(b"host", "")).strip("[]").lower()
        if "*" not in self._service.hosts and host not in self._service.hosts:
            known = ", ".join(dict.fromkeys(self._service.hosts))
            rule = f"the request's Host header must be one of {known}. `tune serve --allow-host NAME` adds a name"
            raise Refusal(400, "Host", rule, host)
        token = self._service.token
        if token is None or not scope["path"].startswith("/api/"):
            return
        scheme, _, given = headers.get(b"authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
            rule = "the request's Authorization header must be 'Bearer TOKEN', with the token of this server as TOKEN"
            raise Refusal(401, "Authorization", rule)

    async def _body(self, scope: Scope, headers: dict[bytes, str], receive: Receive) -> Receive:
        quota = self._service.quota
        most = quota.run_bytes if scope["path"] == f"{API}/runs" else quota.body_bytes
        length = headers.get(b"content-length", "0")
        if not length.isdecimal() or int(length) > most:
            raise Refusal(413, "Content-Length", f"the request body must have at most {most} bytes", length)
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a form on another site can send only other content types
            raise Refusal(415, "Content-Type", "the request's Content-Type header must be application/json", kind)
        try:
            async with asyncio.timeout(quota.body_s):
                body = await _read(receive, most)
        except TimeoutError:
            rule = f"the request body must arrive within {quota.body_s:g} s, but did not"
            raise Refusal(408, "body", rule) from None
        scope[SENT] = _check_json(body)
        sent = False

        async def replay() -> MutableMapping[str, Any]:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        return replay


async def _read(receive: Receive, most: int) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal(400, "body", "the request body must be sent to its end, but the client closed the connection")
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            raise Refusal(413, "body", f"the request body must have at most {most} bytes")
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


def _constant(name: str) -> float:
    raise Refusal(422, "body", "all numbers in the request body must be finite", name)


def _check_json(body: bytes) -> Any:
    try:
        sent = json.loads(body, parse_constant=_constant)
        json.dumps(sent, ensure_ascii=False).encode()
    except RecursionError:
        rule = "the JSON of the request body is nested too deeply to be parsed. Send it with fewer levels"
        raise Refusal(422, "body", rule) from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise Refusal(422, "body", f"the request body must be valid JSON, but is not at {place}") from None
    except UnicodeEncodeError:
        rule = "all texts in the request body must be valid Unicode, but one has half of a surrogate pair"
        raise Refusal(422, "body", rule) from None
    except ValueError:
        rule = "the request body must be JSON in UTF-8, without numbers of thousands of digits"
        raise Refusal(422, "body", rule) from None
    return sent


def _without_body(send: Send) -> Send:
    async def wrapped(message: MutableMapping[str, Any]) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return wrapped


def _with_headers(send: Send) -> Send:
    extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def wrapped(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *extra]
        await send(message)

    return wrapped
