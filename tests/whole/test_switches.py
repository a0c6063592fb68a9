"""A setting that is on or off: a flag without a value, a variable, a line of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from mtplx.cli.options import load_settings, settings_options
from mtplx.errors import SettingsError
from mtplx.settings import Settings


@click.command()
@settings_options
def show(**flags: Any) -> None:
    click.echo(load_settings(flags).reference)


@pytest.fixture(autouse=True)
def no_file_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("MTPLX_CONFIG", str(tmp_path / "config.toml"))


def test_the_flag_needs_no_value() -> None:
    assert CliRunner().invoke(show, []).output == "False\n"
    assert CliRunner().invoke(show, ["--reference"]).output == "True\n"


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("False", False), ("0", False)])
def test_the_variable_says_on_or_off(text: str, value: bool) -> None:
    assert Settings.load(environ={"MTPLX_REFERENCE": text}).reference is value


def test_a_child_gets_the_same_value(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (False, True):
        child = Settings.load({"reference": given}, environ={}).environment()
        assert Settings.load(environ=child).reference is given
        monkeypatch.setenv("MTPLX_REFERENCE", str(not given))


def test_the_file_says_it_as_toml_does(tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text("reference = true\n")
    assert Settings.load(environ={}, config=file).reference is True


def test_what_is_neither_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(
        SettingsError, match=r"MTPLX_REFERENCE = 'yes' is wrong: it must be one of 1, true, 0, false"
    ):
        Settings.load(environ={"MTPLX_REFERENCE": "yes"})
    with pytest.raises(SettingsError, match="must be text"):
        Settings.load({"front": True}, environ={})
