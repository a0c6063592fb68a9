"""The rules of the house, held by tests: import directions, sizes, who catches everything."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("mtplx", "broker", "worker")
SOURCES = sorted(path for room in (*ROOMS, "bench") for path in (ROOT / room).rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 400, 60, 7

# Which modules of ours, and which libraries of weight, a folder may import.
MAY_IMPORT = {
    "mtplx": {"mtplx", "zmq", "msgpack", "click", "rich"},
    "broker": {"broker", "mtplx", "zmq", "msgpack", "click", "opentelemetry", "prometheus_client"},
    "worker": {
        "worker",
        "mtplx",
        "zmq",
        "click",
        "mlx",
        "mlx_lm",
        "tokenizers",
        "transformers",
        "jinja2",
        "huggingface_hub",
        "numpy",
    },
}
SOCKET_FILES = {
    "mtplx/keys.py", "mtplx/link.py", "mtplx/sockets.py", "mtplx/scripted_worker.py", "broker/loop.py", "broker/endpoints.py", "broker/guard.py", "worker/loop.py", "worker/pulse.py",
}  # fmt: skip
# The GGUF is read by MLX; the detokenizer and the stop matcher are mlx-lm's, and touch no array. Beside the books of the
# pages stand the arrays that they are about.
MLX_FILES = {
    "worker/gguf.py",
    "worker/text.py",
    "worker/kv/pool.py",
    "worker/kv/cache.py",
    "worker/speculation/draft_model.py",
}
# Drafts are thought out in plain Python; a drafter that is a model, and what drives a lane, are named here.
SPECULATION_WITH_LANES = {
    "worker/speculation/build.py",
    "worker/speculation/draft_model.py",
    "worker/speculation/executor.py",
}
CATCH_ALL_FILES = {"broker/loop.py", "worker/loop.py", "mtplx/cli/program.py"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parts[len(ROOT.parts)] in ROOMS], ids=name_of)
def test_a_room_imports_only_what_its_rule_allows(path: Path) -> None:
    name = name_of(path)
    found = imports(path)
    assert found <= MAY_IMPORT[name.split("/")[0]]
    if "zmq" in found:
        assert name in SOCKET_FILES, "sockets live in the loops and the clients' link"
    if found & {"mlx", "mlx_lm"}:
        places = ("worker/engine/", "worker/kernels/", "worker/forge/", "worker/speculation/mtp/")
        assert name.startswith(places) or name in MLX_FILES, "MLX is touched in the engine and the kernels alone"
    if "rich" in found:
        assert name.startswith("mtplx/cli/"), "only the command line draws tables"


@pytest.mark.parametrize("path", sorted((ROOT / "worker" / "speculation").glob("*.py")), ids=name_of)
def test_speculation_imports_nothing_but_itself(path: Path) -> None:
    if name_of(path) in SPECULATION_WITH_LANES:
        return
    assert imports(path) <= {"worker"}
    modules = {
        node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
    }
    assert {module for module in modules if module.startswith("worker")} <= {
        f"worker.speculation.{name}" for name in ("acceptance", "draft", "costs", "ngram", "planner", "shadow")
    }


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_functions_and_parameter_lists_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, node.name
            names = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            assert len([one for one in names if one not in ("self", "cls")]) <= MAX_PARAMETERS, node.name


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_only_the_loops_and_the_entry_points_catch_everything(path: Path) -> None:
    if name_of(path) in CATCH_ALL_FILES:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        # A handler that ends in a bare raise tidies up and swallows nothing.
        if isinstance(node, ast.ExceptHandler) and ast.dump(node.body[-1]) != "Raise()":
            assert node.type is not None
            assert getattr(node.type, "id", "") not in ("Exception", "BaseException"), f"line {node.lineno}"


def test_only_the_settings_read_the_environment() -> None:
    readers = {name_of(path) for path in SOURCES if re.search(r"os\.environ|getenv", path.read_text())}
    assert readers == {"mtplx/settings.py"}


def test_producers_and_broker_start_without_mlx() -> None:
    """Importing the client and the broker pulls in neither MLX nor the engine nor tables."""
    code = (
        "import sys, mtplx, broker.__main__\n"
        "print([name for name in ('mlx', 'mlx_lm', 'worker', 'numpy', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_map_names_every_module_and_only_files_that_exist() -> None:
    words = (ROOT / "ARCHITECTURE.md").read_text().replace("`", " ").split()
    named = {word.strip(".,;:()") for word in words}
    paths = {word for word in named if "/" in word and word.endswith((".py", ".md")) and "*" not in word}
    assert paths, "the map names files"
    missing = sorted(path for path in paths if not (ROOT / path).exists())
    assert missing == []
    modules = {
        name_of(path) for path in SOURCES if path.name != "__init__.py" and not name_of(path).startswith("bench/")
    }
    assert sorted(modules - paths) == [], "the map names every module"
