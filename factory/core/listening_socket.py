"""Opens a listening socket, or raises an error of one line that says why the address is not available."""

from __future__ import annotations

import ipaddress
import socket

from factory.core.errors import InputError


def open_listening_socket(host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens. Raises: InputError when another program uses the address, or the machine does not have it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=family == socket.AF_INET6)
    except OSError as error:
        why = error.strerror.partition(" (while")[0] if error.strerror else error
        raise InputError(
            "listening_socket.no_address",
            "The factory cannot listen on {host}:{port}: {why}. Choose another address with --host or --port",
            host=host,
            port=port,
            why=str(why),
        ) from error


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
