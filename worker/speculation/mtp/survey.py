"""Which head stands in a directory, by the headers of its files: no weight is read."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mtplx.errors import ModelFilesError
from mtplx.paths import is_file
from worker.engine.files import Tensor, model_name, tensors_of
from worker.speculation.mtp.shapes import Config, Shape, declared, parts, shape_of

CONFIG: Final = "config.json"
FORGED: Final = "mtplx_mtp"
_WEIGHT: Final = ".weight"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model before it is loaded. name: for people. where: its files are. tensors: of all of them."""

    name: str
    where: str
    config: Config
    tensors: dict[str, Tensor]

    @classmethod
    def at(cls, folder: Path) -> Checkpoint:
        """That in *folder*.

        Raises:
            ModelFilesError: files are damaged.
        """
        return cls(model_name(folder), str(folder), read_config(folder), tensors_in(folder))


@dataclass(frozen=True, slots=True)
class Found:
    """The native head of a model, or why there is none.

    shape: its row. modules: of each, our names -> tensors by their names. why: what to do, where there are none.
    """

    shape: Shape | None
    modules: list[dict[str, str]] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    why: str = ""

    @property
    def bytes(self) -> int:
        """Of its weights, as they lie in the files."""
        names = {name for module in self.modules for name in module.values()}
        return sum(self.tensors[name].bytes for name in names)


def read_config(folder: Path) -> Config:
    """The config of the directory; empty where it has none.

    Raises:
        ModelFilesError: it cannot be read.
    """
    file = folder / CONFIG
    if not is_file(file):
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise TypeError("it is no object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelFilesError(f"{file} cannot be read as JSON ({error}). Fetch it again.") from error
    return found


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """The tensors of all safetensors files in the directory.

    Raises:
        ModelFilesError: a file is damaged.
    """
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= tensors_of(file)
    return found


def survey(model: Checkpoint, own: Path | None = None) -> Found:
    """Look for the head of *model*; *own*, where given, is the directory to look in.

    Raises:
        ModelFilesError: files are damaged.
    """
    config = model.config
    shape = shape_of(config)
    if shape is None:
        kind = config.get("model_type", "unknown")
        return Found(
            None, why=f"no head is known for models of type {kind}; `mtplx forge` makes one for dense ones"
        )
    tensors = model.tensors if own is None else tensors_in(own)
    try:
        modules = parts(shape, config, list(tensors), apart=own is not None)
    except (TypeError, ValueError) as error:
        raise ModelFilesError(
            f"{model.where}/{CONFIG} does not describe a {shape.family} head ({error}). Fetch it again."
        ) from error
    if modules:
        return Found(shape, modules, tensors)
    if own is not None:
        why = f"{own} holds no tensors of a {shape.family} head, such as {_example(shape, config)}"
    elif declared(shape, config):
        why = (
            f"its config declares a head ({shape.declared}), but the files hold none: conversions drop it. Take "
            "it from the original checkpoint, or a head published apart, and name that directory: --mtp PATH"
        )
    else:
        why = f"its config declares no head ({shape.declared}), and the files hold none"
    return Found(shape, tensors=tensors, why=why)


def _example(shape: Shape, config: Config) -> str:
    theirs = next((theirs for theirs, ours in shape.names if ours == "eh_proj."), "eh_proj.")
    layers = config.get("num_hidden_layers", 0)
    return shape.roots[0].format(step=0, layer=layers) + theirs + _WEIGHT.removeprefix(".")
