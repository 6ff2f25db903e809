"""HTTP on loopback: health, readiness, metrics, status, and admin verbs behind a token.

Owns the listening socket. Knows no page bytes. Runs on the daemon's loop, so it never blocks:
what waits for disks goes through the same workers as the clients' requests. Called by
tierkv.daemon.server.

    GET  /healthz        200 while the process lives
    GET  /readyz         200 once it serves, 503 before and while it drains
    GET  /metrics        Prometheus text
    GET  /status         JSON, per component
    GET  /evictions      ?key=hex -> {"evictions": [{"tier", "wall_s", "reason"}]}, newest first:
                         the latest removal of a page from each tier, as far as remembered
    POST /admin/drop     {"namespace": hex}                 -> {"dropped": n}
    POST /admin/flush    {"wait_s": s}                      -> {"durable": bool}
    POST /admin/drain    {"wait_s": s}                      -> {"durable": bool}, no new work after;
                         in a pool also "pool": {"complete", "moved_pages", "left_pages"}
    POST /admin/preload  {"page_bytes": n, "pages": n}      -> {"planned": {size: n}}
    POST /admin/scrub    {"page_bytes": n, "pages": n}      -> {size: {checked, corrupt, ...}}

An error is {"error": {"code", "message"}}.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from aiohttp import web

from tierkv.daemon.metrics import render
from tierkv.daemon.page_class import PageClass
from tierkv.daemon.service import Service
from tierkv.daemon.status import status_fields
from tierkv.daemon.upkeep import Upkeep
from tierkv.daemon.verbs import drop_namespace, flush_classes
from tierkv.protocol.errors import ProtocolError
from tierkv.storage.errors import ConfigError, TierKVError
from tierkv.storage.types import KEY_BYTES, PageKey

BODY_BYTES_MAX = 1 << 16
WAIT_S_MAX = 600.0
PAGES_MAX = 1 << 20
SHUTDOWN_S = 1.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger(__name__)


class HttpServer:
    """See the module docstring."""

    def __init__(self, service: Service, upkeep: Upkeep) -> None:
        self._service = service
        self._upkeep = upkeep
        self._runner: web.AppRunner | None = None
        self.port = 0
        """The port in use, once started."""

    async def start(self) -> None:
        """Listen as configured. Raises ConfigError when the address is taken."""
        config = self._service.config
        assert config.http_host is not None, "HTTP is off"
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_errors])
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/status", self._status)
        app.router.add_get("/evictions", self._evictions)
        for name, action in (
            ("drop", self._drop),
            ("flush", self._flush),
            ("drain", self._drain),
            ("preload", self._preload),
            ("scrub", self._scrub),
        ):
            app.router.add_post(f"/admin/{name}", self._admin(action))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, config.http_host, config.http_port).start()
        except OSError as error:
            await self.stop()
            raise ConfigError(
                f"listen on http://{config.http_host}:{config.http_port}: "
                f"{error.strerror or error}; choose another port or stop who has it"
            ) from error
        self.port = int(self._runner.addresses[0][1])
        log.info("http=http://%s:%d", config.http_host, self.port)

    async def stop(self) -> None:
        """Close. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _healthz(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.StreamResponse:
        if self._service.closing:
            return web.Response(status=503, text="draining\n")
        return web.Response(text="ready\n")

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=render(self._service),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _status(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(status_fields(self._service))

    async def _evictions(self, request: web.Request) -> web.StreamResponse:
        key = PageKey(_digest(request.query.get("key"), "key"))
        found = [
            eviction for each in self._service.classes for eviction in each.store.evicted_when(key)
        ]
        found.sort(key=lambda eviction: eviction.wall_s, reverse=True)
        rows = [
            {"tier": each.tier.value, "wall_s": each.wall_s, "reason": each.reason.value}
            for each in found
        ]
        return web.json_response({"evictions": rows})

    def _admin(self, action: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            self._authorise(request)
            text = await request.text()
            try:
                values = json.loads(text) if text else {}
            except (ValueError, RecursionError) as error:
                raise _failure(web.HTTPBadRequest, "bad_body", f"body: {error}") from error
            if not isinstance(values, dict):
                raise _failure(web.HTTPBadRequest, "bad_body", "body: expected a JSON object")
            return web.json_response(await action(values))

        return handle

    def _authorise(self, request: web.Request) -> None:
        token = self._service.config.http_token
        if not token:
            raise _failure(
                web.HTTPForbidden, "admin_off", "admin calls are off: configure http.token"
            )
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise _failure(
                web.HTTPUnauthorized, "token", "send the header Authorization: Bearer <token>"
            )

    async def _drop(self, values: dict[str, Any]) -> dict[str, Any]:
        digest = _digest(values.get("namespace"), "namespace")
        return {"dropped": await drop_namespace(self._service, digest)}

    async def _flush(self, values: dict[str, Any]) -> dict[str, Any]:
        wait_s = _number(values, "wait_s", 60.0, WAIT_S_MAX)
        chosen = self._chosen(values)
        return {"durable": await flush_classes(self._service, chosen, wait_s)}

    async def _drain(self, values: dict[str, Any]) -> dict[str, Any]:
        wait_s = _number(values, "wait_s", 60.0, WAIT_S_MAX)
        service = self._service
        deadline = service.loop.time() + wait_s
        service.closing = True
        durable = await flush_classes(service, list(service.classes), wait_s)
        answer: dict[str, Any] = {"durable": durable}
        if service.remote is not None and service.remote.serving:
            left_s = max(0.0, deadline - service.loop.time())
            drained = await service.waiters.submit(partial(service.remote.drain, left_s))
            if drained is not None:
                answer["pool"] = asdict(drained)
        return answer

    async def _preload(self, values: dict[str, Any]) -> dict[str, Any]:
        pages = int(_number(values, "pages", 0, PAGES_MAX)) or None
        planned = {}
        for each in self._chosen(values):
            planned[str(each.page_bytes)] = await self._upkeep.preload(each, pages)
        return {"planned": planned}

    async def _scrub(self, values: dict[str, Any]) -> dict[str, Any]:
        pages = int(_number(values, "pages", 64, PAGES_MAX))
        return {
            str(each.page_bytes): await self._upkeep.scrub(each, pages)
            for each in self._chosen(values)
        }

    def _chosen(self, values: dict[str, Any]) -> list[PageClass]:
        """The page class that a body names, or all."""
        if "page_bytes" not in values:
            return list(self._service.classes)
        size = int(_number(values, "page_bytes", 0, 2**62))
        found = self._service.classes.get(size)
        if found is None:
            raise _failure(web.HTTPNotFound, "bad_field", f"page_bytes: no class of {size} is open")
        return [found]


def _digest(text: object, name: str) -> bytes:
    try:
        digest = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        digest = b""
    if len(digest) != KEY_BYTES:
        raise _failure(
            web.HTTPBadRequest, "bad_field", f"{name}: expected {2 * KEY_BYTES} hex digits"
        )
    return digest


def _number(values: dict[str, Any], name: str, default: float, highest: float) -> float:
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= highest:
        raise _failure(
            web.HTTPBadRequest, "bad_field", f"{name}: expected a number from 0 to {highest:g}"
        )
    return value


def _failure(kind: type[web.HTTPException], code: str, message: str) -> web.HTTPException:
    return kind(
        text=json.dumps({"error": {"code": code, "message": message}}),
        content_type="application/json",
    )


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors raised on purpose become answers; others are aiohttp's 500, logged there."""
    try:
        return await handler(request)
    except ProtocolError as error:
        raise _failure(web.HTTPBadRequest, str(error.code), str(error)) from error
    except TierKVError as error:
        raise _failure(web.HTTPServiceUnavailable, error.code, str(error)) from error
