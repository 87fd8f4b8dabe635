"""Listening sockets of the gateway, bound before anything slow starts, so that a taken port is known at once."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable

BACKLOG = 1024
NO_ADDRESS = "can't listen on {}: the name has no address on this machine. Use --host 127.0.0.1"


class CannotListen(Exception):
    """Why, and what to do."""


def bind_sockets(host: str, port: int) -> list[socket.socket]:
    """One socket for each address of `host`. Port 0 takes any free port, the same for all. Never another port."""
    sockets: list[socket.socket] = []
    try:
        for family, address in _addresses(host, port):
            sockets.append(_bind(family, (address[0], port, *address[2:])))
            port = sockets[0].getsockname()[1]
    except UnicodeError:  # such as an empty part of a name
        raise CannotListen(NO_ADDRESS.format(host)) from None
    except OSError as error:
        close_all(sockets)
        raise CannotListen(explain(error, host, port)) from None
    return sockets


def close_all(sockets: Iterable[socket.socket]) -> None:
    for bound in sockets:
        bound.close()


def explain(error: OSError, host: str, port: int) -> str:
    """What a failed bind means to the user."""
    if isinstance(error, socket.gaierror):
        return NO_ADDRESS.format(host)
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is in use, perhaps by another kvgate. "
            f"`lsof -nP -iTCP:{port} -sTCP:LISTEN` shows by what; stop it, or choose another with --port"
        )
    if error.errno == errno.EACCES:
        return f"not allowed to listen on port {port}; choose one above 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine; use --host 127.0.0.1 or 0.0.0.0"
    return f"can't listen on {host} port {port}: {os.strerror(error.errno or 0)}"


def url_of(host: str, port: int) -> str:
    """What a client on this machine uses."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    return (
        f"http://[{reachable}]:{port}"
        if ":" in reachable.strip("[]") and "[" not in reachable
        else (f"http://{reachable}:{port}")
    )


def _addresses(host: str, port: int) -> list[tuple[int, tuple[str, int] | tuple[str, int, int, int]]]:
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))  # type: ignore[misc]


def _bind(family: int, address: tuple[object, ...]) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere it would let two programs share the port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.setblocking(False)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
