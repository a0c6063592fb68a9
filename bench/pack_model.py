"""Takes a pulled model to a machine that is reached by small parcels only.

    python bench/pack_model.py split MODEL OUT --first 56     here: OUT/model-1 and OUT/model-2
    python bench/pack_model.py join OUT FOLDER                there, once OUT has both
    python bench/pack_model.py expand FOLDER/pulled FOLDER    there: FOLDER/4bit and FOLDER/bf16

`expand` writes what the bench of speculation measures: the quantised weights with bfloat16 scales, and the same
weights dequantised to bfloat16. It computes on the CPU, where nothing has to be compiled.
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import click
import mlx.core as mx

MIB = 1024 * 1024
# Sixteen kinds of number in four bits: a higher preset finds nothing more.
PRESET = 1
# What belongs to the pulled weights alone.
LEFT_OUT = ("model.safetensors", "model.safetensors.index.json", "mtplx-manifest.json", "config.json")


@click.group()
def main() -> None:
    """Split, join, expand."""


@main.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--first", default=56, show_default=True, help="MiB of the first part.")
def split(model: Path, out: Path, first: int) -> None:
    """Write the directory MODEL as two parts into the folder OUT."""
    out.mkdir(parents=True, exist_ok=True)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=PRESET) as archive:
        for path in sorted(model.iterdir()):
            archive.add(path, arcname=path.name)
    whole = packed.getvalue()
    for place, part in enumerate((whole[: first * MIB], whole[first * MIB :]), start=1):
        (out / f"model-{place}").write_bytes(part)
        click.echo(f"{out / f'model-{place}'}: {len(part) / MIB:.1f} MiB")


@main.command()
@click.argument("parts", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("folder", type=click.Path(path_type=Path))
def join(parts: Path, folder: Path) -> None:
    """Unpack the two parts in the folder PARTS into FOLDER/pulled."""
    whole = b"".join((parts / f"model-{place}").read_bytes() for place in (1, 2))
    with tarfile.open(fileobj=io.BytesIO(whole), mode="r:xz") as archive:
        archive.extractall(folder / "pulled", filter="data")


@main.command("expand")
@click.argument("pulled", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("folder", type=click.Path(path_type=Path))
def expand_here(pulled: Path, folder: Path) -> None:
    """Write both forms of the model in PULLED into FOLDER."""
    mx.set_default_device(mx.cpu)
    expand(pulled, folder)


def expand(pulled: Path, folder: Path) -> None:
    """Write *folder*/4bit and *folder*/bf16 of the model in *pulled*."""
    config = json.loads((pulled / "config.json").read_text())
    weights: dict[str, mx.array] = {}
    for path in sorted(pulled.glob("*.safetensors")):
        weights |= mx.load(str(path))
    plain = {name: value for name, value in config.items() if not name.startswith("quantization")}
    save(pulled, folder / "4bit", config, halved(weights))
    save(pulled, folder / "bf16", plain, halved(dequantised(weights, config["quantization"])))


def halved(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """All floats as bfloat16."""
    return {
        name: value.astype(mx.bfloat16) if mx.issubdtype(value.dtype, mx.floating) else value
        for name, value in weights.items()
    }


def dequantised(weights: dict[str, mx.array], quantisation: dict[str, Any]) -> dict[str, mx.array]:
    """Every quantised weight as float32, by its own entry of *quantisation* or the general one."""
    found = {}
    for name, value in weights.items():
        base, _, kind = name.rpartition(".")
        if kind in ("scales", "biases") and f"{base}.scales" in weights:
            continue
        if f"{base}.scales" in weights:
            terms = quantisation.get(base, quantisation)
            scales, biases = (weights[f"{base}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            found[name] = mx.dequantize(value, scales, biases, group_size=terms["group_size"], bits=terms["bits"])
        else:
            found[name] = value
    return found


def save(pulled: Path, where: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> None:
    """Write a model directory with everything else that *pulled* holds."""
    where.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(where / "model.safetensors"), weights, metadata={"format": "mlx"})
    (where / "config.json").write_text(json.dumps(config))
    for path in pulled.iterdir():
        if path.name not in LEFT_OUT:
            shutil.copy(path, where / path.name)


if __name__ == "__main__":
    main()
