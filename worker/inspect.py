"""`python -m worker.inspect`: what could draft for a model, as JSON or as lines. Headers are read, no weights."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mtplx.errors import MtplxError
from mtplx.settings import Settings
from worker import hub
from worker.engine.files import check_model_files, resolve_model
from worker.speculation.mtp import forged
from worker.speculation.mtp.shapes import text_config
from worker.speculation.mtp.survey import FORGED, Checkpoint, read_config, survey, tensors_in

Row = dict[str, Any]


def model_of(settings: Settings) -> Checkpoint:
    """The model that *settings* name; one on the hub is not fetched for this.

    Raises:
        ModelFilesError: it is not there, or not whole.
    """
    if hub.is_hub_id(settings.model):
        path = hub.whole_copy(settings.model)
        if path is None:
            return hub.checkpoint(settings.model)
    else:
        path = resolve_model(settings.model, settings.cache_dir)
        check_model_files(path)
    return Checkpoint.at(path)


def report(model: Checkpoint, own: Path | None = None) -> dict[str, Any]:
    """The draft sources of *model*: {"model", "sources": a row each}.

    own: a directory with a head. A row: source, usable, what, bytes (of the head, or null), why (one is refused).

    Raises:
        ModelFilesError: the head is not whole.
    """
    rows = [
        _row("prompt lookup", usable=True, what="ids that the text had before, of any model"),
        _head(model, None),
    ]
    if own is not None:
        rows.append(_head(model, own))
    smaller = "any smaller model with the same tokenizer: --draft model:PATH"
    return {"model": model.name, "sources": [*rows, _row("draft model", usable=True, what=smaller)]}


def _head(model: Checkpoint, own: Path | None) -> Row:
    source = "head of its own" if own is None else f"head in {own}"
    config = {} if own is None else read_config(own)
    if own is not None and config.get("model_type") == FORGED:
        head, theirs = forged.read_config(own), text_config(model.config)
        size = sum(one.bytes for one in tensors_in(own).values())
        other = [name for name in ("hidden_size", "vocab_size") if getattr(head, name) != theirs.get(name)]
        why = f"it was made for another model: its {' and '.join(other)} differ" if other else ""
        why = why or ("" if size else f"{own} holds no weights")
        return _row(source, usable=not why, what="made by mtplx forge, post-norm", bytes_=size, why=why)
    found = survey(model, own)
    if found.shape is None or not found.modules:
        return _row(source, usable=False, why=found.why)
    modules = "1 module" if len(found.modules) == 1 else f"{len(found.modules)} modules, one a depth"
    norm = "post-norm" if found.shape.takes_normed else "pre-norm"
    return _row(source, usable=True, what=f"{found.shape.family}, {modules}, {norm}", bytes_=found.bytes)


def _row(source: str, *, usable: bool, what: str = "", bytes_: int | None = None, why: str = "") -> Row:
    return {"source": source, "usable": usable, "what": what, "bytes": bytes_, "why": why}


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m worker.inspect", description="What could draft for a model.")
    parser.add_argument("model")
    parser.add_argument("--mtp", type=Path, help="a directory with a head")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    given = parser.parse_args(arguments)
    try:
        settings = Settings.load({"model": given.model})
        found = report(model_of(settings), given.mtp)
    except MtplxError as error:
        sys.stderr.write(f"mtplx-inspect: {error}\n")
        return int(error.exit_code)
    if given.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        for row in found["sources"]:
            sys.stdout.write(f"{row['source']}: {row['what'] if row['usable'] else 'no: ' + row['why']}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
