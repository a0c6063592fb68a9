"""Key pairs for CURVE: how they are made, where they lie, and which of them a connection uses.

Files have the form of `zmq.auth`: `NAME.key` holds the public key, `NAME.key_secret` both. A public key is written
in Z85, 40 characters.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.utils import z85

from mtplx.endpoints import leaves_machine
from mtplx.errors import SettingsError
from mtplx.paths import exists, expanded, is_file, is_folder, private_folder
from mtplx.settings import Settings

KEY_CHARACTERS: Final = 40
BROKER: Final = "broker"
PUBLIC: Final = ".key"
SECRET: Final = ".key_secret"  # noqa: S105 - the end of a file name
# Shorter than a public key, so that neither is ever taken for the other.
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and its secret, both in Z85."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a connection to an encrypted endpoint needs: the broker's public key, and a pair of its own."""

    server: str
    own: KeyPair


def key_folder(settings: Settings) -> Path:
    """Where keys and the list of allowed ones lie."""
    return settings.state_folder / "keys"


def is_public_key(text: str) -> bool:
    """Whether *text* can be a public key."""
    try:
        return len(text) == KEY_CHARACTERS and len(z85.decode(text.encode())) == 32
    except (ValueError, KeyError, struct.error):
        return False


def check_name(name: str) -> None:
    """Refuse what cannot be the name of a key.

    Raises:
        SettingsError: saying what can.
    """
    if not NAME.fullmatch(name):
        raise SettingsError(
            f"{name!r} is no name for a key: take up to 32 letters, digits, dots, dashes and underscores, "
            "a letter or digit first."
        )


def make(folder: Path, name: str) -> KeyPair:
    """Draw a new pair and write its two files, which must not be there.

    Raises:
        SettingsError: the name is taken, or the folder cannot be used.
    """
    check_name(name)
    private_folder(folder.parent, "--state-dir")
    private_folder(folder, "--state-dir")
    try:
        # A folder of its own under the private one: whole files appear under their names, and replace none.
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as made:
            files = _drawn(Path(made), name)
            for file in files:
                file.chmod(0o600)
                os.link(file, folder / file.name, follow_symlinks=False)
    except FileExistsError:
        raise SettingsError(
            f"The key {name} exists in {folder}; choose another name, or move its two files away first."
        ) from None
    except OSError as error:
        raise SettingsError(f"The key {name} cannot be written to {folder}: {error.strerror}.") from error
    return load_pair(folder / f"{name}{SECRET}")


def _drawn(folder: Path, name: str) -> tuple[Path, Path]:
    while True:
        public, secret = (Path(file) for file in create_certificates(folder, name))
        # A key that begins with a dash would read as an option on a command line.
        if _certificate(public)[0][0].isalnum():
            # Secret first: where it exists already, nothing new appears.
            return secret, public


def load_pair(file: Path) -> KeyPair:
    """The pair in a secret key file.

    Raises:
        SettingsError: it is missing, open to others, a link, or no such file.
    """
    public, secret = _certificate(file, private=True)
    if secret is None:
        raise SettingsError(f"{file} has no secret key; name the file that ends in {SECRET}.")
    try:
        if zmq.curve_public(secret.encode()).decode() != public:
            raise SettingsError(f"The two keys in {file} do not belong together; make a new pair.")
    except (zmq.ZMQError, ValueError, UnicodeEncodeError) as error:
        raise SettingsError(f"{file} holds no key that can be used ({error}); make a new pair.") from error
    return KeyPair(public, secret)


def load_public(file: Path) -> str:
    """The public key in a key file.

    Raises:
        SettingsError: it is missing, or holds none.
    """
    return _certificate(file)[0]


