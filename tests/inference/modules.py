"""Bare models of many kinds with random weights, and a small serial engine over a lane: greedy, no text, no job."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import generate_step

from worker.engine.forward import rows_needed
from worker.engine.module_lane import ModuleForward, look_at
from worker.kv.pages import Pages
from worker.kv.prefix import Cache, Opened, PrefixIndex

VOCABULARY = 97
NAN = float("nan")
_DENSE = {
    "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "rope_theta": 10000.0,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_DENSE, "tie_word_embeddings": True},
    "qwen3": {**_DENSE, "tie_word_embeddings": False},
    "phi3": {**_DENSE, "num_key_value_heads": 4},
    "openelm": {
        "head_dim": 16, "num_transformer_layers": 3, "model_dim": 64, "vocab_size": VOCABULARY, "ffn_dim_divisor": 16,
        "num_query_heads": [4, 4, 6], "num_kv_heads": [2, 2, 3], "ffn_multipliers": [1.0, 2.0, 1.5],
    },
    "gemma3_text": {**_DENSE, "num_hidden_layers": 4, "sliding_window": 32, "sliding_window_pattern": 2},
    "lfm2": {
        "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 4096, "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "block_dim": 64, "block_ff_dim": 96,
        "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False, "full_attn_idxs": [1],
    },
    "mamba": {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "state_size": 8, "num_hidden_layers": 2,
        "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4, "tie_word_embeddings": True,
    },
    "deepseek_v2": {
        **_DENSE, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "qk_nope_head_dim": 16, "moe_intermediate_size": 32,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048},
    },
    "iquestloopcoder": {**_DENSE, "loop_window_size": 16},
}  # fmt: skip
PAGED = ["llama", "qwen3", "phi3", "openelm"]


def make(kind: str, dtype: mx.Dtype = mx.float32, seed: int = 1) -> Any:
    """A model of *kind* whose greedy text varies."""
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    model = module.Model(module.ModelArgs.from_dict({"model_type": kind, **CONFIGS[kind]}))
    keys = iter(mx.random.split(mx.random.key(seed), 300))
    model.update(
        tree_map(
            lambda x: mx.random.normal(x.shape, key=next(keys)) * 3 / x.shape[-1] ** 0.5 if x.ndim > 1 else x,
            model.parameters(),
        )
    )
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    return model


def prompt(length: int, seed: int = 0) -> list[int]:
    ids: list[int] = mx.random.randint(0, VOCABULARY, (length,), key=mx.random.key(seed)).tolist()
    return ids


def yardstick(model: Any, ids: list[int], count: int, chunk: int = 512) -> list[int]:
    """What mlx-lm's own loop draws."""
    steps = generate_step(mx.array(ids), model, max_tokens=count, prefill_step_size=chunk)
    return [token for token, _ in steps]


@dataclass
class Serial:
    """Runs one prompt after the other over a lane whose pools are poisoned at first."""

    model: Any
    pages: int = 40
    prefill_rows: int = 1
    chunk: int = 512
    lane: ModuleForward = field(init=False)

    def __post_init__(self) -> None:
        layout = look_at(self.model)
        self.lane = ModuleForward(self.model, layout, pages=self.pages, prefill_rows=self.prefill_rows)
        for pool in self.lane.pools:
            pool.arrays[:] = [mx.full(array.shape, NAN, dtype=array.dtype) for array in pool.arrays]
            pool.finish()
        self.books = Pages(self.pages)
        size = max(self.lane.page_bytes, 1)
        limit = size * self.pages if self.lane.prefix_reuse else 0
        align = self.prefill_rows
        self.index = PrefixIndex(self.books, page_bytes=size, limit_bytes=limit, align=align)
        self.opened: Opened | None = None
        self.logits: list[mx.array] = []

    def open(self, ids: list[int], budget: int, cache: Cache = True) -> mx.array:
        """Read a prompt: logits [1, V] behind it."""
        rows = rows_needed(len(ids) + budget, self.prefill_rows)
        self.opened = self.index.open(ids, rows, owner=b"", cache=cache)
        self.lane.begin(self.opened)
        done, logits = self.opened.cached, None
        step = self.chunk if self.prefill_rows == 1 else self.prefill_rows
        while logits is None:
            piece = ids[done : done + step]
            done += len(piece)
            logits = self.lane.read(piece, done == len(ids))
            assert self.opened.sequence.length == done
        return logits

    def close(self, ids: list[int], verified: int) -> None:
        assert self.opened is not None
        self.opened.sequence.truncate(verified)
        self.lane.settle()
        self.index.store(self.opened, ids, verified)
        self.lane.end()
        self.opened.sequence.release()
        self.index.check()

    def answer(self, ids: list[int], count: int, cache: Cache = True) -> list[int]:
        """*count* greedy ids; their logits [V] are in `logits`."""
        logits, drawn, self.logits = self.open(ids, count, cache), [], []
        while True:
            token = mx.argmax(logits[-1]).astype(mx.uint32)[None]
            self.logits.append(logits[-1])
            drawn.append(token.item())
            if len(drawn) == count:
                break
            logits = self.lane.rows(token)
        self.close([*ids, *drawn], len(ids) + count - 1)
        return drawn
