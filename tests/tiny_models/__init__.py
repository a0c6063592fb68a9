"""Models small enough to make in a test, and a room to run jobs on one: no download."""

from tiny_models.bare import BARE, VOCABULARY, bare
from tiny_models.classic import SENTENCE, Kind, make_llama, make_mamba
from tiny_models.room import Room
from tiny_models.zoo import FAMILIES, VARIANTS, ZOO, make_tiny

__all__ = [
    "BARE",
    "FAMILIES",
    "SENTENCE",
    "VARIANTS",
    "VOCABULARY",
    "ZOO",
    "Kind",
    "Room",
    "bare",
    "make_llama",
    "make_mamba",
    "make_tiny",
]
