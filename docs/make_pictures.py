# ruff: noqa: INP001 - a script beside the pages it serves
"""Takes the pictures of docs/operate.md: `python docs/make_pictures.py [FOLDER]`. Needs Chromium.

A real broker, the worker double with a script, and producers that wait: the page as it is, in three states.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tools import need  # noqa: E402
from whole.browser import Browser  # noqa: E402
from whole.page_states import STATES, page_service  # noqa: E402

SIZE = (1280, 800)


def main() -> None:
    """Write one picture for each state, light, and one of them dark."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures"
    with page_service() as (service, url), Browser(need("chromium")) as browser:
        browser.screen(*SIZE)
        browser.open(url)
        for name, reach in STATES.items():
            browser.until(reach(service), "#headline")
            browser.until("job 2, ended" if name == "idle" else "E_EXPIRED")
            for scheme in ("light", "dark") if name == "running" else ("light",):
                browser.screen(*SIZE, scheme)
                browser.picture(folder / f"page-{name}{'' if scheme == 'light' else '-dark'}.png")
            browser.screen(*SIZE)


if __name__ == "__main__":
    main()
