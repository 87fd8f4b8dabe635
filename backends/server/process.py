"""One engine instance from start to exit code: the loop with the sockets, the engine thread, the signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from backends.config import EngineConfig
from backends.engines.choices import Choices
from backends.protocol.link import FrameLink, open_link
from backends.protocol.messages import EngineInfo, Ready, StartFailed, ToEngine
from backends.server.build import StartError, build_instance
from backends.server.control import Arrival, watch_control
from backends.server.decode_peers import DecodePeers
from backends.server.engine_thread import EngineThread, Outlet, Steppable
from backends.server.gateway_session import GatewaySession
from backends.server.instances import DecodeInstance, Instance, PrefillInstance
from backends.server.prefill_peers import PrefillPeers
from backends.server.preparation import Preparer

logger = logging.getLogger(__name__)
T = TypeVar("T")

EXIT_OK = 0
EXIT_START_FAILED = 1
EXIT_BUG = 70  # EX_SOFTWARE

NUM_ENCODERS = 2  # prompts encoded at once: a long one does not hold up the short ones behind it
LAST_WORDS_SECONDS = 5.0  # longest wait for the gateway to read the last frames


async def run_instance(
    config: EngineConfig,
    gateway: socket.socket,
    control: socket.socket,
    built: Callable[[], object] = lambda: None,
) -> int:
    """Serve until drained, told to stop, or broken; returns the exit code. The gateway's death ends the process.

    `built` is called once the model is there, before the gateway hears of it.
    """
    process = InstanceProcess(config, built)
    await process.start(gateway, control)
    return await process.finished()


class InstanceProcess:
    """The parts of a running instance and what connects them. Its methods run on the loop unless they say otherwise."""

    def __init__(self, config: EngineConfig, built: Callable[[], object] = lambda: None) -> None:
        self._config = config
        self._built = built
        self._loop = asyncio.get_running_loop()
        self._exit_code: asyncio.Future[int] = self._loop.create_future()
        self._thread = EngineThread(ended=self._to_loop(self._thread_ended))
        self._encoders = ThreadPoolExecutor(NUM_ENCODERS, thread_name_prefix="encoder")
        self._link: FrameLink[ToEngine] | None = None
        self._session: GatewaySession | None = None
        self._peers: DecodePeers | PrefillPeers | None = None
        self._connecting: set[asyncio.Task[None]] = set()

    async def start(self, gateway: socket.socket, control: socket.socket) -> None:
        link: FrameLink[ToEngine] = await open_link(gateway, ToEngine, received=self._received, lost=self._gateway_lost)
        self._link = link
        self._outlet = Outlet(self._loop, link.write)
        self._thread.add_outlet(self._outlet)
        watch_control(control, peer_arrived=self._to_loop(self._peer_arrived))
        self._loop.add_signal_handler(signal.SIGTERM, self._terminate)
        self._thread.start(self._build)

    def _to_loop(self, call: Callable[[T], None]) -> Callable[[T], None]:
        """`call`, made callable from other threads."""

        def schedule(argument: T) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process is about to end
                self._loop.call_soon_threadsafe(call, argument)

        return schedule

    async def finished(self) -> int:
        """The exit code, once the gateway has read all that was said."""
        code = await self._exit_code
        if self._link is not None:
            self._link.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._link.closed(), LAST_WORDS_SECONDS)
        return code

    # ---------------------------------------------------------------------------------------- in the engine thread

    def _build(self) -> Steppable:
        self._choices = Choices(self._outlet.send, self._thread.post)
        instance = build_instance(self._config, emit=self._choices.emit, wake=self._thread.wake)
        if not isinstance(instance, PrefillInstance):
            self._choices.attach(instance.engine)
        self._loop.call_soon_threadsafe(self._ready, instance)
        return instance.engine

    # ------------------------------------------------------------------------------------------------- on the loop

    def _ready(self, instance: Instance) -> None:
        assert self._link is not None
        self._session = GatewaySession(
            role=self._config.role,
            engine=instance.engine,
            taker=None if isinstance(instance, PrefillInstance) else self._choices,
            preparer=None if isinstance(instance, PrefillInstance) else Preparer(instance.codec, instance.engine.info),
            thread=self._thread,
            send=self._link.send,
            send_from_engine=self._outlet.send,
            encoders=self._encoders,
        )
        if isinstance(instance, DecodeInstance):
            self._peers = PrefillPeers(instance.engine, self._thread, self._link.send)
        elif isinstance(instance, PrefillInstance):
            self._peers = DecodePeers(instance.engine, self._thread)
        self._built()
        info = instance.engine.info
        info = msgspec.structs.replace(info, notices=info.notices + instance.notices)
        _log_info(info)
        self._link.send(Ready(info=info))

    def _received(self, message: ToEngine) -> None:
        if self._session is None:
            logger.warning("%s came before this instance was ready, and was dropped", type(message).__name__)
            return
        self._session.received(message)

    def _peer_arrived(self, arrival: Arrival) -> None:
        if self._peers is None:
            logger.warning("a socket of peer %s arrived at an instance that takes none", arrival.name)
            arrival.sock.close()
            return
        task = self._loop.create_task(self._peers.connect(arrival.name, arrival.sock))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _terminate(self) -> None:
        """The first SIGTERM lets requests finish. The second doesn't, nor does one before there can be any."""
        if self._session is None or self._session.draining:
            logger.info("told to stop at once")
            self._end(EXIT_OK)
            return
        logger.info("draining: no new requests, those that run are finished")
        self._session.drain()

    def _thread_ended(self, error: BaseException | None) -> None:
        if error is None:
            self._end(EXIT_OK)
        elif self._session is None:
            self._start_failed(error)
        else:
            logger.critical("the engine broke; this process ends", exc_info=error)
            self._end(EXIT_BUG)

    def _start_failed(self, error: BaseException) -> None:
        assert self._link is not None
        is_expected = isinstance(error, StartError)  # its message says it all; a traceback would hide it
        message = str(error) if is_expected else f"{type(error).__name__}: {error}"
        logger.error("could not start: %s", message, exc_info=None if is_expected else error)
        self._link.send(StartFailed(message=message))
        self._end(EXIT_START_FAILED)

    def _gateway_lost(self, reason: str) -> None:
        """Nobody is left to answer to. After an orderly end it is we who closed the connection."""
        if not self._exit_code.done():
            logger.info("the gateway is gone: %s", reason)
            logging.shutdown()
            os._exit(EXIT_OK)

    def _end(self, code: int) -> None:
        if not self._exit_code.done():
            self._exit_code.set_result(code)


def _log_info(info: EngineInfo) -> None:
    logger.info(
        "ready: %s on %s, %s weights, %s KV cache of %s blocks of %s tokens, context %s",
        info.served_name,
        info.device,
        info.weight_dtype,
        info.kv_cache_dtype,
        info.num_blocks,
        info.block_size,
        info.max_model_len,
    )
    for notice in info.notices:
        logger.info("note: %s", notice)
