"""Texts lose what no compiler reads, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from kernels.test_every_kernel import EXAMPLES

from worker.kernels import dialect
from worker.kernels.dialect import Launch
from worker.kernels.text import compact, in_file, needed

HEADER = """
#define FN static
FN float half_of(float v) { return v / 2; }
FN void two_f16(int u) {
  u++; }
#define TWO(T) two_##T(1)
#define ASM "{ %0"
FN void loads(int* o) {
  asm(ASM ", %1 }; }" : "=r"(o[0]),
      "=r"(o[1])); }
FN int unused(int a) { return a; }
"""


def test_what_a_body_uses_through_another_stays() -> None:
    assert "half_of" in needed(HEADER, "half_of(2.0f);")
    kept = needed(HEADER, "half_of(2.0f);")
    assert "#define FN static" in kept
    assert "two_f16" not in kept


def test_a_name_that_a_macro_puts_together_stays() -> None:
    kept = needed(HEADER, "TWO(f16);")
    assert "FN void two_f16(int u) {\n  u++; }" in kept
    assert "unused" not in kept


def test_brackets_in_strings_end_nothing() -> None:
    kept = needed(HEADER, "loads(o);")
    assert '"=r"(o[1])); }' in kept
    assert "ASM" in kept


def test_comments_and_spaces_go() -> None:
    assert compact("int a ;  // one\n#define B( x )  x\n\n/* two\nlines */ int c = a * b;\n") == (
        "int a;\n#define B( x ) x\nint c = a * b;"
    )


def test_a_text_lies_in_a_file_and_shapes_are_still_seen(tmp_path: Path) -> None:
    line = in_file("x[pool_shape[2] + q_strides[0]];", tmp_path, "cu")
    (file,) = tmp_path.iterdir()
    assert line == f'\n#include "{file}"\n// pool_shape q_strides\n'
    assert file.read_text() == "x[pool_shape[2] + q_strides[0]];"
    assert in_file("x[pool_shape[2] + q_strides[0]];", tmp_path, "cu") == line


WORDS = re.compile(r"#define (\w+)|FN \w+ (\w+)\(")


@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_word_that_a_kernel_uses_is_defined(name: str, cuda: bool) -> None:
    """A name of the whole header that is used in what is kept has its definition there too."""
    for example in EXAMPLES[name]:
        check_words(example, cuda=cuda)


def check_words(example: Callable[[], Launch], *, cuda: bool) -> None:
    kernel = example().kernel
    whole = (dialect._CUDA_HEADER if cuda else dialect._METAL_HEADER) + dialect._LOADS
    if kernel.matrix:
        whole += dialect._MATRIX + (dialect._CUDA_MATRIX if cuda else dialect._METAL_MATRIX)
    all_names = {one for match in WORDS.findall(whole) for one in match if one} | {"two_bf16", "two_f16"}
    kept = dialect.header(kernel, cuda=cuda)
    has = {one for match in WORDS.findall(kept) for one in match if one}
    text = kept + kernel.body
    uses = {one for one in all_names if re.search(rf"\b{one}\b", text)}
    if "two_##T" in text:
        uses |= {"two_bf16", "two_f16"}
    own = {word.split("(")[0] for word, _ in kernel.defines}
    assert uses - has - own == set()
    assert kept.count("{") == kept.count("}")
    assert kept.count("(") == kept.count(")")
