"""mlx-lm's filters and penalties of logits, without the rest of mlx-lm.

The package imports transformers, which takes seconds. Who only draws, as a child of `draw_kernels.py` does, has no
use for it, so the one file is loaded by itself.
"""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final

__all__ = ["apply_top_k", "apply_top_p", "make_logits_processors"]


def _sample_utils() -> ModuleType:
    package = find_spec("mlx_lm")
    if package is None or package.origin is None:
        raise ImportError("No module named 'mlx_lm'", name="mlx_lm")
    spec = spec_from_file_location(f"{__name__}.sample_utils", Path(package.origin).with_name("sample_utils.py"))
    assert spec is not None, "a path of a .py file has a loader"
    assert spec.loader is not None, "as above"
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_utils: Final = _sample_utils()
apply_top_k: Final = _utils.apply_top_k
apply_top_p: Final = _utils.apply_top_p
make_logits_processors: Final = _utils.make_logits_processors
