"""The host names by which people reach MLflow's pages.

MLflow's server refuses requests with an unknown Host, and changes sent by pages of another Origin. Otherwise any web page that a person opens could
point its own name to this machine (DNS rebinding), and approve releases with that person's login.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

from factory.core.errors import InputError
from factory.core.listening_socket import is_loopback

PORTS = {"http": 80, "https": 443}  # ports that browsers leave out
OF_THIS_MACHINE = ("localhost", "127.0.0.1", "[::1]")
ANY_PORT = ("localhost:*", "127.0.0.1:*", "[[]::1]:*")  # patterns of fnmatch, because a tunnel may end at any port
PLAIN = re.compile(
    r"[a-z0-9]([a-z0-9_.-]{0,251}[a-z0-9])?"
)  # no characters of patterns, and no comma, because commas separate names


@dataclass(frozen=True)
class HostName:
    """A host name, with or without scheme and port: ``gpu-box``, ``gpu-box:8080``, ``https://mlflow.example.org``, or an address."""

    host: str  # in lower case; IPv6 in brackets
    scheme: str = ""  # empty: http or https
    port: int | None = None  # None: the server's own port, or the scheme's default port

    @classmethod
    def parse(cls, text: str) -> HostName:
        """Parse the text of ``--name``. Raises: InputError."""
        scheme, _, rest = text.strip().lower().rstrip("/").rpartition("://")
        try:
            parts = urlsplit(f"//{bracket_ipv6(rest)}")
            host, port = bracket_ipv6(parts.hostname or ""), parts.port
        except ValueError:
            host, port = "", None
        whole = (host if port is None else f"{host}:{port}") == bracket_ipv6(rest)
        if not whole or port == 0 or scheme not in ("", *PORTS) or not (host.startswith("[") or PLAIN.fullmatch(host)):
            raise InputError(
                "host_names.no_host",
                "--name {name!r} is not a host. Examples: gpu-box, 10.0.0.5:8080, https://mlflow.example.org",
                name=text,
            )
        return cls(host, scheme, port)

    def list_host_headers(self, port: int) -> list[str]:
        """The values of the header Host in requests to this name, when the server listens on ``port``."""
        return [self.host, f"{self.host}:{self.port or PORTS.get(self.scheme, port)}"]

    def list_origin_headers(self, port: int) -> list[str]:
        """The values of the header Origin in requests from pages under this name."""
        schemes = [self.scheme] if self.scheme else list(PORTS)
        if self.port:
            return [_origin(scheme, self.host, self.port) for scheme in schemes]
        plain = [f"{scheme}://{self.host}" for scheme in schemes]
        return plain + ([] if self.scheme else [_origin(scheme, self.host, port) for scheme in schemes])

    def make_mlflow_url(self, port: int) -> str:
        """The URL that opens MLflow under this name."""
        if self.scheme and not self.port:
            return f"{self.scheme}://{self.host}"
        scheme = self.scheme or ("https" if self.port == PORTS["https"] else "http")
        return _origin(scheme, self.host, self.port or port)


def bracket_ipv6(host: str) -> str:
    """An IPv6 address in brackets, as in a URL; any other host unchanged."""
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 and "%" not in host else host
    except ValueError:
        return host


def choose_server_names(host: str, given_names: Sequence[str] = ()) -> list[HostName]:
    """The ``given_names``, or else this machine's own names; no name if ``host`` is a loopback address. Raises: InputError."""
    own = [] if given_names or is_loopback(host) else list_names_of_this_machine(host)
    return [HostName.parse(name) for name in dict.fromkeys(given_names or own)]


def list_names_of_this_machine(host: str) -> list[str]:
    """``host`` (unless it means all addresses), this machine's name, and this machine's addresses."""
    first = [] if _is_unspecified(host) else [host]
    families = (socket.AF_INET, socket.AF_INET6)
    interfaces = psutil.net_if_addrs().values()
    addresses = [entry.address for interface in interfaces for entry in interface if entry.family in families]
    machine = socket.gethostname().lower()
    named = [machine] if PLAIN.fullmatch(machine) else []
    found = [name for name in (*first, *named, *addresses) if not is_loopback(name) and "%" not in name]
    return list(dict.fromkeys(found))


def make_mlflow_server_options(names: Sequence[HostName], port: int) -> list[str]:
    """Options for ``mlflow server`` that make it answer to these names and on this machine. Without names: no options."""
    if not names:
        return []
    hosts = [*OF_THIS_MACHINE, *ANY_PORT, *(host for name in names for host in name.list_host_headers(port))]
    origins = [
        origin for name in names for origin in name.list_origin_headers(port)
    ]  # MLflow adds those of OF_THIS_MACHINE
    return [
        "--allowed-hosts",
        ",".join(dict.fromkeys(hosts)),
        "--cors-allowed-origins",
        ",".join(dict.fromkeys(origins)),
    ]


def _origin(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://{host}" if PORTS[scheme] == port else f"{scheme}://{host}:{port}"


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
