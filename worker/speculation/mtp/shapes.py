"""The shapes of heads that models bring along: a row for each, by what their checkpoints and configs say.

Sources: the models' own code as vLLM, SGLang and mlx-vlm have it, and the DeepSeek-V3 report. Where they disagree,
the row follows what was measured to accept more (docs/mtp.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

Config = dict[str, Any]
Names = tuple[tuple[str, str], ...]

# What a head is made of beside its block.
OUTER: Final = ("enorm", "hnorm", "eh_proj", "norm", "head", "embedding")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A row.

    family: for people. types: `model_type` of the models. declared: key of the config that counts the modules.
    roots: what the names of a module's tensors begin with, one of them; {step} counts the modules, {layer} goes on
        behind the model's layers. An empty root stands for heads in directories of their own.
    names: theirs -> ours, by the beginning of what follows the root; what none fits keeps its name.
    several: whether each depth has a module of its own; else the first serves all.
    centred: whether checkpoints as published hold the weights of norms less 1.
    The rest is as in `Wiring`.
    """

    family: str
    types: tuple[str, ...]
    declared: str
    roots: tuple[str, ...]
    names: Names
    several: bool = False
    centred: bool = False
    embedding_first: bool = True
    takes_normed: bool = True
    passes_normed: bool = True
    ends_normed: bool = True
    zeroes_first: bool = False


_QWEN: Final[Names] = (
    ("pre_fc_norm_embedding.", "enorm."),
    ("pre_fc_norm_hidden.", "hnorm."),
    ("fc.", "eh_proj."),
    ("norm.", "norm."),
    ("layers.0.", ""),
)
_QWEN_ROOTS: Final = ("mtp.", "language_model.mtp.", "model.language_model.mtp.", "model.mtp.", "")
_DEEPSEEK: Final[Names] = (
    ("shared_head.norm.", "norm."),
    ("shared_head.head.", "head."),
    ("embed_tokens.", "embedding."),
)
_BEHIND: Final = ("model.layers.{layer}.", "language_model.model.layers.{layer}.")

SHAPES: Final = (
    Shape(
        family="Qwen3-Next",
        types=("qwen3_next",),
        declared="num_nextn_predict_layers",
        roots=_QWEN_ROOTS,
        names=_QWEN,
        centred=True,
    ),
    Shape(
        family="Qwen3.5",
        types=("qwen3_5", "qwen3_5_moe"),
        declared="mtp_num_hidden_layers",
        roots=_QWEN_ROOTS,
        names=_QWEN,
        centred=True,
    ),
    Shape(
        family="DeepSeek-V3",
        types=("deepseek_v3", "deepseek_v32"),
        declared="num_nextn_predict_layers",
        roots=_BEHIND,
        names=_DEEPSEEK,
        zeroes_first=True,
    ),
    # vLLM's file passes on the state before the norm; SGLang's and the measurements, the one behind it.
    Shape(
        family="GLM-4.5",
        types=("glm4_moe", "glm4_moe_lite"),
        declared="num_nextn_predict_layers",
        roots=_BEHIND,
        names=_DEEPSEEK,
        zeroes_first=True,
    ),
    Shape(
        family="MiMo",
        types=("mimo",),
        declared="num_nextn_predict_layers",
        roots=("model.mtp_layers.{step}.",),
        names=(
            ("token_layernorm.", "enorm."),
            ("hidden_layernorm.", "hnorm."),
            ("input_proj.", "eh_proj."),
            ("final_layernorm.", "norm."),
        ),
        embedding_first=False,
        zeroes_first=True,
    ),
    # vLLM runs the first module at all depths. The three were trained as a chain, and the published 3.6 tokens a
    # step are of all three.
    Shape(
        family="MiMo-V2",
        types=("mimo_v2_flash",),
        declared="num_nextn_predict_layers",
        roots=("model.mtp.layers.{step}.",),
        names=(("final_layernorm.", "norm."), ("pre_mlp_layernorm.", "post_attention_layernorm.")),
        several=True,
    ),
    Shape(
        family="Step-3.5",
        types=("step3p5",),
        declared="num_nextn_predict_layers",
        roots=_BEHIND,
        names=(
            ("transformer.shared_head.norm.", "norm."),
            ("transformer.shared_head.output.", "head."),
            *_DEEPSEEK,
        ),
        several=True,
        centred=True,
        takes_normed=False,
        passes_normed=False,
    ),
    Shape(
        family="ERNIE-4.5",
        types=("ernie4_5_moe",),
        declared="num_nextn_predict_layers",
        roots=("model.",),
        names=(
            ("mtp_emb_norm.0.", "enorm."),
            ("mtp_hidden_norm.0.", "hnorm."),
            ("mtp_linear_proj.0.", "eh_proj."),
            ("mtp_block.0.", ""),
        ),
        ends_normed=False,
        zeroes_first=True,
    ),
    Shape(
        family="EXAONE-MoE",
        types=("exaone_moe",),
        declared="num_nextn_predict_layers",
        roots=("mtp.", ""),
        names=_QWEN,
    ),
    Shape(
        family="Nemotron-H",
        types=("nemotron_h",),
        declared="num_nextn_predict_layers",
        roots=("mtp.", "language_model.mtp.", ""),
        names=(
            ("layers.0.enorm.", "enorm."),
            ("layers.0.hnorm.", "hnorm."),
            ("layers.0.eh_proj.", "eh_proj."),
            ("layers.{last}.final_layernorm.", "norm."),
            ("layers.", "layers."),
        ),
    ),
)


