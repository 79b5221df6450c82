"""An address to listen on, or one line that says why it cannot be had."""

from __future__ import annotations

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
        raise InputError(
            f"{host}:{port} cannot be listened on: {error.strerror or error}; name another with --host or --port"
        ) from error
    return listening
