"""An address to listen on, or one line that says why it cannot be had, and who has it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket

from factory.core.errors import InputError


def listen(host: str, port: int) -> socket.socket:
    """A TCP socket that listens. Raises: InputError when the address is taken, or not this machine's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(2048)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        holder = _holder(port) if error.errno == errno.EADDRINUSE else ""
        raise InputError(
            f"{host}:{port} cannot be listened on: {error.strerror or error}{holder}; name another with --host or --port"
        ) from error
    return listening


def is_loopback(host: str) -> bool:
    """Can only this machine reach it?"""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _holder(port: int) -> str:
    """' by process 12 (mlflow)'; '' where the system does not tell."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid:
                return f" by process {one.pid} ({psutil.Process(one.pid).name()})"
    return ""
