"""Where the broker's HTTP port is, as `--http` and `--http-remote` say it; and what an HTTP address is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from mtplx.errors import SettingsError

OFF: Final = "off"
AUTO: Final = "auto"
DEFAULT: Final = "127.0.0.1:8000"
MAX_PORT: Final = 65_535
_PLACE: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[\w.-]+):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class HttpPlace:
    """An address to bind. port 0 is any free one; *yields*: where the port is taken, any free one will do."""

    host: str
    port: int
    yields: bool = False

    def url(self, port: int) -> str:
        """What a browser on this machine opens, for the *port* that was bound."""
        address = ip_address(self.host)
        host = self.host
        if address.is_unspecified:
            host = "127.0.0.1" if address.version == 4 else "::1"
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def http_place(text: str, *, remote: bool) -> HttpPlace | None:
    """The place that *text* names; None where there is to be none. *remote*: other machines may reach it.

    Raises:
        SettingsError: it is no address, or other machines would reach it and nobody said that they may.
    """
    if text in ("", OFF):
        return None
    found = _PLACE.fullmatch(DEFAULT if text == AUTO else text)
    host = "" if found is None else found["host"].strip("[]")
    try:
        address = ip_address("127.0.0.1" if host.lower() == "localhost" else host)
    except ValueError:
        address = None
    if found is None or address is None or int(found["port"]) > MAX_PORT:
        raise SettingsError(
            f"--http {text!r} is no address; write {DEFAULT}, or auto for that or another free port, or {OFF}."
        )
    if not (remote or address.is_loopback):
        raise SettingsError(
            f"--http {text} is reached from other machines, without encryption and without keys: whoever reaches "
            "it reads the state of line and worker (never prompts or answers). Write "
            f"127.0.0.1:{found['port']}, or add --http-remote if that is meant."
        )
    return HttpPlace(str(address), int(found["port"]), yields=text == AUTO)


def is_http_address(text: str) -> bool:
    """Whether *text* is an address by http or https that a program may ask."""
    try:
        found = urlsplit(text)
        # A port that is none raises when it is looked at.
        return found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:
        return False
