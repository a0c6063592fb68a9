"""The training of a head: one step over a batch, and all of it as a file to go on from."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import mlx.core as mx
import numpy as np
from mlx import optimizers
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mtplx.errors import ModelFilesError
from worker.engine.files import write_tensors
from worker.engine.load import LoadedModel
from worker.forge.columns import Columns
from worker.forge.loss import Lesson, taught
from worker.forge.states import Pairs, pairs
from worker.forge.target import Target
from worker.forge.text import Batch
from worker.forge.unrolled import Unrolled, Weights
from worker.speculation.mtp.forged import ForgedConfig
from worker.speculation.mtp.head import Head

CHECKPOINT: Final = "training.safetensors"
_BETAS: Final = [0.9, 0.95]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a head is trained.

    depths: of the unrolled head; deep: share of the training that goes by before any but the first is trained,
    for the first costs a fraction of all and most of what it learns serves all. decay: weight of a depth's loss
    over the one above. rate: of learning, at its peak; it rises over the first `warm` share of the training and
    falls by a cosine to a hundredth of its peak. clip: norm of the gradient at most. lesson: see there.
    """

    depths: int = 4
    deep: float = 0.6
    decay: float = 0.8
    rate: float = 1e-3
    warm: float = 0.02
    clip: float = 1.0
    weight_decay: float = 0.01
    lesson: Lesson = Lesson()

    def rate_at(self, progress: float) -> float:
        """At *progress* from 0 to 1."""
        if progress < self.warm:
            return self.rate * (0.01 + 0.99 * progress / self.warm)
        along = min(1.0, (progress - self.warm) / (1 - self.warm))
        return self.rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * along)))


def config_of(loaded: LoadedModel, trunk: str) -> ForgedConfig:
    """The shape of a head for *loaded*, whose fingerprint is *trunk*."""
    text = getattr(loaded.model, "language_model", loaded.model)
    args, attention = text.args, text.model.layers[0].self_attn
    heads, kv_heads = attention.n_heads, attention.n_kv_heads
    given = {
        name: getattr(args, name)
        for name in ("rope_theta", "rope_traditional", "rope_scaling", "max_position_embeddings")
        if getattr(args, name, None) is not None
    }
    return ForgedConfig(
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=getattr(args, "head_dim", None) or args.hidden_size // heads,
        rms_norm_eps=args.rms_norm_eps,
        vocab_size=args.vocab_size,
        trunk=trunk,
        **given,
    )


def scale_of(target: Target, ids: mx.array) -> float:
    """How large the numbers are that the trunk's last layer is given, by texts of ids [B, n]."""
    x = target.last_input(ids).astype(mx.float32)
    square: Any = (x * x).mean().item()
    return math.sqrt(square)


def fresh_head(config: ForgedConfig, loaded: LoadedModel, scale: float = 1.0) -> Head:
    """A head to begin with, float32: the trunk's last layer and final norm, behind half of both inputs.

    scale: as `scale_of` has it. What the layer adds is made smaller by it, for the head's norms give it numbers
    near 1; all norms behind it hide the difference.
    """
    text = getattr(loaded.model, "language_model", loaded.model)
    head, inner = config.module(), text.model
    last = inner.layers[-1]
    names = [name for name, _ in tree_flatten(head.block.parameters())]
    taken = {name: _dense_weight(last, name) for name in names}
    half = 0.5 * mx.eye(config.hidden_size)
    added = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
    parts = {f"block.{name}": weight / scale if name in added else weight for name, weight in taken.items()}
    parts["norm.weight"] = inner.norm.weight
    parts["eh_proj.weight"] = mx.concatenate([half, half], axis=1)
    # Arrays of their own: what is trained may not be what the compiled step takes for constant.
    own = [(name, weight.astype(mx.float32) * 1.0) for name, weight in parts.items()]
    head.update(tree_unflatten(own))
    mx.eval(head.parameters())
    return head


def _dense_weight(layer: Any, name: str) -> mx.array:
    *path, leaf = name.split(".")
    module = layer
    for part in path:
        module = module[part]
    if leaf == "weight" and "scales" in module:
        return mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)
    weight: mx.array = module[leaf]
    return weight


class Matter(NamedTuple):
    """What steps are made of. pairs: of a batch. columns: of the LM head, by the number of a step."""

    pairs: Pairs
    columns: Callable[[int], Columns]


