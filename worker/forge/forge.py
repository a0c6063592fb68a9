"""`mtplx forge` from the model to the head's files: text, training, a quantised head, and what it is worth."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np

from mtplx.errors import SettingsError
from worker.engine.load import LoadedModel, load, resolve_model
from worker.engine.trunk import Trunk
from worker.forge import prompts as prompt_set
from worker.forge import text
from worker.forge.accept import Acceptance
from worker.forge.loss import Lesson
from worker.forge.target import Target, up_to
from worker.forge.text import Batch, Shape, Text, Writing
from worker.forge.train import CHECKPOINT, Recipe, Trainer, config_of, fresh_head, in_type
from worker.forge.worth import costs, speed, worth
from worker.speculation.mtp.forged import ForgedConfig, quantized, save
from worker.speculation.mtp.head import Head

REPORT: Final = "forge.json"
TEXT: Final = "text.npz"
# Prompts whose greedy answers are never trained on: one in so many, this many at most.
_HELD_OUT, _MOST_HELD_OUT = 20, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked for; the options of `mtplx forge` have the same names and say what each means."""

    model: str
    out: Path
    prompts: Path | None = None
    tokens: int = 4_000_000
    length: int = 384
    batch: int = 256
    step_tokens: int = 32768
    depths: int = 4
    epochs: int = 4
    steps: int | None = None
    minutes: float | None = None
    rate: float = 1e-3
    hard: float = 0.3
    seed: int = 0
    bits: int = 8
    group: int = 64
    every: float = 20.0
    checkpoint_minutes: float = 5.0
    resume: bool = False
    force: bool = False

    @property
    def checkpoint(self) -> Path:
        """The folder of what a later call goes on from."""
        return self.out / "checkpoint"

    @property
    def data(self) -> dict[str, Any]:
        """What decides the text."""
        names = ("tokens", "length", "batch", "seed")
        return {"prompts": str(self.prompts), **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, slots=True)
class Tools:
    """What a run needs besides the wish. say: takes lines. clock: seconds. cache_dir: of models and kernels."""

    say: Callable[[str], None]
    clock: Callable[[], float]
    cache_dir: Path


def forge(wish: Wish, tools: Tools) -> dict[str, Any]:
    """Make a head as *wish* says, write it to `wish.out`, and return what its `forge.json` says.

    Raises:
        ModelFilesError: the model is missing or not dense, or a checkpoint does not fit.
        SettingsError: there are too few prompts, or the head does not pay on this device and is not forced.
    """
    began = tools.clock()
    if wish.resume and not (wish.checkpoint / TEXT).exists():
        raise SettingsError(f"There is nothing to resume in {wish.checkpoint}; leave --resume out.")
    wish.checkpoint.mkdir(parents=True, exist_ok=True)
    loaded = load(resolve_model(wish.model, tools.cache_dir))
    trunk = Trunk.of(loaded).fingerprint()
    target = Target(loaded)
    taught, held_out = texts(wish, tools, loaded, target)
    mx.clear_cache()
    config = config_of(loaded, trunk)
    recipe = Recipe(depths=wish.depths, rate=wish.rate, lesson=Lesson(wish.hard))
    trainer = Trainer(target, config, fresh_head(config, loaded), recipe)
    shape = Shape(wish.step_tokens, up_to(max(len(one.ids) for one in taught)), wish.depths)
    measure = Acceptance(target, trainer.unrolled, wish.depths, list(text.batches(held_out, shape, None)))
    if wish.resume and (wish.checkpoint / CHECKPOINT).exists():
        trainer.load(wish.checkpoint, {"data": wish.data})
        tools.say(f"going on from step {trainer.steps}")
    losses = Run(wish, tools, trainer, measure, shape, began).train(taught)
    small_config, small = (
        quantized(config, trainer.head, wish.group, wish.bits)
        if wish.bits
        else (
            config,
            cast(config, trainer.head, target.dtype),
        )
    )
    small.set_dtype(target.dtype)
    report: dict[str, Any] = {
        "model": loaded.name,
        "trunk": trunk,
        "wish": {name: str(value) if isinstance(value, Path) else value for name, value in asdict(wish).items()},
        "recipe": asdict(recipe),
        "texts": len(taught),
        "answer_tokens": sum(len(one.ids) - one.prompt for one in taught),
        "steps": trainer.steps,
        "seconds": round(trainer.seconds, 1),
        "loss": losses,
        "acceptance_before_quantization": measure.of(trainer.weights),
        "acceptance": measure.of(in_type(small, target.dtype)),
    }
    finish(wish, tools, loaded, (small_config, small), report)
    return report


def cast(config: ForgedConfig, head: Head, dtype: mx.Dtype) -> Head:
    """A copy of *head* in *dtype*."""
    copy = config.module()
    copy.update(head.parameters())
    copy.set_dtype(dtype)
    return copy


