"""`mtplx forge` from the model to the head's files: text, training, a quantised head, and what it is worth."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np

from mtplx.errors import SettingsError
from mtplx.sizes import format_size
from worker.engine.load import LoadedModel, load, resolve_model
from worker.engine.memory import room
from worker.engine.trunk import Trunk
from worker.forge import prompts as prompt_set
from worker.forge import text
from worker.forge.accept import Acceptance
from worker.forge.columns import Share, columns_of
from worker.forge.loss import Lesson
from worker.forge.states import source
from worker.forge.target import Target, up_to
from worker.forge.text import Batch, Shape, Text, Writing
from worker.forge.train import CHECKPOINT, Matter, Recipe, Trainer, config_of, fresh_head, in_type, scale_of
from worker.forge.worth import Served, told
from worker.speculation.mtp.forged import ForgedConfig, quantized, save
from worker.speculation.mtp.head import Head
from worker.speculation.mtp.survey import FORGED, read_config

REPORT: Final = "forge.json"
TEXT: Final = "text.npz"
HEAD: Final = "head"
# Prompts whose greedy answers are never trained on: one in so many, this many at most.
_HELD_OUT, _MOST_HELD_OUT = 20, 128
_ANEW: Final = "the model's states are computed for each step anew: memory does not hold those of all texts"
# Held-out prompts whose answers are timed.
_TIMED: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked for; the options of `mtplx forge` have the same names and say what each means."""

    model: str
    out: Path
    prompts: Path | None = None
    tokens: int = 4_000_000
    temperatures: str = "0,0.7,1"
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
        names = ("tokens", "temperatures", "length", "batch", "seed")
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
    check_out(wish.out)
    wish.checkpoint.mkdir(parents=True, exist_ok=True)
    loaded = load(resolve_model(wish.model, tools.cache_dir))
    trunk = Trunk.of(loaded).fingerprint()
    target = Target(loaded)
    taught, held_out = texts(wish, tools, loaded, target)
    mx.clear_cache()
    config = config_of(loaded, trunk)
    recipe = Recipe(depths=wish.depths, rate=wish.rate, lesson=Lesson(wish.hard))
    shape = Shape(wish.step_tokens, up_to(max(len(one.ids) for one in taught)), wish.depths)
    held_out_batches = list(text.batches(held_out, shape, None))
    scale = scale_of(target, mx.array(held_out_batches[0].ids))
    of, bytes_ = source(target, taught, shape, room().left // 2)
    tools.say(f"the model's states of all texts are kept ({format_size(bytes_)})" if bytes_ else _ANEW)
    matter = Matter(of, columns_of(target.lm_head, taught, Share(seed=wish.seed)))
    trainer = Trainer(target, config, fresh_head(config, loaded, scale), recipe, matter)
    measure = Acceptance(target, trainer.unrolled, wish.depths, held_out_batches)
    if wish.resume and (wish.checkpoint / CHECKPOINT).exists():
        trainer.load(wish.checkpoint, {"data": wish.data, "trunk": trunk})
        tools.say(f"going on from step {trainer.steps}")
    losses = Run(wish, tools, trainer, measure, shape, began, {"data": wish.data, "trunk": trunk}).train(taught)
    made = small(wish, config, trainer.head, target.dtype)
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
        "acceptance": measure.of(in_type(made[1], target.dtype)),
    }
    tools.say(f"as it is served: {held(report['acceptance'])}")
    finish(wish, tools, made, report, partial(judged, loaded, held_out))
    return report


def check_out(out: Path) -> None:
    """Refuse a folder whose files are no head's: a model's would be written over.

    Raises:
        SettingsError: it holds something else.
    """
    config = read_config(out)
    foreign = config.get("model_type") != FORGED if config else next(out.glob("*.safetensors"), None) is not None
    if foreign:
        raise SettingsError(f"--out {out} holds a model or something else; choose a folder of the head's own.")


def small(wish: Wish, config: ForgedConfig, head: Head, dtype: mx.Dtype) -> tuple[ForgedConfig, Head]:
    """The head as it is served: quantised as *wish* says, all else in *dtype*."""
    if wish.bits:
        found = quantized(config, head, wish.group, wish.bits)
    else:
        found = config, config.module()
        found[1].update(head.parameters())
    found[1].set_dtype(dtype)
    return found


