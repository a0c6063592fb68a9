"""Heads that `mtplx forge` wrote, through the door that all heads come by."""

from __future__ import annotations

import json
import random

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from speculating.mtp_checkpoints import drawn
from speculating.mtp_formula import Formula, forged_block
from speculating.test_mtp_heads import Made, run

from mtplx.errors import ModelFilesError
from worker.engine.load import LoadedModel
from worker.engine.trunk import Trunk
from worker.speculation.mtp.forged import ForgedConfig, save
from worker.speculation.mtp.weights import load_head

FORMULA = Formula(
    block=forged_block,
    modules=("head.",),
    names={"e": "enorm.weight", "h": "hnorm.weight", "proj": "eh_proj.weight", "norm": "norm.weight"},
    inner="block.",
    head="model.embed_tokens.weight",
)


class Forged(Made):
    """A random head in *folder*, over a dense model."""

    def __init__(self, folder, loaded: LoadedModel) -> None:
        self.formula, self.folder, self.loaded = FORMULA, folder, loaded
        args = loaded.model.args
        self.trunk = Trunk.of(loaded)
        self.shape = {
            "hidden_size": args.hidden_size,
            "intermediate_size": 2 * args.hidden_size,
            "num_attention_heads": args.num_attention_heads,
            "num_key_value_heads": args.num_key_value_heads,
            "head_dim": args.hidden_size // args.num_attention_heads,
            "rms_norm_eps": args.rms_norm_eps,
            "vocab_size": loaded.width,
            "trunk": self.trunk.fingerprint(),
        }
        self.config = {**self.shape, "rope_theta": 10000.0}
        head = ForgedConfig(**self.shape).module()
        drawn_ = drawn({name: one.shape for name, one in tree_flatten(head.parameters())}, "forged")
        head.load_weights([(name, mx.array(one)) for name, one in drawn_.items()])
        save(folder, ForgedConfig(**self.shape), head)
        named = {f"head.{name}": one for name, one in tree_flatten(head.parameters())}
        named |= dict(tree_flatten(loaded.model.parameters()))
        self.raw = {name: np.array(one).astype(np.float64) for name, one in named.items()}
        luck = random.Random(3)
        self.ids = [luck.randrange(4, 200) for _ in range(16)]
        tap = self.trunk.tap()
        loaded.model(mx.array([self.ids]))
        self.states = tap.states()
        self.trunk.stack[self.trunk.norm_name] = tap.norm


def test_logits_are_those_of_the_formula_at_every_depth(tiny_model, tmp_path) -> None:
    made = Forged(tmp_path, tiny_model("llama"))
    errors = run(made, load_head(tmp_path, made.loaded, made.trunk, tmp_path))
    assert max(errors) < 1e-5, errors


def test_a_head_of_another_model_is_refused(tiny_model, tmp_path) -> None:
    made = Forged(tmp_path, tiny_model("llama"))
    for change, said in (
        ({"trunk": "0" * 16}, "was made for another model"),
        ({"vocab_size": made.loaded.width + 1}, f"was made for a model of {made.loaded.width + 1} ids"),
    ):
        config = {"model_type": "mtplx_mtp", **made.shape, **change}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelFilesError, match=said):
            load_head(tmp_path, made.loaded, made.trunk, tmp_path)
