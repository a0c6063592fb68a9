from dataclasses import dataclass
import mlx.core as mx
from worker.engine.sample import KeyedSampler
@dataclass
class Drawn:
    token: mx.array
    read: mx.array
    top: tuple | None = None
class Draws:
    def __init__(self, sampling, history, *, width, vocabulary):
        self.s=KeyedSampler(sampling, len(history)); self.v=vocabulary; self.w=width
    def __call__(self, logits, position):
        logits=logits.astype(mx.float32)
        if self.w>self.v: logits=mx.where(mx.arange(self.w)>=self.v, -mx.inf, logits)
        t=self.s(logits-mx.logsumexp(logits,axis=-1,keepdims=True)).astype(mx.uint32)
        return Drawn(t,t)
