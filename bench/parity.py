"""Tokens per second through client, broker and worker, against mlx-lm's stream_generate in this process.

Both answer the same prompts of SmolLM2 in turns, at temperature 0 and at 0.8 with the keyed sampler handed to
stream_generate; the ids must be equal. Times run from the prompt's ids to the last token, and both read the whole
prompt.

    python bench/parity.py --modes serial,hyper

compares two services instead, one in each scheduler mode, whose workers answer in turns: at width 1, or, with
--speculation auto, as hyper mode decides, which leaves drafts alone where rows are dear. The hashes of the answers
must be equal.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
from mlx_lm import stream_generate
from report import Figure, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mtplx
from worker.engine.engine import ROUTE
from worker.engine.load import LoadedModel, load, resolve_model
from worker.engine.sample import KeyedSampler, Sampling

PROMPTS = (
    "Explain why the sky is blue in three sentences.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "List ten uses of a paper clip, one line each.",
    "What is the difference between a list and a tuple in Python?",
)
SEED = 7
START_LIMIT_S = 120.0


@contextmanager
def service(settings: mtplx.Settings) -> Iterator[mtplx.Client]:
    """A broker and a worker of this checkout, and a client to them; all ended on the way out."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", name, "--exit-with-stdin"], env=settings.environment(), stdin=subprocess.PIPE
        )
        for name in ("broker", "worker")
    ]
    try:
        with mtplx.Client(settings=settings, timeout=START_LIMIT_S) as client:
            ends = time.monotonic() + START_LIMIT_S
            while client.health()["worker"]["state"] != "ready":
                if time.monotonic() > ends or any(process.poll() is not None for process in started):
                    sys.exit("The worker did not get ready.")
                time.sleep(0.1)
            yield client
    finally:
        for process in started:
            process.terminate()
            process.wait()


def direct(
    loaded: LoadedModel, ids: list[int], tokens: int, temperature: float, chunk: int
) -> tuple[float, list[int]]:
    """Seconds and ids of one answer by mlx-lm alone."""
    sampler = KeyedSampler(Sampling(seed=SEED, temperature=temperature), start=len(ids)) if temperature else None
    began = time.perf_counter()
    drawn = [
        one.token
        for one in stream_generate(
            loaded.model, loaded.tokenizer, ids, max_tokens=tokens, sampler=sampler, prefill_step_size=chunk
        )
    ]
    return time.perf_counter() - began, drawn


def served(client: mtplx.Client, ids: list[int], tokens: int, temperature: float) -> tuple[float, list[int]]:
    """Seconds and ids of one answer through the whole service."""
    began = time.perf_counter()
    result = client.run(token_ids=ids, max_tokens=tokens, temperature=temperature, seed=SEED, cache=False)
    return time.perf_counter() - began, list(result.ids)


def compare(
    client: mtplx.Client, loaded: LoadedModel, settings: mtplx.Settings, tokens: int, rounds: int
) -> list[Figure]:
    """The figures of both temperatures, in turns that change who goes first."""
    figures = []
    prompts = [
        loaded.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        for text in PROMPTS
    ]
    for temperature in (0.0, 0.8):
        ours, theirs, equal = [], [], 0
        for turn in range(rounds * len(prompts)):
            ids = prompts[turn % len(prompts)]
            if turn % 2:
                seconds, drawn = direct(loaded, ids, tokens, temperature, settings.prefill_chunk)
                through, answer = served(client, ids, tokens, temperature)
            else:
                through, answer = served(client, ids, tokens, temperature)
                seconds, drawn = direct(loaded, ids, tokens, temperature, settings.prefill_chunk)
            ours.append(len(answer) / through)
            theirs.append(len(drawn) / seconds)
            equal += answer == drawn
        ratio = statistics.median(ours) / statistics.median(theirs)
        name = f"temperature {temperature:g}"
        figures += [
            Figure(f"{name}: served / direct", ratio, "ratio of medians", 0.97, "higher"),
            Figure(f"{name}: served", statistics.median(ours), "tokens/s", None, "higher"),
            Figure(f"{name}: direct", statistics.median(theirs), "tokens/s", None, "higher"),
            Figure(f"{name}: answers with equal ids", equal / len(ours), "share", 1.0, "higher"),
        ]
    return figures


