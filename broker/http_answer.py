"""What the HTTP port answers: bytes, their kind, and what a browser may do with them."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).with_name("page.html")
# Nothing from elsewhere, nothing stored, no frame around it; what is read here stays with who read it.
HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NOTHING: Final = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True, slots=True)
class Answer:
    """A status code, a body and its content type. policy: its Content-Security-Policy."""

    code: int
    kind: str
    body: bytes
    policy: str = NOTHING


def text_answer(code: int, sentence: str) -> Answer:
    """An answer of one sentence."""
    return Answer(code, "text/plain; charset=utf-8", f"{sentence}\n".encode())


def page_answer() -> Answer:
    """The page: one file, whose own style and script are the only ones that may run in it."""
    text = PAGE.read_text(encoding="utf-8")
    style, script = (_hash(text, tag) for tag in ("style", "script"))
    policy = f"{NOTHING}; style-src {style}; script-src {script}; connect-src 'self'; img-src data:"
    return Answer(200, "text/html; charset=utf-8", text.encode(), policy)


def _hash(text: str, tag: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    assert found is not None, f"the page has no <{tag}>"
    return f"'sha256-{b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"
