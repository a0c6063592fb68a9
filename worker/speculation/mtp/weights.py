"""From a directory to a head: its tensors, under our names, in the form that its modules want.

mlx-lm drops these tensors when it loads the model; so they are read from the files here, and no others.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from mtplx.errors import ModelFilesError
from mtplx.paths import is_folder
from worker.engine.files import Tensor
from worker.engine.load import LoadedModel
from worker.engine.memory import check_draft_fits
from worker.engine.trunk import Trunk
from worker.speculation.mtp import forged
from worker.speculation.mtp.blocks import Block, Weights, block_of
from worker.speculation.mtp.head import Head, Wiring
from worker.speculation.mtp.shapes import OUTER, Config, Shape, text_config
from worker.speculation.mtp.survey import FORGED, Checkpoint, Found, read_config, survey

# Norms that a head and the layers of its model both have, by which their convention is told.
_TELLING: Final = (
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)
_EXPERT: Final = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.(weight|scales|biases)")
# They choose experts by small differences.
_KEPT_IN_32_BIT: Final = ("e_score_correction_bias", "router_bias")


def load_head(path: Path, loaded: LoadedModel, trunk: Trunk, own: Path | None) -> Head:
    """The head of the model in *path*, or the one in the directory *own*: its family's, or a forged one.

    Raises:
        ModelFilesError: there is none, it is not whole, or it was made for another model; says what to do.
        SettingsError: memory does not hold it.
    """
    if own is not None and not is_folder(own):
        raise ModelFilesError(f"--mtp: {own} is not a directory.")
    if own is not None and read_config(own).get("model_type") == FORGED:
        rows = forged.read_config(own).vocab_size
        if rows != loaded.width:
            raise ModelFilesError(
                f"The head in {own} was made for a model of {rows} ids; {loaded.name} has {loaded.width}. Make "
                "one with: mtplx forge MODEL --out DIR"
            )
        return forged.load(own, loaded, trunk)
    found = survey(Checkpoint.at(path), own)
    if found.shape is None or not found.modules:
        raise ModelFilesError(f"{loaded.name} has no head to draft with: {found.why}.")
    check_draft_fits(f"The head in {own or path}", found.bytes)
    config = read_config(path)
    try:
        modules = [_module(config, found, step, trunk) for step in range(len(found.modules))]
        shift = found.shape.centred and _is_centred(found, modules, trunk)
        for head, weights in modules:
            _fill(head, weights, shift=shift, dtype=getattr(mx, loaded.dtype))
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise ModelFilesError(
            f"The head in {own or path} does not fit {loaded.name}: {error}. It has to come from a checkpoint of "
            "the same model, in a type that MLX reads (bf16, or quantised by mlx-lm)."
        ) from error
    first, *further = (head for head, _ in modules)
    if further:
        first.further = further
    first.eval()
    mx.eval(first.parameters())
    return first


def _module(config: Config, found: Found, step: int, trunk: Trunk) -> tuple[Head, Weights]:
    """Module *step* with random weights, and the weights that it is to have."""
    shape, names = found.shape, found.modules[step]
    assert shape is not None
    block = block_of(config, step, set(names))
    weights = _tidied(_read(found.tensors, names), block)
    width = text_config(config)["hidden_size"]
    head = Head(width, block.eps, block.module, _wiring(shape, block))
    _drop_shared(weights, trunk)
    for name, kind in (("embedding", nn.Embedding), ("head", nn.Linear)):
        if f"{name}.weight" in weights:
            rows, theirs = weights[f"{name}.weight"].shape[0], trunk.embedding.weight.shape[0]
            if rows != theirs:
                raise ValueError(f"its {name} has {rows} ids, not {theirs}")
            head[name] = nn.Embedding(rows, width) if kind is nn.Embedding else nn.Linear(width, rows, bias=False)
    return head, weights


def _wiring(shape: Shape, block: Block) -> Wiring:
    return Wiring(
        embedding_first=shape.embedding_first,
        takes_normed=shape.takes_normed,
        passes_normed=shape.passes_normed,
        ends_normed=shape.ends_normed,
        zeroes_first=shape.zeroes_first,
        window=block.window,
        array_mask=block.array_mask,
        make_cache=block.make_cache,
    )


def _read(tensors: dict[str, Tensor], names: dict[str, str]) -> Weights:
    """The arrays, by our names; MLX reads their bytes when they are computed with."""
    files: dict[Path, Weights] = {}
    for name in names.values():
        file = tensors[name].file
        if file not in files:
            files[file] = mx.load(str(file))  # type: ignore[assignment]
    return {ours: files[tensors[theirs].file][theirs] for ours, theirs in names.items()}


def _tidied(weights: Weights, block: Block) -> Weights:
    """As mlx-lm has them: experts stacked, latent projections split, FP8 in plain floats."""
    # Norms go past it: some models' adds 1 to them, by what it sees of other tensors.
    norms = {name: weight for name, weight in weights.items() if "norm" in name}
    others = {block.prefix + name: weight for name, weight in weights.items() if name not in norms}
    tidied = {name.removeprefix(block.prefix): weight for name, weight in block.tidy(others).items()}
    stacked = _stacked({**norms, **tidied})
    return {name if name.split(".")[0] in OUTER else f"block.{name}": weight for name, weight in stacked.items()}


def _stacked(weights: Weights) -> Weights:
    """Experts that still stand one by one, as one array each."""
    rows: defaultdict[str, dict[int, mx.array]] = defaultdict(dict)
    others = {}
    for name, weight in weights.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            others[name] = weight
        else:
            layer, expert, part, kind = match.groups()
            rows[f"{layer}.switch_mlp.{part}.{kind}"][int(expert)] = weight
    return {**others, **{name: mx.stack([of[one] for one in sorted(of)]) for name, of in rows.items()}}


def _drop_shared(weights: Weights, trunk: Trunk) -> None:
    """Drop copies of the trunk's embedding and LM head: some checkpoints hold them twice."""
    theirs = {"embedding": trunk.embedding, "head": trunk.text.get("lm_head") or trunk.embedding}
    for name, module in theirs.items():
        own, weight = weights.get(f"{name}.weight"), module.get("weight")
        if own is None or own.shape != weight.shape:
            continue
        if bool(mx.array_equal(own.astype(weight.dtype), weight)):
            for part in ("weight", "scales", "biases"):
                weights.pop(f"{name}.{part}", None)