def _certificate(file: Path, *, private: bool = False) -> tuple[str, str | None]:
    try:
        # A pipe must not hold us up, and a link may point to what somebody else can change.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise SettingsError(f"There is no key file {file}; `mtplx keys new` makes keys.") from None
    except OSError as error:
        raise SettingsError(f"The key file {file} cannot be opened: {_reason(file, error)}.") from error
    try:
        _check_owner(file, os.fstat(descriptor), private=private)
        # By the descriptor: it is the file that was checked.
        public, secret = load_certificate(f"/dev/fd/{descriptor}")
        found = public.decode(), None if secret is None else secret.decode()
    except (OSError, ValueError) as error:
        raise SettingsError(f"{file} is no key file; `mtplx keys new` makes keys.") from error
    finally:
        os.close(descriptor)
    if not is_public_key(found[0]):
        raise SettingsError(f"{file} holds no public key of {KEY_CHARACTERS} characters.")
    return found


def _check_owner(file: Path, found: os.stat_result, *, private: bool) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise SettingsError(f"{file} is no plain file; name a key file.")
    if private and found.st_uid != os.getuid():
        raise SettingsError(f"The secret key {file} belongs to another user; use a key of your own.")
    if private and stat.S_IMODE(found.st_mode) & 0o077:
        raise SettingsError(
            f"The secret key {file} is open to others. If nobody can have read it, run: chmod 600 {file}; "
            "else make a new one and revoke this."
        )


def _reason(file: Path, error: OSError) -> str:
    with suppress(OSError):
        if file.is_symlink():
            return "it is a link, and a key must be a file of its own"
    return str(error.strerror)


def broker_pair(settings: Settings) -> KeyPair:
    """The broker's own pair.

    Raises:
        SettingsError: there is none, or its folder or file is open to others.
    """
    folder = key_folder(settings)
    if not exists(folder / f"{BROKER}{SECRET}"):
        raise SettingsError(
            f"Encryption needs a key of the broker, and {folder} has none. Run: mtplx keys new {BROKER}"
        )
    private_folder(folder, "--state-dir")
    return load_pair(folder / f"{BROKER}{SECRET}")


def credentials(settings: Settings, endpoint: str) -> Credentials | None:
    """What a client or worker shows at *endpoint*; None where it goes without encryption.

    tcp beyond this machine is always encrypted; on loopback with `--curve`, or where `--server-key` is
    given. On the broker's machine its own pair serves where no other is given.

    Raises:
        SettingsError: a key is missing, cannot be read, or is open to others.
    """
    if not endpoint.startswith("tcp://"):
        return None
    if not (leaves_machine(endpoint) or settings.curve or settings.server_key):
        return None
    why = f"{endpoint} leaves this machine" if leaves_machine(endpoint) else f"{endpoint} is to be encrypted"
    server = _server_key(settings, why)
    if not settings.key and not settings.server_key:
        # Where the broker's own key lies, whoever can read it is who runs the broker.
        return Credentials(server, broker_pair(settings))
    if not settings.key:
        raise SettingsError(
            f"{why}, which needs a key of your own: `mtplx keys new NAME` makes one and says who must allow it; "
            "then give --key NAME."
        )
    return Credentials(server, load_pair(_secret_file(settings)))


def _server_key(settings: Settings, why: str) -> str:
    given = settings.server_key
    if is_public_key(given):
        return given
    ours = key_folder(settings) / f"{BROKER}{PUBLIC}"
    if given and not is_file(expanded(given)):
        raise SettingsError(
            f"--server-key {given!r} is neither a public key of {KEY_CHARACTERS} characters nor a file with one."
        )
    if not given and not is_file(ours):
        raise SettingsError(
            f"{why}, which needs the broker's public key: give it with --server-key. `mtplx keys list` shows it "
            "where the broker runs."
        )
    return load_public(expanded(given) if given else ours)


def _secret_file(settings: Settings) -> Path:
    given = settings.key
    if os.sep in given or given.endswith(SECRET):
        return expanded(given)
    check_name(given)
    folder = key_folder(settings)
    if is_folder(folder):
        private_folder(folder, "--state-dir")
    return folder / f"{given}{SECRET}"
