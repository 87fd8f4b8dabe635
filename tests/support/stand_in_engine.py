"""A stand-in for an engine process, for tests of the fleet. `COMMAND` takes the real one's arguments.

It does what the words of a prompt say, and nothing else; no KV, no scheduler. Words of a prompt:
    who         answers with the instance's name
    peers       answers with what each connected prefill side calls itself and this one: `prefill-0>decode-1`
    hold        is accepted, and never answered
    begin       is accepted, has one token, and goes no further
    full        is refused because the queue is full, by the instance that is named after it
    die         ends the process after it was accepted, in the instance that is named after it
    hung        says that the prefill side that is named after it is hung
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from backends.config import EngineConfig
from backends.engines.scripted import Script, scripted_info
from backends.protocol.framing import Decoder, Encoder
from backends.protocol.messages import (
    Accepted,
    Alive,
    ChatPrompt,
    Done,
    Drain,
    EngineStats,
    Failed,
    Generate,
    GetStats,
    PeerState,
    Ping,
    Ready,
    ResetPeaks,
    StatsReport,
    Timings,
    ToEngine,
    TokenChunk,
    Usage,
)

PATHS = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
RUN = f"import sys; sys.path[:0] = {PATHS!r}; from support.stand_in_engine import main; main()"
COMMAND = (sys.executable, "-c", RUN)


class StandIn:
    def __init__(self, config: EngineConfig, gateway: socket.socket, control: socket.socket) -> None:
        self.config = config
        self.gateway = gateway
        self.control = control
        self.decoder: Decoder[ToEngine] = Decoder(ToEngine)
        self.peers: dict[str, socket.socket] = {}
        self.introductions: dict[str, str] = {}

    def say(self, message: msgspec.Struct) -> None:
        self.gateway.sendall(Encoder().encode(message))

    def run(self) -> None:
        self.say(Ready(info=scripted_info(self.config, Script())))
        while True:
            ready, _, _ = select.select([self.gateway, self.control, *self.peers.values()], [], [])
            for sock in ready:
                if sock is self.gateway:
                    self.hear()
                elif sock is self.control:
                    self.take_peer()
                else:
                    self.hear_peer(sock)

    def take_peer(self) -> None:
        name, descriptors, _, _ = socket.recv_fds(self.control, 256, 1)
        if not name:
            os._exit(0)
        peer = self.peers[name.decode()] = socket.socket(fileno=descriptors[0])
        if self.config.role == "prefill":
            peer.sendall(f"{self.config.name}>{name.decode()}".encode())

    def hear_peer(self, sock: socket.socket) -> None:
        name = next(name for name, peer in self.peers.items() if peer is sock)
        data = sock.recv(4096)
        if not data:
            self.peers.pop(name).close()
            self.introductions.pop(name, None)
        else:
            self.introductions[name] = data.decode()
        if self.config.role == "decode":
            self.say(PeerState(connected=bool(data), peer=name, reason="" if data else f"{name} is gone"))

    def hear(self) -> None:
        data = self.gateway.recv(65536)
        if not data:
            os._exit(0)
        for message in self.decoder.feed(data):
            match message:
                case Generate():
                    self.answer(message)
                case GetStats(number=number) | ResetPeaks(number=number):
                    self.say(StatsReport(number=number, stats={self.config.role: EngineStats(num_blocks=64)}))
                case Ping(number=number):
                    self.say(Alive(number=number))
                case Drain():
                    os._exit(0)
                case _:
                    pass

    def answer(self, generate: Generate) -> None:
        assert isinstance(generate.prompt, ChatPrompt)
        words = str(generate.prompt.messages[-1]["content"]).split()
        key, is_meant = generate.request_id, self.config.name in words
        if "full" in words and is_meant:
            self.say(Failed(request_id=key, code="queue_full", message=f"{self.config.name} is full"))
            return
        self.say(Accepted(request_id=key, prompt_tokens=len(words), max_tokens=8))
        if "hold" in words:
            return
        if "die" in words and is_meant and "begin" not in words:
            os._exit(3)
        text = " ".join(sorted(self.introductions.values())) if "peers" in words else self.config.name
        self.say(TokenChunk(request_id=key, text=text, token_ids=[1]))
        if "begin" in words:
            if "die" in words and is_meant:
                os._exit(3)
            return
        usage = Usage(prompt_tokens=len(words), completion_tokens=1)
        self.say(Done(request_id=key, finish_reason="stop", usage=usage, timings=Timings()))
        if "hung" in words:
            reason = "nothing was heard of it for 10 s"
            self.say(PeerState(connected=False, peer=words[words.index("hung") + 1], hung=True, reason=reason))


def main(**other: Any) -> None:
    """`other` stands in for what the configuration says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--gateway-fd", type=int)
    parser.add_argument("--control-fd", type=int)
    arguments = parser.parse_args()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    config = msgspec.structs.replace(config, **other)
    gateway, control = socket.socket(fileno=arguments.gateway_fd), socket.socket(fileno=arguments.control_fd)
    StandIn(config, gateway, control).run()
