"""The keyed rule a second time, in plain integers and NumPy, from its description alone.

`python tests/keyed_numpy.py` writes the golden vectors that any implementation can be held to.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

VECTORS = Path(__file__).parent / "inference" / "vectors" / "keyed.json"
SEEDS = (0, 1, 2, 1234567, 2**32 - 1, 2**32, 0x9E3779B97F4A7C15, 2**63, 2**64 - 1)
POSITIONS = (0, 1, 2, 41, 8191, 2**31 - 1)
WIDTHS = (1, 2, 3, 7, 8, 319, 320)
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def splitmix64(seed: int) -> int:
    z = (seed + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def key(seed: int, t: int) -> tuple[int, int]:
    high, low = divmod(splitmix64(seed), 2**32)
    return low, high ^ t


def threefry2x32(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Threefry-2x32 with 20 rounds (Salmon et al., 2011)."""
    keys = (*key, 0x1BD11BDA ^ key[0] ^ key[1])
    a, b = ((word + k) % 2**32 for word, k in zip(counter, key, strict=True))
    for block in range(5):
        for turn in ROTATIONS[block % 2]:
            a = (a + b) % 2**32
            b = ((b << turn | b >> (32 - turn)) % 2**32) ^ a
        a = (a + keys[(block + 1) % 3]) % 2**32
        b = (b + keys[(block + 2) % 3] + block + 1) % 2**32
    return a, b


def bits(key: tuple[int, int], width: int) -> list[int]:
    half = (width + 1) // 2
    pairs = [threefry2x32(key, (i, i + half)) for i in range(half)]
    return [*(a for a, _ in pairs), *(b for _, b in pairs)][:width]


def gumbel(key: tuple[int, int], width: int) -> np.ndarray:
    uniform = (np.array([word >> 9 for word in bits(key, width)], dtype=np.float64) + 0.5) * 2.0**-23
    return -np.log(-np.log(uniform))


def trajectory_sha256(ids: list[int]) -> str:
    return hashlib.sha256(np.array(ids, dtype="<u4").tobytes()).hexdigest()


def vectors() -> dict:
    noise = [
        {"seed": seed, "t": t, "width": width}
        for seed, t, width in zip((SEEDS * 2)[: 2 * len(WIDTHS)], (POSITIONS * 3)[:14], WIDTHS * 2, strict=True)
    ]
    for entry in noise:
        words = bits(key(entry["seed"], entry["t"]), entry["width"])
        values = gumbel(key(entry["seed"], entry["t"]), entry["width"])
        entry |= {"bits": words[:8], "last": words[-1], "gumbel": [round(float(value), 6) for value in values[:8]]}
    trajectories = [[], [0], [1, 2, 3], [49151, 0, 2**31 - 1, 2**32 - 1], list(range(300))]
    return {
        "key": [{"seed": str(seed), "t": t, "key": key(seed, t)} for seed in SEEDS for t in POSITIONS],
        "noise": [entry | {"seed": str(entry["seed"])} for entry in noise],
        "trajectory": [{"ids": ids, "sha256": trajectory_sha256(ids)} for ids in trajectories],
    }


if __name__ == "__main__":
    blocks = [
        f' "{name}": [\n  ' + ",\n  ".join(map(json.dumps, entries)) + "\n ]"
        for name, entries in vectors().items()
    ]
    VECTORS.write_text("{\n" + ",\n".join(blocks) + "\n}\n")
