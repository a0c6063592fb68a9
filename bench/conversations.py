"""Four kinds of text as people ask for them, through the model's chat template; two conversations of each.

The answer to a code edit has begun with what stands above the file's first definition, as an editor begins it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CODE, SUMMARY, CHAT, STORY = "code edit", "summary with quotes", "chat", "free story"

CACHE = '''import json
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


def fetch(cache, key, load):
    value = cache.get(key)
    if value is None:
        value = load(key)
        cache.put(key, value)
    return value
'''

ORDERS = '''from dataclasses import dataclass, field
from datetime import date


@dataclass
class Line:
    """One article of an order."""

    article: str
    count: int
    price: float

    def total(self):
        return self.count * self.price


@dataclass
class Order:
    """What a customer wants, and when it has to be there."""

    customer: str
    due: date
    lines: list = field(default_factory=list)

    def add(self, article, count, price):
        if count < 1:
            raise ValueError("an order has at least one article")
        self.lines.append(Line(article, count, price))

    def total(self):
        return sum(line.total() for line in self.lines)

    def late(self, today):
        return today > self.due
'''

HARBOUR = """\
The harbour of Lindvik was built in 1883, when the herring fleet of the northern coast had grown to more than
two hundred boats. The first breakwater, made of timber and loose stone, was destroyed by the storm of
November 1889, which sank eleven ships and drowned thirty-four men. The engineer Ingrid Solberg then proposed
a curved wall of granite blocks, each weighing nine tonnes, on a bed of rubble. "A straight wall fights the
sea," she wrote to the council, "and a curved wall lets it pass and tires it out." The council hesitated for
two years because of the cost of 410,000 crowns, but the insurance companies of the capital agreed to pay one
third. Work began in the spring of 1892 and ended in the autumn of 1897. Since then the wall has been repaired
four times, and it has never been breached."""

LIBRARY = """\
The town library of Marsten reopened on Monday after a renovation of fourteen months. The reading room on the
ground floor now holds sixty seats instead of twenty-eight, and the children's department has moved to the
former archive, which was dried out and fitted with new windows. "We have been a store of books with a few
chairs," said the director, Amal Haddad, "and we wanted to become a place where people stay." The work cost
2.3 million and was paid for by the county, by a foundation, and by 1,140 readers who bought a brick each. The
library lends 9,000 books a month. From March on it will be open on Sundays, and a repair workshop for
bicycles and radios will use its cellar."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What was said, question and answer in turns, and how the next answer begins."""

    kind: str
    said: tuple[str, ...]
    begun: str = ""

    def ids(self, tokenizer: Any) -> list[int]:
        """The prompt, by the chat template of *tokenizer*."""
        roles = ("user", "assistant")
        messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(self.said)]
        ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return ids + (tokenizer.encode(self.begun, add_special_tokens=False) if self.begun else [])

    @property
    def raw(self) -> list[int]:
        """The same for a model without tokenizer, whose ids are bytes."""
        return list("\n".join((*self.said, self.begun)).encode()[-400:])


def edit(source: str, what: str, new: str) -> Conversation:
    """*what* in *source* is to be called *new*."""
    asked = f"Rename {what} to {new} in this code and write the whole file again:\n\n```python\n{source}```"
    head, mark, _ = source.partition('"""\n')
    begun = f"Here is the whole file with {what} renamed to {new}:\n\n```python\n{head}{mark}"
    return Conversation(CODE, (asked,), begun)


def conversations() -> Sequence[Conversation]:
    """All of them, kind after kind."""
    quote = "Summarize this report and quote its most important sentences word for word:\n\n"
    bread = "My bread dough does not rise. The packet of yeast has been open since last winter. Why?"
    trip = "I have a day in a small town by the sea, and it will rain. What could I do? Give me a plan."
    keeper = "Write a short story about a lighthouse keeper who finds a letter without a stamp on the stairs."
    clock = "Write a story about a girl who repairs the clock of a town where nobody is ever late."
    return (
        edit(CACHE, "the function fetch", "load_cached"),
        edit(ORDERS, "the method late", "is_late"),
        Conversation(SUMMARY, (quote + HARBOUR,)),
        Conversation(SUMMARY, (quote + LIBRARY,)),
        Conversation(CHAT, (bread,)),
        Conversation(CHAT, (trip,)),
        Conversation(STORY, (keeper,)),
        Conversation(STORY, (clock,)),
    )
