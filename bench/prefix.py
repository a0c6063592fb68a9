"""Time to the first token of the later turns of a chat, with the earlier turns' rows reused and without.

Chats of five turns on SmolLM2 through client, broker and worker, at some 2000 tokens of context. Each turn, or
each of those named by --cold, is asked twice: as a chat does, and cold, with `cache` false, which reuses and
leaves nothing. Answers must be equal.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
from mlx_lm.utils import load_tokenizer
from parity import service
from report import Figure, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mtplx
from worker.engine.load import resolve_model

TURNS = 5
QUESTIONS = (
    "What is this text about? Answer in one sentence.",
    "Name three places that it mentions.",
    "Which of them is the largest, and why do you think so?",
    "Write one line that praises that place.",
    "Thank you. Say goodbye in a friendly way.",
)
NOUNS = ("river", "harbour", "market", "tower", "garden", "bridge", "museum", "station", "castle", "library")
OTHERS = ("old", "quiet", "wide", "busy", "famous", "green", "lies", "stands", "ends", "turns", "rises", "opens")

Wish = bool | Literal["answers"]
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Turn:
    """One turn of a chat. Seconds to the first token, cold None where not asked so; the rest counts tokens."""

    number: int
    warm_s: float
    cold_s: float | None
    cached: int
    prompt: int
    equal: bool


def text(tokenizer: object, tokens: int, seed: int) -> str:
    """Made-up sentences of about *tokens* tokens; another beginning for each seed."""
    draw = random.Random(seed)
    sentences: list[str] = []
    while len(tokenizer.encode(" ".join(sentences))) < tokens:  # type: ignore[attr-defined]
        words = draw.choices((*NOUNS, *OTHERS), k=draw.randint(6, 14))
        sentences.append(" ".join(words).capitalize() + ".")
    return " ".join(sentences)


def chat(client: mtplx.Client, document: str, wish: Wish, tokens: int, cold_turns: set[int]) -> list[Turn]:
    """A chat about *document*; warm and cold change who goes first at every turn."""
    messages: Messages = []
    turns = []
    for number, question in enumerate(QUESTIONS, start=1):
        messages.append({"role": "user", "content": question if messages else f"{document}\n\n{question}"})
        order: list[Wish] = [wish, False] if number % 2 else [False, wish]
        if number not in cold_turns:
            order = [wish]
        told = {one: client.run(messages=messages, max_tokens=tokens, cache=one) for one in order}
        warm, cold = told[wish], told.get(False)
        messages.append({"role": "assistant", "content": warm.text})
        turns.append(
            Turn(
                number,
                warm.timings["time_to_first_token_s"],
                None if cold is None else cold.timings["time_to_first_token_s"],
                warm.usage["cached_tokens"],
                warm.usage["prompt_tokens"],
                cold is None or warm.ids == cold.ids,
            )
        )
    return turns


def figures_of(turns: list[Turn]) -> list[Figure]:
    """The table: turns 2 to 5 together, then each turn by itself."""
    later = [one for one in turns if one.number > 1]
    warm = statistics.median(one.warm_s for one in later)
    asked = [one for one in turns if one.cold_s is not None]
    cold = statistics.median(one.cold_s for one in asked if one.cold_s is not None)
    figures = [
        Figure("turns 2-5: warm / cold", warm / cold, "ratio of medians", 0.10, "lower"),
        Figure("turns 2-5: worst warm / cold", max(one.warm_s for one in later) / cold, "ratio", None, "lower"),
        Figure("turns 2-5: warm", warm, "s to the first token", None, "lower"),
        Figure("cold", cold, "s to the first token", None, "lower"),
        Figure("answers with equal ids", statistics.mean(one.equal for one in asked), "share", 1.0, "higher"),
    ]
    for number in range(1, TURNS + 1):
        same = [one for one in turns if one.number == number]
        figures += [
            Figure(
                f"turn {number}: cached tokens", statistics.median(one.cached for one in same), "", None, "higher"
            ),
            Figure(
                f"turn {number}: prompt tokens", statistics.median(one.prompt for one in same), "", None, "higher"
            ),
            Figure(
                f"turn {number}: warm / cold",
                statistics.median(one.warm_s for one in same) / cold,
                "ratio of medians",
                None,
                "lower",
            ),
        ]
    return figures


@click.command()
@click.option("--context", default=2000, show_default=True, help="Tokens of the first prompt.")
@click.option("--tokens", default=32, show_default=True, help="Tokens an answer.")
@click.option("--rounds", default=3, show_default=True, help="Chats, each about another text.")
@click.option(
    "--cold", "cold_turns", default="1,2,3,4,5", show_default=True, help="Turns that are asked cold too."
)
@click.option("--answers", is_flag=True, help="Reuse the rows of answers too.")
def main(context: int, tokens: int, rounds: int, cold_turns: str, answers: bool) -> None:
    """Measure and write bench/results/prefix.json."""
    wish: Wish = "answers" if answers else True
    with tempfile.TemporaryDirectory(prefix="mtplx-") as folder:
        # A busy machine may take minutes for one prefill chunk.
        settings = mtplx.Settings.load({"run_dir": Path(folder), "stall_s": 3600.0})
        tokenizer = load_tokenizer(resolve_model(settings.model, settings.cache_dir))
        with service(settings) as client:
            client.run(prompt="Hello", max_tokens=4, cache=False)
            turns = [
                turn
                for number in range(rounds)
                for turn in chat(
                    client,
                    text(tokenizer, context - 60, number),
                    wish,
                    tokens,
                    {int(one) for one in cold_turns.split(",")},
                )
            ]
    write("prefix", figures_of(turns))


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parents[1])
    main()