class Trainer:
    """A head, its optimizer, and how far they are.

    Args:
        target: the trunk.
        config: of the head.
        head: float32 weights, trained in place.
        recipe: how.
        matter: what of; by itself all is computed for each batch anew, over the whole LM head.

    steps: taken so far. seconds: spent on them.
    """

    def __init__(
        self, target: Target, config: ForgedConfig, head: Head, recipe: Recipe, matter: Matter | None = None
    ) -> None:
        self.head, self.recipe = head, recipe
        self.steps, self.seconds = 0, 0.0
        self._target = target
        self._matter = matter or Matter(
            lambda batch: pairs(target, mx.array(batch.ids)), lambda _step: Columns(target.lm_head)
        )
        self.unrolled = Unrolled(config, head)
        self._optimizer = optimizers.AdamW(
            mx.array(recipe.rate), betas=_BETAS, weight_decay=recipe.weight_decay, bias_correction=True
        )
        self._optimizer.init(head.trainable_parameters())

    @property
    def weights(self) -> Weights:
        """Of the head, in the trunk's type."""
        return in_type(self.head, self._target.dtype)

    def step(self, batch: Batch, progress: float) -> mx.array:
        """One step; the loss by depth float32 [D], not yet evaluated. progress: of the whole training, 0 to 1.

        The loss of a depth that is not trained yet is nan.
        """
        depths = self.recipe.depths if progress >= self.recipe.deep else 1
        decay = self.recipe.decay ** np.arange(depths, dtype=np.float32)
        live = batch.weights.sum(axis=1)
        shares = batch.weights / np.maximum(live, 1)[:, None]
        rate = mx.array(self.recipe.rate_at(progress), dtype=mx.float32)
        losses = self._step(batch, mx.array(shares[:depths]), mx.array(decay), rate)
        losses = mx.pad(losses, (0, self.recipe.depths - depths), constant_values=mx.array(mx.nan))
        self.steps += 1
        mx.async_eval(losses, self.head.parameters(), self._optimizer.state)  # type: ignore[no-untyped-call]
        return losses

    # Not compiled: a step has dozens of kernels, and CUDA's compiler takes a second or two for each.
    def _step(self, batch: Batch, shares: mx.array, decay: mx.array, rate: mx.array) -> mx.array:
        hidden, embedded = self._matter.pairs(batch)
        columns = self._matter.columns(self.steps)
        index = mx.array(batch.places)
        flat = hidden.reshape(-1, hidden.shape[-1])
        truth = flat[index + 1]

        def carrier(weights: Weights) -> tuple[mx.array, mx.array]:
            typed = tree_map(lambda one: one.astype(hidden.dtype), weights)
            states = self.unrolled(typed, embedded, hidden, decay.size)
            rows = [state.reshape(flat.shape)[index] for state in states]
            return taught(rows, truth, shares * decay[:, None], columns, self.recipe.lesson)

        (_, losses), gradients = mx.value_and_grad(carrier)(self.head.trainable_parameters())
        gradients, _ = optimizers.clip_grad_norm(gradients, self.recipe.clip)
        self._optimizer.learning_rate = rate
        self._optimizer.update(self.head, gradients)
        return losses / decay

    def save(self, folder: Path, told: dict[str, Any]) -> None:
        """Write all that a later `load` goes on from, whole or not at all. told: more to keep, of JSON's types."""
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {f"head.{name}": one for name, one in tree_flatten(self.head.parameters())}
        arrays |= {f"optimizer.{name}": one for name, one in tree_flatten(self._optimizer.state)}
        about = {"steps": self.steps, "seconds": self.seconds, "recipe": asdict(self.recipe), **told}
        write_tensors(folder / CHECKPOINT, arrays, {"about": json.dumps(about)})

    def load(self, folder: Path, told: dict[str, Any]) -> None:
        """Go on from what `save` wrote in *folder*; *told* must be as it was.

        Raises:
            ModelFilesError: it was written with another recipe, model or data.
        """
        kept: Any = mx.load(str(folder / CHECKPOINT), return_metadata=True)
        arrays, metadata = kept
        about = json.loads(metadata["about"])
        wanted = json.loads(json.dumps({"recipe": asdict(self.recipe), **told}))
        other = sorted(name for name, value in wanted.items() if about.get(name) != value)
        if other:
            raise ModelFilesError(
                f"{folder / CHECKPOINT} was written with other options ({', '.join(other)}); give the same ones,"
                " or leave --resume out and begin anew."
            )
        parts = {
            part: [(name.removeprefix(part), one) for name, one in arrays.items() if name.startswith(part)]
            for part in ("head.", "optimizer.")
        }
        self.head.update(tree_unflatten(parts["head."]))
        self._optimizer.state = tree_unflatten(parts["optimizer."])
        self.steps, self.seconds = about["steps"], about["seconds"]


def in_type(head: Head, dtype: mx.Dtype) -> Weights:
    """The weights of *head* in *dtype*; a quantised head's taken apart."""

    def one(module: Any) -> Any:
        if isinstance(module, mx.array):
            return module.astype(dtype)
        if "scales" in module:
            weight = mx.dequantize(
                module["weight"], module["scales"], module["biases"], module.group_size, module.bits
            )
            return {"weight": weight.astype(dtype)}
        return {name: one(part) for name, part in module.items() if isinstance(part, (dict, mx.array))}

    weights: Weights = {name: one(part) for name, part in head.children().items()}
    return weights