def in_both(clients: dict[str, mtplx.Client], tokens: int, rounds: int, speculation: str) -> list[Figure]:
    """The figures of the modes *clients* speak to, the second over the first; who goes first changes."""
    figures = []
    base, other = clients
    for temperature in (0.0, 0.8):
        speeds: dict[str, list[float]] = {mode: [] for mode in clients}
        equal = wide = 0
        for turn in range(rounds * len(PROMPTS)):
            messages = [{"role": "user", "content": PROMPTS[turn % len(PROMPTS)]}]
            hashes = set()
            for mode in list(clients)[:: -1 if turn % 2 else 1]:
                began = time.perf_counter()
                result = clients[mode].run(
                    messages=messages,
                    max_tokens=tokens,
                    temperature=temperature,
                    seed=SEED,
                    speculation=speculation,
                )
                speeds[mode].append(len(result.ids) / (time.perf_counter() - began))
                hashes.add(result.sha256)
                wide += result.run["route"] != ROUTE
            equal += len(hashes) == 1
        median = {mode: statistics.median(found) for mode, found in speeds.items()}
        name, all_turns = f"temperature {temperature:g}", rounds * len(PROMPTS)
        ratio = median[other] / median[base]
        what = f"{other} / {base}, speculation {speculation}"
        figures += [
            Figure(f"{name}: {what}", ratio, "ratio of medians", 0.99, "higher"),
            *(Figure(f"{name}: {mode}", speed, "tokens/s", None, "higher") for mode, speed in median.items()),
            Figure(f"{name}: equal trajectory hashes", equal, f"of {all_turns}", all_turns, "higher"),
            Figure(f"{name}: jobs that might run wider than 1", wide, f"of {all_turns}", None, "lower"),
        ]
    return figures


def modes(names: list[str], tokens: int, rounds: int, speculation: str) -> list[Figure]:
    """Both services at once, each with a worker of its own that waits while the other's computes."""
    with ExitStack() as stack:
        clients = {}
        for name in names:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mtplx-"))
            settings = mtplx.Settings.load({"run_dir": Path(folder), "scheduler_mode": mtplx.SchedulerMode(name)})
            clients[name] = stack.enter_context(service(settings))
        in_both(clients, 2, 1, speculation)
        return in_both(clients, tokens, rounds, speculation)


@click.command()
@click.option("--tokens", default=48, show_default=True, help="Tokens an answer.")
@click.option("--rounds", default=3, show_default=True, help="Times each prompt is answered by both.")
@click.option("--modes", "asked", help="Two scheduler modes, by comma: compared with each other, not with mlx-lm.")
@click.option("--speculation", default="off", show_default=True, help="Of the jobs of --modes: auto or off.")
@click.option("--name", help="Of the results file.  [default: parity, or parity_modes]")
@click.option("--device", default="", help="The GPU in words, where the workers have one.")
def main(asked: str | None, name: str | None, device: str, **given: Any) -> None:
    """Measure and write bench/results/parity.json, or parity_modes.json."""
    tokens, rounds = given["tokens"], given["rounds"]
    if asked:
        figures = modes(asked.split(","), tokens, rounds, given["speculation"])
        write(name or "parity_modes", figures, device=device)
        return
    with tempfile.TemporaryDirectory(prefix="mtplx-") as folder:
        settings = mtplx.Settings.load({"run_dir": Path(folder)})
        loaded = load(resolve_model(settings.model, settings.cache_dir))
        with service(settings) as client:
            compare(client, loaded, settings, 8, 1)
            figures = compare(client, loaded, settings, tokens, rounds)
    write(name or "parity", figures, device=device)
    mx.clear_cache()


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parents[1])
    main()