def temperatures(words: str) -> tuple[float, ...]:
    """Of an option's text.

    Raises:
        SettingsError: it is no list of temperatures.
    """
    try:
        found = tuple(float(part) for part in words.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= one <= 10 for one in found):
        raise SettingsError(f"--temperatures {words}: give numbers from 0 to 10 by comma, such as 0,0.7,1.")
    return found


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
        raise SettingsError(
            f"{wish.prompts or 'Our set'} has {len(found)} prompts that fit the model beside answers of "
            f"{wish.length} tokens; two are the least."
        )
    writing = Writing(wish.length, wish.batch, loaded.eos_ids, temperatures(wish.temperatures))
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
    # What is looked for by --resume comes last.
    text.save(held, held_out)
    text.save(kept, taught)
    return taught, held_out


@dataclass(frozen=True, slots=True)
class Run:
    """The training loop.

    measure: on held-out text. shape: of the batches. began: when all of it did. about: kept in checkpoints.
    """

    wish: Wish
    tools: Tools
    trainer: Trainer
    measure: Acceptance
    shape: Shape
    began: float
    about: dict[str, Any]

    def train(self, taught: list[Text]) -> list[float | None]:
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
                trainer.save(wish.checkpoint, self.about)
                kept = clock()
        if before is not None:
            recent.append(np.array(before))
        trainer.save(wish.checkpoint, self.about)
        return self._tell(f"step {trainer.steps}, the last", recent, 0.0)

    def _batches(self, taught: list[Text]) -> Iterator[Batch]:
        epoch = 0
        while True:
            luck = np.random.default_rng([self.wish.seed, epoch])
            yield from text.batches(taught, self.shape, luck.permutation)
            epoch += 1

    def _tell(self, where: str, recent: list[Any], rate: float) -> list[float | None]:
        means = [float(one) for one in np.mean(recent, axis=0)] if recent else []
        losses = [None if math.isnan(one) else round(one, 4) for one in means]
        shares = self.measure.of(self.trainer.weights)
        speed_ = f", {rate:.0f} tokens/s" if rate else ""
        loss = " ".join("-" if one is None else f"{one:.3f}" for one in losses)
        self.tools.say(f"  {where}: loss {loss}; {held(shares)}{speed_}")
        return losses


def held(shares: list[float]) -> str:
    """Acceptance by depth in words."""
    return f"held-out acceptance by depth {' / '.join(f'{100 * one:.1f}' for one in shares)} %"


def judged(
    loaded: LoadedModel, held_out: list[Text], folder: Path, shares: list[float], tools: Tools
) -> tuple[dict[str, Any], float]:
    """As `told`, of the head in *folder* over the model."""
    return told(shares, Served(loaded, folder, tools.cache_dir, tools.clock), held_out[:_TIMED])


def finish(
    wish: Wish,
    tools: Tools,
    made: tuple[ForgedConfig, Head],
    report: dict[str, Any],
    judge: Callable[[Path, list[float], Tools], tuple[dict[str, Any], float]],
) -> None:
    """Write the head, if it pays or is forced; *report* learns what it is worth, which *judge* tells.

    Raises:
        SettingsError: it does not pay.
    """
    draft = wish.checkpoint / HEAD
    # A forced head is there whatever happens while it is measured.
    write(wish.out if wish.force else draft, made, report)
    report["worth"], gain = judge(wish.out if wish.force else draft, report["acceptance"], tools)
    speed = report["worth"]["tokens_per_second"]
    beside = (
        ""
        if speed["head"] is None
        else f" {speed['head']:.0f} tokens a second with it, {speed['plain']:.0f} without;"
    )
    tools.say(f"{beside} {gain:.2f} x plain decoding on this device".strip())
    if gain <= 1 and not wish.force:
        raise SettingsError(
            f"The head does not pay on this device ({gain:.2f} x plain decoding), so it is not written. It"
            f" is kept in {wish.checkpoint}: train it further with --resume and more --steps, or write it as it is"
            " with --resume --force."
        )
    write(wish.out, made, report)
    tools.say(f"written to {wish.out}")


def write(out: Path, made: tuple[ForgedConfig, Head], report: dict[str, Any]) -> None:
    """Write the files of a head."""
    save(out, *made)
    (out / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
