"""The prompts whose answers a head learns from: a set of our own, or a file's.

Ours are made from lists of words, the same ones for a seed: edits of code, summaries with quotes, chat, stories,
and questions of all kinds.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from mtplx.errors import SettingsError

COUNT: Final = 6000
_WORDS: Final[dict[str, list[str]]] = tomllib.loads(
    Path(__file__).with_name("words.toml").read_text(encoding="utf-8")
)


class Prompt(NamedTuple):
    """asked: what a user says. begun: how the answer begins, as an editor begins it; often empty."""

    asked: str
    begun: str = ""


def chosen(file: Path | None, seed: int) -> list[Prompt]:
    """The prompts of *file*, or ours; in a random order that *seed* decides.

    Raises:
        SettingsError: the file cannot be read, or a line of it is no prompt.
    """
    found = made(COUNT, seed) if file is None else read(file)
    random.Random(seed).shuffle(found)  # noqa: S311 - no secret
    return found


def read(file: Path) -> list[Prompt]:
    """A prompt a line: text, or a JSON object with `prompt` and perhaps `begun`.

    Raises:
        SettingsError: naming the file and the line.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--prompts: {file} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            found.append(Prompt(line.strip()))
            continue
        try:
            told = json.loads(line)
            found.append(Prompt(str(told["prompt"]), str(told.get("begun", ""))))
        except (ValueError, LookupError, RecursionError) as error:
            raise SettingsError(
                f'--prompts: line {number} of {file} is neither text nor an object like {{"prompt": "..."}}.'
            ) from error
    # Twice the same would be held out and learnt from.
    return list(dict.fromkeys(found))


