"""Four kinds of text: a prompt and the answer to it, as ids of SmolLM2's tokenizer where that is pulled, else of words."""

from __future__ import annotations

import re
from typing import NamedTuple

from tokenizers import Tokenizer

from mtplx.settings import Settings

SOURCE = '''import json
import time
from pathlib import Path


class Cache:
    """Keeps answers of a slow service in a file, each for a limited time."""

    def __init__(self, path, lifetime=3600):
        self.path = Path(path)
        self.lifetime = lifetime
        self.entries = {}
        if self.path.exists():
            self.entries = json.loads(self.path.read_text())

    def get(self, key):
        entry = self.entries.get(key)
        if entry is None:
            return None
        if time.time() - entry["stored"] > self.lifetime:
            del self.entries[key]
            return None
        return entry["value"]

    def put(self, key, value):
        self.entries[key] = {"value": value, "stored": time.time()}
        self.path.write_text(json.dumps(self.entries))

    def clear(self):
        self.entries = {}
        if self.path.exists():
            self.path.unlink()


def fetch(cache, key, load):
    value = cache.get(key)
    if value is None:
        value = load(key)
        cache.put(key, value)
    return value
'''

EDITS = (
    ("lifetime", "max_age"),
    (
        '        self.entries[key] = {"value"',
        '        if value is None:\n            return\n        self.entries[key] = {"value"',
    ),
    ("            self.path.unlink()\n", "            self.path.unlink(missing_ok=True)\n"),
    (
        "def fetch(cache, key, load):\n",
        'def fetch(cache, key, load):\n    """The value of *key*, loaded once."""\n',
    ),
)

REPORT = """The harbour of Lindvik was built in 1883, when the herring fleet of the northern coast had grown to more than
two hundred boats. The first breakwater, made of timber and loose stone, was destroyed by the storm of November 1889,
which sank eleven ships and drowned thirty-four men. The engineer Ingrid Solberg then proposed a curved wall of
granite blocks, each weighing nine tonnes, on a bed of rubble. "A straight wall fights the sea," she wrote to the
council, "and a curved wall lets it pass and tires it out." The council hesitated for two years because of the cost of
410,000 crowns, but the insurance companies of the capital agreed to pay one third. Work began in the spring of 1892
and ended in the autumn of 1897. Since then the wall has been repaired four times, and it has never been breached.
Today the harbour serves ferries and a small museum, and the herring fleet has shrunk to six boats."""

SUMMARY = """Here is a summary with the most important quotes.

The harbour of Lindvik was built in 1883 for a herring fleet of more than two hundred boats. Its first breakwater, made
of timber and loose stone, was destroyed by the storm of November 1889, which sank eleven ships and drowned thirty-four
men. The engineer Ingrid Solberg answered with a curved wall of granite blocks, each weighing nine tonnes. As she wrote
to the council: "A straight wall fights the sea, and a curved wall lets it pass and tires it out." Because of the cost of
410,000 crowns the council hesitated for two years, until the insurance companies of the capital agreed to pay one third.

Work began in the spring of 1892 and ended in the autumn of 1897. The wall has been repaired four times since, and
"it has never been breached". Today the harbour serves ferries and a small museum."""

CHAT = """Good question! Bread dough rises because yeast eats the sugars in the flour and gives off carbon dioxide, and the
gluten holds the gas in little bubbles. If your dough does not rise, there are usually three reasons:

1. The yeast is old. Stir a spoonful into warm water with a pinch of sugar: if it does not foam within ten minutes, buy
fresh yeast.
2. The kitchen is too cold. Dough rises best between 24 and 28 degrees. Put the bowl into the oven with only the light on.
3. There is too much salt, or it touched the yeast directly. Mix the salt into the flour first.

In your case I would try the first test, because you wrote that the packet has been open since last winter. If the yeast
foams, give the dough more time instead: a cold dough may need three or four hours. Do not add more yeast, or the bread
will taste of it. And if you want the best flavour, let the dough rest in the fridge overnight and bake it the next day."""

STORY = """The lamp had burned for nineteen years without a night of rest, and so had Maren. On the first evening of spring she
climbed the hundred and four steps as usual, a can of oil in one hand and her father's coat over her arm, and found an
envelope leaning against the glass. Nobody came to the island in March. There was no boat below, no footprint in the wet
sand, only gulls quarrelling over something silver.

She did not open it at once. She trimmed the wick, polished the brass, wrote the hour into the book, and when the beam
began its slow walk across the water she sat down on the floor and broke the seal. Inside lay a pressed flower, blue and
thin as smoke, and a single line in a hand she had last seen on a shopping list when she was seven years old.

Keep the light on one more night, it said. I can almost see you.

Maren laughed, because the alternative was unbearable, and put the flower between two pages of weather. Then she opened
every shutter, carried up the spare lamps from the cellar, and lit them all, until the tower stood like a candle on the
edge of the world and the fishermen twenty miles away crossed themselves and turned their boats toward home."""


class Text(NamedTuple):
    """What a job reads and what it is to write."""

    kind: str
    prompt: list[int]
    answer: list[int]


def texts() -> list[Text]:
    """All four kinds."""
    edited = SOURCE
    for old, new in EDITS:
        edited = edited.replace(old, new)
    told = "Rename lifetime to max_age, store no None, let clear() not mind a missing file, and write the whole file again."
    pairs = {
        "code edit": (f"```python\n{SOURCE}```\n{told}", f"```python\n{edited}```\n"),
        "summary with quotes": (f"{REPORT}\n\nSummarise this report and quote its main sentences.", SUMMARY),
        "chat": ("My bread dough does not rise. The packet of yeast has been open since last winter. Why?", CHAT),
        "free story": ("Write a short story about a lighthouse keeper who finds a letter.", STORY),
    }
    encode = _encoder()
    return [Text(kind, encode(prompt), encode(answer)) for kind, (prompt, answer) in pairs.items()]


def _encoder():
    found = sorted((Settings.load().cache_dir / "models").glob("smollm2-135m*/tokenizer.json"))
    if found:
        tokenizer = Tokenizer.from_file(str(found[0]))
        return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    words = {}
    return lambda text: [words.setdefault(word, len(words)) for word in re.findall(r"\w+|\s+|.", text)]
