"""`mtplx keys`: make key pairs, and say which of them may connect to this broker."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote
from typing import Any, Final

import click

from mtplx.allowed import OPERATOR, PRODUCER, WORKER, Allowed, change, read
from mtplx.cli.options import load_settings, state_options
from mtplx.errors import SettingsError
from mtplx.keys import BROKER, PUBLIC, check_name, is_public_key, key_folder, load_public, make
from mtplx.paths import exists, is_file

DEFAULT_NAME: Final = "producer"
_ROW: Final = "{:<9} {:<24} {}"


@click.group()
@state_options
@click.pass_context
def keys(context: click.Context, /, **flags: Any) -> None:
    """Keys for connections between machines: who may connect, and as what.

    They lie in `keys` of --state-dir, mode 0700. The running broker sees changes within a second.
    """
    context.obj = key_folder(load_settings(flags, context.obj))


@keys.command()
@click.argument("name", default=DEFAULT_NAME)
@click.pass_obj
def new(folder: Path, name: str) -> None:
    """Make a pair of keys called NAME; `broker` is the broker's own.

    Only the public key is ever given to others. The secret one lies in a file that only you can read.
    """
    public = make(folder, name).public
    click.echo(f"public key: {public}")
    click.echo(f"secret key: {folder / name}.key_secret (keep it to yourself)")
    if name == BROKER:
        click.echo(f"Producers need: --server-key {quote(public)}")
    else:
        click.echo(f"Where the broker runs:  mtplx keys allow {quote(public)} --name {name}")
        click.echo(f"Here:                   mtplx run --key {name} --server-key PUBLIC-KEY-OF-THE-BROKER ...")


@keys.command()
@click.argument("key", metavar="NAME|PUBLIC-KEY|FILE")
@click.option("--name", help="What the list calls it; default: its name here, or the next of key1, key2 ...")
@click.option(
    "--operator", "role", flag_value=OPERATOR, help="A producer who also sees and ends the jobs of others."
)
@click.option("--worker", "role", flag_value=WORKER, help="May connect as the worker, and not as a producer.")
@click.pass_obj
def allow(folder: Path, key: str, name: str | None, role: str | None) -> None:
    """Let a key connect: as a producer, unless said otherwise. A key has one role, the one given last."""
    public, called = _found(folder, key)
    if public == _public_of(folder, BROKER):
        raise SettingsError("That is the broker's own key. Make one for who connects: mtplx keys new NAME")
    wanted = Allowed(role or PRODUCER, name or called, public)

    def edit(listed: dict[str, Allowed]) -> None:
        before = listed.pop(public, None)
        taken = {one.name for one in listed.values()}
        chosen = wanted.name or (before.name if before else _next_name(taken))
        check_name(chosen)
        if chosen in taken:
            raise SettingsError(f"Another key is called {chosen}; revoke that one, or choose another --name.")
        listed[public] = wanted._replace(name=chosen)

    change(folder, edit)
    click.echo(f"allowed as {wanted.role}: {read(folder)[public].name} {public}")


@keys.command()
@click.argument("key", metavar="NAME|PUBLIC-KEY|FILE")
@click.pass_obj
def revoke(folder: Path, key: str) -> None:
    """Let a key connect no more. Its connections end within a second; its jobs count as left by their producer."""
    gone: list[Allowed] = []

    def edit(listed: dict[str, Allowed]) -> None:
        gone.extend(one for one in listed.values() if key in (one.name, one.key))
        if not gone:
            public = _found(folder, key)[0]
            gone.extend(one for one in listed.values() if one.key == public)
        if not gone:
            raise SettingsError(f"{key} is not in the list of allowed keys; `mtplx keys list` shows it.")
        del listed[gone[0].key]

    change(folder, edit)
    click.echo(f"revoked: {gone[0].name} {gone[0].key}")


@keys.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
@click.pass_obj
def list_keys(folder: Path, as_json: bool) -> None:
    """Show the broker's public key, the pairs that lie here, and the keys that may connect."""
    made = sorted(file.name.removesuffix(PUBLIC) for file in folder.glob(f"*{PUBLIC}"))
    own = {name: load_public(folder / f"{name}{PUBLIC}") for name in made}
    broker = own.pop(BROKER, None)
    listed = list(read(folder).values())
    if as_json:
        allowed = [one._asdict() for one in listed]
        click.echo(json.dumps({"broker": broker, "own": own, "allowed": allowed}, indent=2))
        return
    click.echo(_ROW.format("ROLE", "NAME", "PUBLIC KEY"))
    if broker is not None:
        click.echo(_ROW.format("broker", BROKER, broker))
    for name, public in own.items():
        click.echo(_ROW.format("own", name, public))
    for one in listed:
        click.echo(_ROW.format(*one))


def _found(folder: Path, key: str) -> tuple[str, str]:
    """The public key that *key* means, and its name where it has one here."""
    if is_public_key(key):
        return key, ""
    if Path(key).suffix == PUBLIC and is_file(Path(key)):
        return load_public(Path(key)), Path(key).stem
    check_name(key)
    public = _public_of(folder, key)
    if public is None:
        raise SettingsError(
            f"{key!r} is neither a public key nor a file with one, and {folder} has no key of that name. "
            "`mtplx keys new` makes a pair where the producer runs, and prints its public key."
        )
    return public, key


def _public_of(folder: Path, name: str) -> str | None:
    file = folder / f"{name}{PUBLIC}"
    return load_public(file) if exists(file) else None


def _next_name(taken: set[str]) -> str:
    number = 1
    while f"key{number}" in taken:
        number += 1
    return f"key{number}"
