"""The text of every kernel still has all of the words that it uses."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from kernels.test_every_kernel import EXAMPLES

from worker.kernels import dialect
from worker.kernels.dialect import Launch

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