def shape_of(config: Config) -> Shape | None:
    """The row for a model with that config; None where no head of its kind is known."""
    return next((shape for shape in SHAPES if config.get("model_type") in shape.types), None)


def text_config(config: Config) -> Config:
    """The part of a config that is about the language model."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else config


def declared(shape: Shape, config: Config) -> int:
    """How many modules the config counts."""
    count = text_config(config).get(shape.declared, config.get(shape.declared))
    return count if isinstance(count, int) else 0


def pattern(config: Config) -> str:
    """Nemotron-H: the kinds of the block's layers, as letters of its own."""
    kinds = config.get("mtp_hybrid_override_pattern")
    if kinds is None:
        letters = {"attention": "*", "full_attention": "*", "moe": "E", "mlp": "-"}
        kinds = [letters.get(kind, "?") for kind in config.get("mtp_layers_block_type") or ("attention", "moe")]
    return "".join(kinds)


def parts(shape: Shape, config: Config, names: list[str], *, apart: bool) -> list[dict[str, str]]:
    """The tensors of each module among *names* of a checkpoint: our name -> theirs.

    apart: whether they stand in a directory of the head's own.
    """
    layers = text_config(config).get("num_hidden_layers", 0)
    found: list[dict[str, str]] = []
    while True:
        step = len(found)
        roots = (root.format(step=step, layer=layers + step) for root in shape.roots if root or apart)
        tried = (_part(shape, config, names, root) for root in roots)
        module = next((part for part in tried if "eh_proj.weight" in part), None)
        if module is None:
            return found
        found.append(module)
        if not shape.several:
            return found


def _part(shape: Shape, config: Config, names: list[str], root: str) -> dict[str, str]:
    last = len(pattern(config)) - 1 if shape.family == "Nemotron-H" else 0
    rules = [(theirs.format(last=last), ours) for theirs, ours in shape.names]
    # Where the block is named, what begins with no part of a head stands beside it: others have that root too.
    strict = any(not ours or ours == theirs for theirs, ours in rules)
    module = {}
    for name in names:
        if not name.startswith(root) or name.endswith("rotary_emb.inv_freq"):
            continue
        rest = name.removeprefix(root)
        rule = next(((theirs, ours) for theirs, ours in rules if rest.startswith(theirs)), None)
        if rule is not None:
            module[rule[1] + rest.removeprefix(rule[0])] = name
        elif not strict:
            module[rest] = name
    return module
