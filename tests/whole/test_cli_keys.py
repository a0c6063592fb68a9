"""`mtplx keys`: pairs are made, allowed, revoked and listed, and what is wrong is said in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from whole.keyed import Keyed

from mtplx.allowed import read
from mtplx.cli.main import main
from mtplx.keys import load_public


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("MTPLX_CONFIG", str(tmp_path / "config.toml"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state" / "keys"


@pytest.fixture
def keys(tmp_path: Path):
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["keys", "--state-dir", str(tmp_path / "state"), *arguments])

    return run


def said(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.output


def listed(keys) -> list[tuple[str, str]]:
    return [(one["role"], one["name"]) for one in json.loads(said(keys("list", "--json")))["allowed"]]


def test_new_shows_the_public_key_and_what_to_do_next_but_never_the_secret(keys, folder: Path) -> None:
    output = said(keys("new", "laptop"))
    public = load_public(folder / "laptop.key")
    assert f"public key: {public}" in output
    assert "mtplx keys allow" in output
    secret = (folder / "laptop.key_secret").read_text().rpartition('secret-key = "')[2].partition('"')[0]
    assert len(secret) == 40
    assert secret not in output


def test_the_brokers_own_pair_tells_what_producers_need(keys) -> None:
    assert "--server-key" in said(keys("new", "broker"))


def test_a_public_key_can_be_given_to_a_shell_and_is_no_option(keys, folder: Path) -> None:
    for number in range(8):
        said(keys("new", f"k{number}"))
        assert load_public(folder / f"k{number}.key")[0].isalnum()


def test_keys_are_allowed_by_name_by_key_and_by_file_and_have_one_role(keys, folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        said(keys("new", name))
    public = {name: load_public(folder / f"{name}.key") for name in "abc"}
    said(keys("allow", "a"))
    said(keys("allow", public["b"], "--operator"))
    copied = tmp_path / "carried.key"
    copied.write_text((folder / "c.key").read_text())
    said(keys("allow", str(copied), "--worker"))
    assert listed(keys) == [("producer", "a"), ("operator", "key1"), ("worker", "carried")]
    said(keys("allow", "a", "--operator"))
    said(keys("allow", public["b"]))
    assert sorted(listed(keys)) == [("operator", "a"), ("producer", "key1"), ("worker", "carried")]
    assert all(one.key == public[name] for one, name in zip(read(folder).values(), "cab", strict=True))


def test_keys_are_revoked_by_name_and_by_key(keys, folder: Path) -> None:
    for name in ("a", "b", "c"):
        said(keys("new", name))
        said(keys("allow", name))
    said(keys("revoke", "a"))
    said(keys("revoke", load_public(folder / "b.key")))
    assert listed(keys) == [("producer", "c")]
    assert "revoked: c" in said(keys("revoke", "c"))
    assert keys("revoke", "c").exit_code == 2


def test_the_table_shows_the_broker_own_pairs_and_allowed_keys(keys) -> None:
    for name in ("broker", "a"):
        said(keys("new", name))
    said(keys("allow", "a"))
    rows = [line.split()[:2] for line in said(keys("list")).splitlines()]
    assert rows == [["ROLE", "NAME"], ["broker", "broker"], ["own", "a"], ["producer", "a"]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("new", "../up"), "no name for a key"),
        (("new", "x" * 33), "no name for a key"),
        (("new", "a"), "exists"),
        (("allow", "nobody"), "mtplx keys new"),
        (("allow", "#" * 40), "no name for a key"),
        (("allow", "broker"), "broker's own key"),
        (("allow", "b", "--name", "a"), "Another key is called a"),
        (("allow", "b", "--name", "two words"), "no name for a key"),
        (("revoke", "b"), "not in the list"),
    ],
)
def test_what_is_wrong_is_said_with_exit_code_2(keys, arguments: tuple[str, ...], words: str) -> None:
    for name in ("broker", "a", "b"):
        said(keys("new", name))
    said(keys("allow", "a"))
    wrong = keys(*arguments)
    assert (wrong.exit_code, words in wrong.output) == (2, True), wrong.output
    assert listed(keys) == [("producer", "a")]


def test_a_remote_producer_is_set_up_with_commands_alone() -> None:
    """As docs/security.md tells it, with two state folders for two machines."""
    place = Keyed()
    try:
        place.start()
        here = place.run / "other-machine"

        def run(*arguments: str) -> Result:
            return CliRunner().invoke(main, list(arguments))

        said(run("keys", "--state-dir", str(here), "new", "laptop"))
        public = load_public(here / "keys" / "laptop.key")
        said(run("keys", "--run-dir", str(place.run), "allow", public, "--name", "laptop"))
        options = ("--front", place.front, "--state-dir", str(here), "--key", "laptop")
        place.producer(place.key("first")).socket.close()
        asked = run(*options, "--server-key", place.server.public, "health", "--json")
        assert json.loads(said(asked))["worker"]["state"] == "absent"
        said(run("keys", "--run-dir", str(place.run), "revoke", "laptop"))
        refused = run(*options, "--server-key", place.server.public, "health")
        assert (refused.exit_code, "does not allow this key" in refused.output) == (6, True)
    finally:
        place.close()
