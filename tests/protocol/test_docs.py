"""docs/protocol.md says what the code does."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
from protocol import make_vectors

from mtplx.errors import CODES, EXITS
from mtplx.job import Job

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("make_protocol", ROOT / "docs" / "make_protocol.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_generator_gives(maker):
    page = maker.PAGE.read_text()
    assert maker.filled(page) == page, "run: python docs/make_protocol.py"


def test_the_page_names_every_kind_key_field_and_code(maker):
    page = maker.PAGE.read_text()
    for table in make_vectors.TABLES.values():
        for kind in table.values():
            assert f"#### {make_vectors.kind_name(kind)} `0x{kind.KIND:02x}`" in page
    for name in [*CODES, *(field.name for field in dataclasses.fields(Job))]:
        assert f"| `{name}` |" in page


def test_the_example_on_the_page_is_the_exchange_of_the_vectors(maker):
    page = maker.PAGE.read_text()
    for vector in json.loads((make_vectors.HERE / "exchange.json").read_text()):
        for frame in vector["frames"]:
            assert frame in page


def test_the_table_of_exit_codes_is_that_of_the_code():
    page = (ROOT / "README.md").read_text()
    for code, ending in EXITS.items():
        assert f"| {int(code)} | {ending.meaning} | {'yes' if ending.again else 'no'} |" in page
    final = " ".join(str(int(code)) for code, ending in EXITS.items() if code and not ending.again)
    assert f"RestartPreventExitStatus={final}`" in page
