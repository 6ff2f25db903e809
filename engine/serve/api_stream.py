"""Both ends of a streamed answer: the engine's streams merged, and server-sent events out.

`merge` owns the pending reads of one request and closes every engine stream, whatever happens:
leaving it is what aborts a request whose client went away. `EventWriter` owns the response of one
streamed request; no write waits longer than its limit. Knows nothing of what a chunk means.
Called by engine/serve/api.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from tierkv.engine.serve.request import StreamEvent

EventStream = AsyncGenerator[StreamEvent, None]


async def merge(
    streams: Sequence[EventStream], event_timeout_s: float
) -> AsyncGenerator[tuple[int, StreamEvent], None]:
    """Yield (index of the stream, event) in order of arrival until every stream has ended.

    Takes over the streams and closes all of them when it ends, fails or is closed. Raises what
    a stream raises, and TimeoutError when no stream has an event for `event_timeout_s` seconds.
    """
    if len(streams) == 1:
        # The usual case needs no task per event.
        async with aclosing(streams[0]) as stream:
            ended = False
            while not ended:
                async with asyncio.timeout(event_timeout_s):
                    event = await anext(stream)
                ended = event.output is not None
                yield 0, event
        return
    waiting: dict[asyncio.Task[StreamEvent], int] = {}
    try:
        for index, stream in enumerate(streams):
            waiting[asyncio.create_task(_next_event(stream))] = index
        while waiting:
            done, _ = await asyncio.wait(
                waiting, timeout=event_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise TimeoutError
            for task in done:
                index, event = waiting.pop(task), task.result()
                if event.output is None:
                    waiting[asyncio.create_task(_next_event(streams[index]))] = index
                else:
                    await streams[index].aclose()
                yield index, event
    finally:
        for task in waiting:
            task.cancel()
        # Cancelled and failed reads are collected here so that none is left unobserved.
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next_event(stream: EventStream) -> StreamEvent:
    return await anext(stream)


class ClientGone(Exception):
    """The client closed the connection, or took nothing for too long."""


class EventWriter:
    """Server-sent events to one client, one JSON object each, [DONE] at the end."""

    def __init__(self, write_timeout_s: float) -> None:
        self._write_timeout_s = write_timeout_s
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                # Proxies that buffer would hold tokens back.
                "X-Accel-Buffering": "no",
            }
        )

    async def open(self, request: web.Request) -> None:
        """Send status line and headers; from now on errors travel as events."""
        try:
            await self.response.prepare(request)
        except ConnectionError as error:
            raise ClientGone from error

    async def send(self, chunk: dict[str, Any]) -> None:
        """Send one object. Raises ClientGone when the client does not take it in time."""
        text = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
        await self._write(f"data: {text}\n\n".encode())

    async def end(self) -> None:
        """Send the closing mark and finish the response."""
        await self._write(b"data: [DONE]\n\n")
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self.response.write_eof()
        except (ConnectionError, TimeoutError) as error:
            raise ClientGone from error

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self.response.write(data)
        except (ConnectionError, TimeoutError) as error:
            raise ClientGone from error