def _is_centred(found: Found, modules: list[tuple[Head, Weights]], trunk: Trunk) -> bool:
    """Whether the norms of the whole head are stored less 1, as published; once for all of them.

    A checkpoint that is as published has convolutions that no conversion has turned. Elsewhere the head's own
    layer norms tell: they lie near those of the trunk's layers, with 1 added or without.
    """
    convolutions = [one.shape for name, one in found.tensors.items() if name.endswith("conv1d.weight")]
    if any(shape[-1] != 1 for shape in convolutions):
        return True
    layers = dict(tree_flatten(trunk.stack["layers"]))
    apart = nearer = 0.0
    for kind in _TELLING:
        ours = [weight for _, weights in modules for name, weight in weights.items() if name.endswith(kind)]
        theirs = [weight for name, weight in layers.items() if name.endswith(kind)]
        if ours and theirs:
            far = _mean(theirs) - _mean(ours)
            apart, nearer = apart + abs(far), nearer + abs(far - 1)
    return nearer < apart


def _mean(weights: list[mx.array]) -> float:
    return sum(float(weight.astype(mx.float32).mean()) for weight in weights) / len(weights)


def _fill(head: Head, weights: Weights, *, shift: bool, dtype: mx.Dtype) -> None:
    """Give *head* its weights, quantised where they are.

    Raises:
        ValueError: naming those that are missing, superfluous or of another shape.
    """

    def quantised(path: str, module: Any) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights or not hasattr(module, "to_quantized"):
            return False
        found: dict[str, Any] = infer_quant_config(path, module, weights)
        return found

    nn.quantize(head, class_predicate=quantised)
    wanted = dict(tree_flatten(head.parameters()))
    missing, unknown = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    if missing or unknown:
        said = [f"it lacks {', '.join(missing[:3])}"] if missing else []
        said += [f"it has {', '.join(unknown[:3])}, which its kind does not know"] if unknown else []
        raise ValueError(" and ".join(said))
    ready = []
    for name, weight in weights.items():
        if weight.shape != wanted[name].shape:
            raise ValueError(f"{name} has the shape {weight.shape}, not {wanted[name].shape}")
        one = weight
        if mx.issubdtype(weight.dtype, mx.floating):
            moved = weight.astype(mx.float32) + 1 if shift and "norm" in name else weight
            one = moved.astype(mx.float32 if name.endswith(_KEPT_IN_32_BIT) else dtype)
        ready.append((name, one))
    head.load_weights(ready)
