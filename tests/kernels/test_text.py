"""Kernel texts lose what no compiler reads, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.kernels.text import compact, in_file, needed

HEADER = """
#define FN static inline
#define TWICE(x) ((x) + (x))
typedef unsigned short ushort;
FN float half_of(float v) { return v / 2; }
FN float quarter_of(float v) {
  return half_of(half_of(v)); }
FN void two_a(int* o) { o[0] = 1; }
FN void two_b(int* o) { o[0] = 2; }
#define PAIRS_OF(T) \\
FN void pair_of(T v, int* o) { \\
  two_##T(o); }
PAIRS_OF(a)
PAIRS_OF(b)
"""


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("x = 1;", set()),
        ("x = TWICE(2);", {"TWICE"}),
        ("x = quarter_of(v);", {"FN", "quarter_of", "half_of"}),
        ("ushort x;", {"ushort"}),
        ("pair_of(v, o);", {"FN", "PAIRS_OF", "two_a", "two_b"}),
    ],
)
def test_a_header_keeps_what_the_body_needs(body: str, names: set[str]) -> None:
    kept = needed(HEADER, body)
    every = {"FN", "TWICE", "ushort", "half_of", "quarter_of", "two_a", "two_b", "PAIRS_OF"}
    assert {name for name in every if name in kept} == names


def test_braces_within_assembly_end_no_function() -> None:
    header = (
        '#define LOAD(n) "{.reg .pred p; @p ld.global." n\n'
        'FN void load_two(int* o) {\n  asm(LOAD("v2 {%0,%1},[%2]; }")\n      : "=r"(o[0]), "=r"(o[1])); }\n'
        "FN void unused(int* o) { o[0] = 1; }\n"
    )
    kept = needed(header, "load_two(o);")
    assert kept.endswith('"=r"(o[1])); }\n')
    assert "unused" not in kept


def test_a_macro_that_makes_functions_stays_with_its_uses() -> None:
    kept = needed(HEADER, "pair_of(v, o);")
    assert kept.index("#define PAIRS_OF") < kept.index("PAIRS_OF(a)") < kept.index("PAIRS_OF(b)")


def test_spaces_and_comments_go_and_directives_keep_their_lines() -> None:
    text = "// why\n  float a [ 2 ] ;\n#define X (y)\n#define Z(a) \\\n  (a)\n  a = b / *p;  /* so\n it is */ c - -d;\n"
    assert compact(text) == "float a[2];\n#define X (y)\n#define Z(a) (a)\na = b / *p;c - -d;"


def test_a_text_in_a_file_is_one_line_that_includes_it(tmp_path: Path) -> None:
    line = in_file("x = pool_shape[2] + y_shape[0];", tmp_path, "cu")
    (path,) = tmp_path.iterdir()
    assert line == f'\n#include "{path}"\n// pool_shape y_shape\n'
    assert path.read_text() == "x = pool_shape[2] + y_shape[0];"
    assert in_file("x = pool_shape[2] + y_shape[0];", tmp_path, "cu") == line
    assert len(list(tmp_path.iterdir())) == 1
    assert in_file("y", tmp_path, "cu") != line
