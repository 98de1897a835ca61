"""`http/request`: an HTTP request made from this machine, its body streamed if wanted."""

from __future__ import annotations

from typing import Final

from ... import log
from ...local.http import Exchange
from ...loop import Pending
from ...wire.envelope import encode_notification
from ...wire.errors import invalid_params
from ...wire.http import HttpBodyDelta, HttpRequestParams, HttpRequestResult, decode_request
from ..connection import Connection
from ..dispatch import Method

__all__ = ["METHODS"]


def request(connection: Connection, params: HttpRequestParams) -> Pending[HttpRequestResult]:
    """Answered when the headers are known, or when the whole body is."""
    streams = connection.http_streams
    if params.stream_response:
        if params.request_id in streams:
            raise invalid_params(
                f"http/request streamResponse requestId `{params.request_id}` is already active"
            )
        streams[params.request_id] = None
    answer: Pending[HttpRequestResult] = Pending()
    background = connection.server.background
    work = background.run(_perform(connection, params, answer))
    if params.stream_response:
        streams[params.request_id] = work
    else:
        answer.on_cancel = work.cancel
    work.then(lambda done: _failed(done, answer, params, streams))
    return answer


def _failed(
    done: Pending[None],
    answer: Pending[HttpRequestResult],
    params: HttpRequestParams,
    streams: dict[str, Pending[None] | None],
) -> None:
    if params.stream_response:
        streams.pop(params.request_id, None)
    try:
        done.result()
    except BaseException as error:
        if answer.settled:
            log.warning("a streamed body broke off", error=str(error))
        answer.fail(error)


async def _perform(
    connection: Connection, params: HttpRequestParams, answer: Pending[HttpRequestResult]
) -> None:
    server = connection.server
    exchange: Exchange = await server.http.open(params)
    try:
        await server.background.on_server_loop(lambda: answer.resolve(exchange.result))
        if params.stream_response:
            async for delta in exchange.deltas():

                def send(delta: HttpBodyDelta = delta) -> Pending[None] | None:
                    if delta.done:
                        connection.http_streams.pop(params.request_id, None)
                    connection.channel.send(encode_notification("http/request/bodyDelta", delta))
                    return connection.room()

                await server.background.on_server_loop(send)
    finally:
        await exchange.close()


METHODS: Final = {"http/request": Method(decode_request, request, "http")}
