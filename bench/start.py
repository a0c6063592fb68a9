"""The time from the start of a process to a warm engine: a program that the decode bench starts.

    python bench/start.py MODEL

loads the model of a folder that `save` wrote, builds the engine as a worker does, warms it up, and tells the times
of day at which it had done what, and what the engine is.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import models

from worker.engine.build import Options, build
from worker.engine.draw import warm_rows
from worker.engine.draw_kernels import Wanted, compiling
from worker.engine.verify_bank import SIZES
from worker.kernels import disk_cache

LIMIT_S = 240.0
WARM = "draws of drafts warm"


def save(shape: models.Shape, where: Path) -> None:
    """Write the model to *where* as mlx-lm reads it. Made on the CPU: what a GPU holds is not read from here."""
    where.mkdir(parents=True)
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        mx.save_safetensors(str(where / "model.safetensors"), dict(tree_flatten(models.make(shape).parameters())))
    finally:
        mx.set_default_device(device)
    (where / "config.json").write_text(json.dumps(shape.config))


def timed(where: Path, kernels: Path) -> tuple[float, str]:
    """Seconds until a fresh process is ready with the model of *where*, and what it told.

    *kernels*: where MLX finds compiled kernels and leaves those that it compiles.
    """
    kernels.mkdir(exist_ok=True)
    began = time.time()
    done = subprocess.run(
        ["env", f"MLX_PTX_CACHE_DIR={kernels}", sys.executable, __file__, str(where)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise SystemExit(f"the engine did not start:\n{done.stderr[-2000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    line = ", ".join(f"{what} after {at - began:.1f} s" for what, at in told["times"].items())
    info = ", ".join(f"{key} {value}" for key, value in told["info"].items())
    return told["times"][WARM] - began, f"{line}; {info}"


def main() -> None:
    """Be ready, and say when."""
    times = {"imports": time.time()}

    def done(what: str) -> None:
        times.setdefault(what, time.time())

    where = Path(sys.argv[1])
    kernels = disk_cache.open_folder(where.parent)
    module, config = load_model(where)
    shape = models.Shape(title="model", config=config, quantised="quantization" in config)
    loaded = models.loaded(shape, module)
    done("model loaded")
    # As a worker in hyper mode, which verifies drafts, trees among them.
    with compiling(Wanted.of(loaded, SIZES), kernels) as compiled:
        done("children started")

        def collected() -> None:
            done("self-check done")
            compiled()
            done("children collected")

        engine, info = build(loaded, Options(kernel_folder=kernels, before_memory=collected, trees=True))
        done("engine built")
        compiled()
        engine.warm_up()
    done("engine warm")
    warm_rows(loaded.width, loaded.vocabulary, loaded.dtype, SIZES[1:])
    done(WARM)
    print(json.dumps({"times": times, "info": {key: info[key] for key in ("lane", "form", "why", "kernels")}}))


if __name__ == "__main__":
    main()
