"""Tools that some tests need and a machine may lack."""

import importlib.util
import os
import shutil

import pytest


def need(tool: str) -> str:
    """The path of *tool*; skips the test where it is missing, or fails it where REQUIRE_TOOLS is set."""
    path = shutil.which(tool)
    if path is None:
        _missing(tool)
    return path


def need_library(name: str) -> None:
    """Skip the test where the library *name* is missing, or fail it where REQUIRE_TOOLS is set."""
    parent = name.split(".", maxsplit=1)[0]
    if importlib.util.find_spec(parent) is None or importlib.util.find_spec(name) is None:
        _missing(name)


def _missing(what: str) -> None:
    message = f"{what} is not installed"
    if os.environ.get("REQUIRE_TOOLS"):
        pytest.fail(f"{message}, and REQUIRE_TOOLS is set")
    pytest.skip(message)
