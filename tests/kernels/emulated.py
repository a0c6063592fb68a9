"""A GPU of this machine's own: kernels run their Metal text as soon as a graph would hold one, and write in place.

The stand-in runs on copies; what it wrote into the pool is put into the very buffer of the operand, as a GPU would,
behind MLX's back. Nothing is lazy then, so `mx.compile` is off meanwhile. Faults can be put in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np
import pytest
from kernels import standin

from worker.kernels import dialect
from worker.kernels.dialect import Launch
from worker.kernels.operands import Affine

WRITTEN = "pool"
plain_product = Affine.product


def product(weight: Affine, x: mx.array) -> mx.array:
    """MLX's quantised product as a GPU computes it: sums in float32, where the CPU's are of the type of *x*."""
    scales, biases = weight.scales.astype(mx.float32), weight.biases.astype(mx.float32)
    wide = replace(weight, scales=scales, biases=biases)
    return plain_product(wide, x.astype(mx.float32)).astype(x.dtype)


@dataclass
class Machine:
    """What may go wrong: `spoiled` changes an output, `lost` drops what a launch wrote, `refused` fails to compile.

    `late` writes are done only after that many more launches. `launches` counts by the name of the kernel.
    """

    spoiled: Callable[[Launch, mx.array], mx.array] = lambda _launch, output: output
    lost: Callable[[Launch], bool] = lambda _launch: False
    refused: Callable[[Launch], bool] = lambda _launch: False
    late: int = 0
    launches: dict[str, int] = field(default_factory=dict)
    _pending: list[tuple[int, mx.array, mx.array]] = field(default_factory=list)
    _count: int = 0
    _exporting: bool = False

    @contextmanager
    def on(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
        """Every kernel runs here while this is open."""
        original = Launch.run
        with monkeypatch.context() as patch:
            patch.setattr(dialect, "target", lambda: "metal")
            patch.setattr(
                Launch,
                "run",
                lambda launch, target: original(launch, target) if self._exporting else self._run(launch),
            )
            patch.setattr(Affine, "product", product)
            mx.disable_compile()
            try:
                yield self
            finally:
                mx.enable_compile()

    def _run(self, launch: Launch) -> mx.array:
        for launches in dialect._listening:
            launches.append(launch)
        name = launch.kernel.name
        self.launches[name] = self.launches.get(name, 0) + 1
        self._count += 1
        if self.refused(launch):
            raise RuntimeError(f"Unable to build metal library from source: {name}")
        self._settle()
        named = dict(zip(launch.kernel.inputs, launch.arrays, strict=True))
        mx.eval(*launch.arrays)
        self._exporting = True
        try:
            output, written = standin.run(launch, written=WRITTEN if WRITTEN in named else None)
        finally:
            self._exporting = False
        if written is not None and not self.lost(launch):
            self._pending.append((self._count + self.late, named[WRITTEN], written))
            self._settle()
        return self.spoiled(launch, output)

    def _settle(self) -> None:
        while self._pending and self._pending[0][0] <= self._count:
            _, array, written = self._pending.pop(0)
            buffer(array)[...] = buffer(written)


def buffer(array: mx.array) -> np.ndarray:
    """The array's own memory, as numbers of its size."""
    same = array.view({2: mx.uint16, 4: mx.uint32}[array.dtype.size])
    mx.eval(same)
    return np.array(same, copy=False)
