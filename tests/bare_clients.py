"""The two clients that bench_client.py puts beside ours: the least that can be done, and what is usually done.

* `counting_level`: a bare `asyncio.Protocol` that writes its request on an open connection and then only counts
  blank lines. It checks nothing, so it can be wrong; it shows what the sockets alone cost.
* `aiohttp_level`: a session, an async loop over the content's pieces, one `json.loads` and one clock reading for
  each event, which is how most Python load generators read a stream.

Both start all streams together and return one `Stream` each. Needs aiohttp for the second only.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

try:
    import aiohttp
except ImportError:  # the comparison is left out, and the bench says so
    aiohttp = None  # type: ignore[assignment]

HOST = "127.0.0.1"


class Stream(NamedTuple):
    """One response as a client saw it. Times are `time.perf_counter()` readings in seconds: before connecting, when
    the request was written, first and last text. A client that does not look at texts leaves the last two at 0."""

    key: str
    started_at: float
    written_at: float
    first_at: float
    last_at: float
    deltas: int


def aiohttp_version() -> str | None:
    """The version of aiohttp, or None where it is not installed."""
    return None if aiohttp is None else aiohttp.__version__


class CountingProtocol(asyncio.Protocol):
    """Counts the events of one response and knows nothing else."""

    def __init__(self, payload: bytes, ended: asyncio.Future[None]) -> None:
        self.payload = payload
        self.ended = ended
        self.written_at = self.first_at = self.last_at = 0.0
        self.events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.written_at = time.perf_counter()
        transport.write(self.payload)

    def data_received(self, data: bytes) -> None:
        self.last_at = time.perf_counter()
        if not self.events:
            self.first_at = self.last_at
        self.events += data.count(b"\n\n")

    def connection_lost(self, exc: BaseException | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def counting_level(port: int, payloads: Sequence[tuple[str, bytes]], not_text: int) -> list[Stream]:
    """Send every payload at once; `not_text` events of each response carry no text and are taken off."""
    loop = asyncio.get_running_loop()

    async def one(key: str, payload: bytes) -> Stream:
        started_at = time.perf_counter()
        protocol = CountingProtocol(payload, loop.create_future())
        await loop.create_connection(lambda: protocol, HOST, port)
        await protocol.ended
        deltas = protocol.events - not_text
        return Stream(key, started_at, protocol.written_at, protocol.first_at, protocol.last_at, deltas)

    return list(await asyncio.gather(*(one(key, payload) for key, payload in payloads)))


async def aiohttp_level(port: int, bodies: Sequence[tuple[str, dict[str, Any]]], header: str) -> list[Stream]:
    """Post every body at once, its key in `header`; the clock starts before the post, as in the usual tools."""
    url = f"http://{HOST}:{port}/v1/chat/completions"
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)

    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def one(key: str, body: dict[str, Any]) -> Stream:
            started_at = time.perf_counter()
            first_at = last_at = 0.0
            deltas = 0
            gaps: list[float] = []
            rest = ""
            decoder = codecs.getincrementaldecoder("utf-8")()
            async with session.post(url, json=body, headers={header: key}) as response:
                response.raise_for_status()
                async for piece in response.content.iter_any():
                    rest += decoder.decode(piece)
                    while "\n\n" in rest:
                        event, rest = rest.split("\n\n", 1)
                        data = event.strip().removeprefix("data: ")
                        if data == "[DONE]":
                            continue
                        now = time.perf_counter()
                        choices = json.loads(data)["choices"]
                        if choices and choices[0]["delta"].get("content"):
                            if deltas:
                                gaps.append(now - last_at)
                            else:
                                first_at = now
                            last_at = now
                            deltas += 1
            return Stream(key, started_at, started_at, first_at, last_at, deltas)

        return list(await asyncio.gather(*(one(key, body) for key, body in bodies)))