def ids(prompts: Sequence[Prompt], tokenizer: Any, longest: int) -> list[list[int]]:
    """The ids of those that have *longest* at most, through the chat template where the model has one."""
    found = []
    for one in prompts:
        if getattr(tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": one.asked}]
            start = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
        else:
            start = list(tokenizer.encode(one.asked))
        start += tokenizer.encode(one.begun, add_special_tokens=False) if one.begun else []
        if 0 < len(start) <= longest:
            found.append(start)
    return found


def made(count: int, seed: int) -> list[Prompt]:
    """*count* distinct prompts of ours."""
    luck = random.Random(f"prompts {seed}")  # noqa: S311 - no secret
    kinds: tuple[Callable[[random.Random], Prompt], ...] = (
        _edit,
        _edit,
        _code,
        _summary,
        _summary,
        _chat,
        _chat,
        _story,
        _story,
        _asked,
        _asked,
    )
    found: dict[Prompt, None] = {}
    while len(found) < count:
        found[kinds[luck.randrange(len(kinds))](luck)] = None
    return list(found)


def _pick(luck: random.Random, kind: str) -> str:
    return luck.choice(_WORDS[kind])


# Code.

# Bodies of methods.
_BODIES: Final = (
    """\
        self.{one} = {argument}
        return self.{other}
""",
    """\
        if {argument} is None:
            return None
        self.{one} = {argument}
        return self
""",
    """\
        if not {argument}:
            raise ValueError("{argument} must not be empty")
        self.{one} = {argument}
""",
    """\
        for item in {argument}:
            if item == self.{one}:
                return item
        return self.{other}
""",
    """\
        result = []
        for item in {argument}:
            result.append((item, self.{one}))
        return result
""",
    """\
        print(f"{{self.{one}}}: {{{argument}}}")
        self.{other} = {argument}
""",
    """\
        try:
            self.{one} = int({argument})
        except ValueError:
            self.{one} = 0
        return self.{one}
""",
    """\
        return {argument} == self.{one} and self.{other} is not None
""",
    """\
        total = 0
        for {argument} in self.{one}:
            total += {argument}
        return total
""",
    """\
        if {argument} not in self.{one}:
            self.{one}.append({argument})
        return len(self.{one})
""",
    """\
        old = self.{one}
        self.{one} = self.{other}
        self.{other} = old
        return {argument}
""",
    """\
        return {{"{one}": self.{one}, "{other}": self.{other}, "{argument}": {argument}}}
""",
)


def _method(luck: random.Random, name: str, fields: list[str]) -> str:
    """A method of one of a few shapes."""
    one, other = luck.choice(fields), luck.choice(fields)
    argument = luck.choice(("value", "amount", "other", "entry", "key"))
    body = luck.choice(_BODIES).format(one=one, other=other, argument=argument)
    doc = luck.choice(("", f'        """{name.replace("_", " ").capitalize()} with the {argument}."""\n'))
    return f"    def {name}(self, {argument}):\n{doc}{body}"


def _snippet(luck: random.Random) -> tuple[str, str, list[str], list[str]]:
    """(code, its class, its methods, its fields)."""
    thing = _pick(luck, "things")
    parts = luck.sample(_WORDS["fields"], luck.randint(2, 4))
    fields = [part.split("=")[0] for part in parts]
    methods = luck.sample(_WORDS["verbs"], luck.randint(2, 4))
    lines = [
        luck.choice(
            ("", "import json\n\n\n", "import time\nfrom pathlib import Path\n\n\n", "import random\n\n\n")
        )
    ]
    lines.append(f"class {thing}:\n")
    lines.append(luck.choice(("", f'    """A {thing.lower()} with its {fields[0]} and {fields[1]}."""\n\n')))
    lines.append(f"    def __init__(self, {', '.join(parts)}):\n")
    lines += [f"        self.{field} = {field}\n" for field in fields]
    lines += ["\n" + _method(luck, name, fields) for name in methods]
    if luck.random() < 0.5:
        name = thing.lower()
        lines.append(
            f"\n\ndef use_{name}({name}, value):\n    result = {name}.{methods[0]}(value)\n    return result\n"
        )
    return "".join(lines), thing, methods, fields


def _edit(luck: random.Random) -> Prompt:
    code, thing, methods, fields = _snippet(luck)
    old, new = luck.choice(methods), _pick(luck, "new_names")
    field = luck.choice(fields)
    what = luck.choice((
        f"Rename the method {old} to {new}",
        f"Rename the class {thing} to {thing}{luck.choice(('Item', 'Record', 'Model', 'Base'))}",
        f"Change the name of the attribute {field} to {luck.choice(('main_', 'first_', 'my_'))}{field}",
        f"Add a docstring to the method {old}",
        f"Add type hints to the method {old}",
        f"Add a method called {new} that returns self.{field}",
        f"Remove the method {old}",
        f"Make the attribute {field} private",
    ))  # fmt: skip
    asked = luck.choice((
        f"{what} in this file and show the complete file:\n\n```python\n{code}```",
        f"```python\n{code}```\n\n{what}. Write the full code again.",
        f"Here is my code:\n\n```python\n{code}```\n\nPlease do this: {what}. Return all of the code.",
        f"{what}, and leave everything else as it is:\n\n```python\n{code}```",
    ))  # fmt: skip
    begun = luck.choice(
        (
            "",
            "```python\n",
            "Here is the complete file:\n\n```python\n",
            "Here is the updated code:\n\n```python\n",
        )
    )
    if begun:
        begun += code[: code.index("class ")]
    return Prompt(asked, begun)


def _code(luck: random.Random) -> Prompt:
    if luck.random() < 0.4:
        code, *_ = _snippet(luck)
        return Prompt(luck.choice((
            f"What does this code do?\n\n```python\n{code}```",
            f"Explain this class step by step:\n\n```python\n{code}```",
            f"Write a short test for this class:\n\n```python\n{code}```",
            f"Find possible bugs in this code:\n\n```python\n{code}```",
        )))  # fmt: skip
    task, language = _pick(luck, "tasks"), _pick(luck, "languages")
    return Prompt(luck.choice((
        f"Write a {language} function that {task}.",
        f"Write a {language} program that {task}, with comments.",
        f"Show me how to write a function in {language} that {task}. Explain it briefly.",
        f"I need {language} code that {task}. Include an example.",
    )))  # fmt: skip


# Reports and their summaries.


def _report(luck: random.Random) -> str:
    place, subject = _pick(luck, "places"), _pick(luck, "subjects")
    person, other = luck.sample(_WORDS["people"], 2)
    role, quote, second = _pick(luck, "roles"), *luck.sample(_WORDS["quotes"], 2)
    year, cost = (
        luck.randint(1890, 2015),
        luck.choice((f"{luck.randint(2, 90)} million", f"{luck.randint(20, 900)},000 euros")),
    )
    day = luck.choice(("Monday", "Tuesday", "Friday", "Saturday", "Sunday"))
    first = luck.choice((
        f"The {subject} of {place} opened on {day} after {luck.randint(2, 9)} years of work.",
        f"In {place} the {subject} has been a matter of debate since {year}.",
        f"More than {luck.randint(200, 5000)} people came to {place} on {day} to see the {subject}.",
        f"The council of {place} decided on {day} to rebuild the {subject}, which dates from {year}.",
        f"When the {subject} of {place} was planned in {year}, hardly anyone believed in it.",
    ))  # fmt: skip
    middle = [
        f"It was delayed by {_pick(luck, 'causes')}.",
        f"The work cost {cost}, of which the region paid {luck.randint(10, 80)} percent.",
        f'"{quote}," said {person}, {role}.',
        f"According to a report of the council, {_pick(luck, 'effects')}.",
        f"{luck.randint(3, 60)} companies and {luck.randint(20, 400)} volunteers took part.",
        f'{other}, who has lived in {place} for {luck.randint(5, 60)} years, sees it in another way: "{second}."',
        f"The plans were drawn by {other} in {year + luck.randint(1, 9)} and changed {luck.randint(2, 9)} times.",
        f"Since then {_pick(luck, 'effects')}.",
    ]  # fmt: skip
    last = luck.choice((
        f"The next step is planned for the spring of {luck.randint(2019, 2026)}.",
        "A decision about the second part is expected next year.",
        f"From {luck.choice(('March', 'May', 'September'))} on it will be open every day.",
        f"{person} will present the results in {_pick(luck, 'places')}.",
    ))  # fmt: skip
    kept = luck.sample(middle, luck.randint(4, 7))
    return " ".join([first, *kept, last])


def _summary(luck: random.Random) -> Prompt:
    report = _report(luck)
    return Prompt(luck.choice((
        f"Summarize this article and quote the most important sentence:\n\n{report}",
        f"{report}\n\nSummarize the text above in two sentences and quote one person word for word.",
        f"What is this text about? Quote the key sentences.\n\n{report}",
        f"List the main points of this report, with quotations from the text:\n\n{report}",
        f"Read this and answer: who said what?\n\n{report}",
        f"Write a short summary of this news item. Use exact quotes.\n\n{report}",
        f"Correct the grammar of this text, if needed, and write it again:\n\n{report}",
        f"Extract all names, places and numbers from this text:\n\n{report}",
    )))  # fmt: skip


# Chat, stories, and the rest.


def _chat(luck: random.Random) -> Prompt:
    trouble = _pick(luck, "troubles")
    occasion, limit = _pick(luck, "occasions"), _pick(luck, "limits")
    since = luck.choice(("", " It began last week.", " I have tried a few things already.", " This is new to me."))
    return Prompt(luck.choice((
        f"{trouble}.{since} {_pick(luck, 'asks')}",
        f"{trouble}.{since} {_pick(luck, 'asks')}",
        f"I am planning {occasion}, and {limit}. What do you suggest?",
        f"Help me plan {occasion}. Note that {limit}.",
        f"Give me a checklist for {occasion}.",
        f"What should I think of for {occasion}, if {limit}?",
        f"Hi! I need ideas for {occasion}. {limit[0].upper()}{limit[1:]}.",
    )))  # fmt: skip


def _story(luck: random.Random) -> Prompt:
    hero, event = _pick(luck, "heroes"), _pick(luck, "events")
    return Prompt(f"{_pick(luck, 'styles')} {hero} who {event}.{_pick(luck, 'ends')}")


def _asked(luck: random.Random) -> Prompt:
    topic, letter = _pick(luck, "topics"), _pick(luck, "letters")
    form = _pick(luck, "forms")
    person, place = _pick(luck, "people"), _pick(luck, "places")
    first, second = luck.sample(_WORDS["topics"], 2)
    number, price = luck.randint(3, 95), luck.randint(2, 40)
    hero, other = luck.sample(_WORDS["heroes"], 2)
    return Prompt(luck.choice((
        form.format(topic),
        form.format(topic),
        form.format(topic),
        f"Write an email {letter}. My name is {person}.",
        f"Write a short letter {letter}, from {person} in {place}.",
        f"Write a poem about {topic} and {_pick(luck, 'places')}.",
        f"What do {first} and {second} have in common?",
        f"A shop in {place} sells {number} boxes a day at {price} dollars each. What does it earn in a week?",
        f"Write a dialogue between {hero} and {other} about {topic}.",
        f"Make a table with {luck.randint(3, 6)} rows about {topic}.",
        f"Translate into simple English: the results of {first} depend on {second} to a considerable extent.",
    )))  # fmt: skip
