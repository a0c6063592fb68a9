"""Tools that some tests need and a machine may lack."""

import os
import shutil

import pytest


def need(tool: str) -> str:
    """The path of *tool*; skips the test where it is missing, or fails it where REQUIRE_TOOLS is set."""
    path = shutil.which(tool)
    if path is not None:
        return path
    message = f"{tool} is not installed"
    if os.environ.get("REQUIRE_TOOLS"):
        pytest.fail(f"{message}, and REQUIRE_TOOLS is set")
    pytest.skip(message)
