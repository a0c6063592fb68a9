# ruff: noqa: INP001 - a script beside the files it makes
"""Makes the example service files of this folder: `python deploy/make_services.py`.

They are what `mtplx service print` gives for the defaults, with example paths. `mtplx service install` writes
those of your machine.
"""

from __future__ import annotations

from pathlib import Path

from mtplx.services import PROGRAMS, plist, systemd_unit, unit_of
from mtplx.settings import Settings

HERE = Path(__file__).parent
MAC = Path("/Users/you")
LINUX = Path("/home/you")


def files() -> dict[str, bytes]:
    """The text of each file by its name."""
    found = {}
    for name in PROGRAMS:
        for home, logs, form in (
            (MAC, MAC / "Library" / "Logs" / "mtplx", plist),
            (LINUX, LINUX / ".mtplx" / "logs", systemd_unit),
        ):
            python = str(home / "mtplx" / ".venv" / "bin" / "python")
            unit = unit_of(name, Settings(), {}, home=home, logs=logs, python=python)
            found[f"{unit.label}.plist" if form is plist else unit.unit] = form(unit)
    return found


if __name__ == "__main__":
    for name, text in files().items():
        (HERE / name).write_bytes(text)
