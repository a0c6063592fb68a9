"""A process that must not outlive its parent watches its stdin, which ends when the parent does."""

from __future__ import annotations

import os
import select
from typing import Final

STDIN: Final = 0


def stdin_ended() -> bool:
    """True once whoever holds the other end of stdin is gone; what it wrote is thrown away."""
    readable, _, _ = select.select([STDIN], [], [], 0)
    return bool(readable) and not os.read(STDIN, 4096)
