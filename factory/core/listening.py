"""An address to listen on, or one line that says why it cannot be had."""

from __future__ import annotations

import ipaddress
import socket

from factory.core.errors import InputError


def listen(host: str, port: int) -> socket.socket:
    """A TCP socket that listens. Raises: InputError when the address is taken, or not this machine's."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=family == socket.AF_INET6)
    except OSError as error:
        why = error.strerror.partition(" (while")[0] if error.strerror else error
        raise InputError(f"{host}:{port} cannot be listened on: {why}; name another with --host or --port") from error


def is_loopback(host: str) -> bool:
    """Can only this machine reach it?"""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
