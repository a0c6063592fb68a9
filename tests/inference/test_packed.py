"""The packed form of the dense family: the same numbers, each weight once in memory, other structures left alone."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx import nn
from tiny_models import bare, make_llama

from worker.engine.load import load
from worker.engine.packed import NotDenseError, pack
from worker.kernels.matvec import Affine


def small(kind: str = "llama", **changed: object) -> nn.Module:
    return bare(kind, **{"intermediate_size": 128, **changed})


def test_the_module_goes_on_with_views_of_the_packed_weights() -> None:
    model = small()
    ids = mx.array([[1, 2, 3, 4]])
    before = model(ids)
    mx.eval(before)
    mx.clear_cache()
    held = mx.get_active_memory()
    packed = pack(model)
    mx.clear_cache()
    # The tables of the rope are new, and nothing else.
    assert mx.get_active_memory() - held < 16_384
    assert (model(ids) == before).all()
    first = model.model.layers[0]
    assert (packed.layers[0].qkv.weight[:64] == first.self_attn.q_proj.weight).all()
    assert (packed.layers[0].gate_up.weight[128:] == first.mlp.up_proj.weight).all()


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (8, 64)])
def test_quantised_weights_stay_packed(bits: int, group: int) -> None:
    model = small()
    nn.quantize(model, group, bits)
    before = model(mx.array([[1, 2, 3]]))
    packed = pack(model)
    weight = packed.layers[1].gate_up.weight
    assert isinstance(weight, Affine)
    assert (weight.bits, weight.group, weight.words.shape) == (bits, group, (256, 64 * bits // 32))
    x = mx.random.normal((3, 64))
    mlp = model.model.layers[1].mlp
    assert (packed.layers[1].gate_up(x)[:, :128] == mlp.gate_proj(x)).all()
    assert (model(mx.array([[1, 2, 3]])) == before).all()


def test_biases_and_norms_of_q_and_k_are_kept() -> None:
    assert pack(small("qwen2")).layers[0].qkv.bias.shape == (128,)
    layer = pack(small("qwen3")).layers[0]
    assert layer.q_norm.shape == layer.k_norm.shape == (16,)
    assert layer.heads.norm_eps == 1e-5


def gelu_norms(model: nn.Module) -> None:
    model.model.norm = nn.LayerNorm(64)


def mixed_bits(model: nn.Module) -> None:
    attention = model.model.layers[1].self_attn
    attention.q_proj = attention.q_proj.to_quantized(32, 4)


def one_bias(model: nn.Module) -> None:
    model.model.layers[0].self_attn.k_proj = nn.Linear(64, 32, bias=True)


def other_mode(model: nn.Module) -> None:
    nn.quantize(model, mode="mxfp4")


def extra_part(model: nn.Module) -> None:
    model.model.layers[0].extra = nn.Linear(64, 64)


def own_epsilon(model: nn.Module) -> None:
    model.model.layers[0].input_layernorm.eps = 1e-6


def silent_heads(model: nn.Module) -> None:
    for block in model.model.layers:
        del block.self_attn.n_heads


def test_a_sliding_window_is_refused_though_a_short_text_does_not_show_it() -> None:
    with pytest.raises(NotDenseError, match="another cache"):
        pack(small(layer_types=["full_attention", "sliding_attention"], sliding_window=40))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (gelu_norms, "norms are of another kind"),
        (mixed_bits, "quantised in different ways"),
        (one_bias, "some of its joint products have a bias"),
        (other_mode, "packed in a way of its own|quantised in different ways"),
        (extra_part, "other parts than attention"),
        (own_epsilon, "differ in epsilon"),
        (silent_heads, "does not tell its heads"),
    ],
)
def test_another_structure_is_refused_in_words_and_left_alone(change: object, why: str) -> None:
    model = small()
    change(model)
    weight = model.model.layers[0].self_attn.q_proj.weight
    with pytest.raises(NotDenseError, match=why):
        pack(model)
    assert model.model.layers[0].self_attn.q_proj.weight is weight


def test_a_loaded_checkpoint_packs(tmp_path: Path) -> None:
    packed = pack(load(make_llama(tmp_path)).model)
    assert packed.head.weight.shape[0] == packed.embed.weight.shape[0], "the head is tied"
    assert packed.layers[0].table is not None