def texts(wish: Wish, tools: Tools, loaded: LoadedModel, target: Target) -> tuple[list[Text], list[Text]]:
    """(texts to learn from, greedy texts of prompts that are not among them), written or as kept."""
    kept = wish.checkpoint / TEXT
    held = kept.with_name(f"held-out-{TEXT}")
    if wish.resume:
        return text.load(kept), text.load(held)
    longest = min(loaded.context - wish.length, 768)
    found = prompt_set.ids(prompt_set.chosen(wish.prompts, wish.seed), loaded.tokenizer, longest)
    count = min(_MOST_HELD_OUT, len(found) // _HELD_OUT or 1)
    if len(found) < 2:
        raise SettingsError(f"{wish.prompts} has {len(found)} prompts that fit the model; two are the least.")
    writing = Writing(wish.length, wish.batch, loaded.eos_ids)
    tools.say(f"{len(found) - count} prompts to learn from, {count} held out; writing {wish.tokens} tokens")
    held_out = [
        one
        for at in range(0, count, wish.batch)
        for one in text.write(
            target,
            found[at : min(at + wish.batch, count)],
            [0.0] * min(wish.batch, count - at),
            writing,
            wish.seed,
        )
    ]
    begun, made, told = tools.clock(), 0, tools.clock()
    taught: list[Text] = []
    for some in text.written(target, found[count:], wish.tokens, writing, wish.seed):
        taught += some
        made += sum(len(one.ids) - one.prompt for one in some)
        if tools.clock() - told > wish.every or made >= wish.tokens:
            told = tools.clock()
            tools.say(f"  {made} tokens written, {made / (told - begun):.0f} a second")
    text.save(kept, taught)
    text.save(held, held_out)
    return taught, held_out


@dataclass(frozen=True, slots=True)
class Run:
    """The training loop. measure: on held-out text. shape: of the batches. began: when all of it did."""

    wish: Wish
    tools: Tools
    trainer: Trainer
    measure: Acceptance
    shape: Shape
    began: float

    def train(self, taught: list[Text]) -> list[float]:
        """Train to the end of the wish; the last losses by depth. A checkpoint is kept at the end, too."""
        wish, trainer, clock = self.wish, self.trainer, self.tools.clock
        per_epoch = sum(1 for _ in text.batches(taught, self.shape, None))
        total = wish.steps if wish.steps is not None else per_epoch * wish.epochs
        spent, begun = trainer.seconds, clock()
        # What is left of the minutes once the text is written.
        limit = None if wish.minutes is None else max(60 * wish.minutes - (begun - self.began), 1.0)
        told = kept = begun
        recent: list[Any] = []
        tokens, before = 0, None
        for batch in islice(self._batches(taught), trainer.steps, None):
            trainer.seconds = spent + clock() - begun
            progress = trainer.steps / total
            if limit is not None:
                progress = max(progress, (clock() - begun) / limit)
            if progress >= 1:
                break
            losses = trainer.step(batch, progress)
            if before is not None:
                # One ahead: the next batch is made ready while this one runs.
                recent.append(np.array(before))
            before, tokens = losses, tokens + batch.ids.size
            if clock() - told > wish.every and recent:
                self._tell(f"step {trainer.steps} ({100 * progress:.0f} %)", recent, tokens / (clock() - told))
                recent, tokens, told = [], 0, clock()
            if clock() - kept > 60 * wish.checkpoint_minutes:
                trainer.save(wish.checkpoint, {"data": wish.data})
                kept = clock()
        if before is not None:
            recent.append(np.array(before))
        trainer.save(wish.checkpoint, {"data": wish.data})
        return self._tell(f"step {trainer.steps}, the last", recent, 0.0)

    def _batches(self, taught: list[Text]) -> Iterator[Batch]:
        epoch = 0
        while True:
            luck = np.random.default_rng([self.wish.seed, epoch])
            yield from text.batches(taught, self.shape, luck.permutation)
            epoch += 1

    def _tell(self, where: str, recent: list[Any], rate: float) -> list[float]:
        losses = [round(float(one), 4) for one in np.mean(recent, axis=0)] if recent else []
        shares = self.measure.of(self.trainer.weights)
        speed_ = f", {rate:.0f} tokens/s" if rate else ""
        self.tools.say(f"  {where}: loss {' '.join(f'{one:.3f}' for one in losses)}; {held(shares)}{speed_}")
        return losses


def held(shares: list[float]) -> str:
    """Acceptance by depth in words."""
    return f"held-out acceptance by depth {' / '.join(f'{100 * one:.1f}' for one in shares)} %"


def finish(
    wish: Wish, tools: Tools, loaded: LoadedModel, made: tuple[ForgedConfig, Head], report: dict[str, Any]
) -> None:
    """Write the head, if it pays or is forced; *report* learns what it is worth.

    Raises:
        SettingsError: it does not pay.
    """
    config, head = made
    tools.say(f"as it is served: {held(report['acceptance'])}")
    if wish.force:
        write(wish.out, config, head, report)
    found = worth(report["acceptance"], costs(loaded, head, tools.cache_dir, tools.clock))
    report["worth"] = {**asdict(found), "gain": found.gain}
    report["speed"] = speed(loaded, head)
    tools.say(
        f"{found.drafted} drafted: {found.tokens:.2f} tokens a step that costs {found.cost:.2f} plain ones,"
        f" {found.gain:.2f} x plain decoding by the probe"
    )
    if found.gain <= 1 and not wish.force:
        raise SettingsError(
            f"The head does not pay on this device ({found.gain:.2f} x plain decoding), so it is not written. It"
            f" is kept in {wish.checkpoint}: train it further with --resume and more --steps, or write it as it is"
            " with --resume --force."
        )
    write(wish.out, config, head, report)
    tools.say(f"written to {wish.out}")


def write(out: Path, config: ForgedConfig, head: Head, report: dict[str, Any]) -> None:
    """Write the files of a head."""
    save(out, config, head)
    (out / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
