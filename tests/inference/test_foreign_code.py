"""Code that a checkpoint brings is never run, whichever file asks for it."""

import json
import shutil
from contextlib import suppress

import pytest

from mtplx.errors import BadJobError, ModelFilesError
from mtplx.job import Job
from worker.engine.load import load
from worker.text import encode_prompt

NAME = "foreign"


@pytest.fixture
def model(tiny_dir, tmp_path):
    """A model directory with code in it that leaves a file when it runs."""
    path = tmp_path / "model"
    shutil.copytree(tiny_dir, path)
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Model: ...\nclass ModelArgs: ...\nclass Tokenizer: ...\n"
    for place in (path, tmp_path):
        (place / f"{NAME}.py").write_text(code)
    return path


def change(model, file, **values):
    content = json.loads((model / file).read_text()) if (model / file).exists() else {}
    (model / file).write_text(json.dumps(content | values))


ASKS = {
    "a model file of its own": ("config.json", {"model_file": f"{NAME}.py"}),
    "a model type that is a path": ("config.json", {"model_type": f"../../{NAME}"}),
    "a model type that is another package's": ("config.json", {"model_type": f".{NAME}"}),
    "a config class of its own": ("config.json", {"auto_map": {"AutoConfig": f"{NAME}.Model"}}),
    "a model class of its own": ("config.json", {"auto_map": {"AutoModelForCausalLM": f"{NAME}.Model"}}),
    "a tokenizer class of its own": (
        "tokenizer_config.json",
        {"auto_map": {"AutoTokenizer": [f"{NAME}.Tokenizer", None]}, "tokenizer_class": "Tokenizer"},
    ),
    "a tokenizer of another repository": (
        "tokenizer_config.json",
        {"auto_map": {"AutoTokenizer": [f"evil/{NAME}--{NAME}.Tokenizer", None]}, "tokenizer_class": "Tokenizer"},
    ),
    "a chat template module": ("tokenizer_config.json", {"chat_template_type": f"../../{NAME}"}),
    "a tool parser module": ("tokenizer_config.json", {"tool_parser_type": f"../../{NAME}"}),
}


@pytest.mark.parametrize("asked", ASKS)
def test_what_a_checkpoint_asks_to_run_is_not_run(model, monkeypatch, asked):
    monkeypatch.syspath_prepend(str(model))
    monkeypatch.chdir(model)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file, values = ASKS[asked]
    change(model, file, **values)
    with suppress(ModelFilesError):
        load(model)
    assert not (model.parent / "ran").exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.__class__.__base__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_chat_template_reaches_nothing_but_its_messages(model, template):
    loaded = load(model)
    loaded.tokenizer.chat_template = template
    with pytest.raises(BadJobError, match="template"):
        encode_prompt(loaded.tokenizer, Job.parse({"messages": [{"role": "user", "content": "x"}]}))
