"""The trajectory of an answer: its token ids, and the hash by which two answers are compared."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


def packed(ids: Sequence[int]) -> bytes:
    """The ids as little-endian uint32, the bytes that are hashed."""
    return struct.pack(f"<{len(ids)}I", *ids)


def trajectory_sha256(ids: Sequence[int]) -> str:
    """Hex SHA-256 over all ids of an answer, up to and including the one that ended it."""
    return hashlib.sha256(packed(ids)).hexdigest()
