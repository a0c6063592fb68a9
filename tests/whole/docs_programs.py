"""The three programs as the documents name them, with the worker double in the place of the real worker."""

import sys

from broker.__main__ import main as broker
from mtplx.cli import serve
from mtplx.cli.main import main as mtplx
from mtplx.settings import Settings
from mtplx.testing import main as double


def scripted(settings: Settings) -> tuple[str, ...]:
    """The command of a worker double for *settings*."""
    back, mode = settings.endpoint("back"), str(settings.scheduler_mode)
    return (sys.executable, "-P", "-m", "mtplx.testing", "--back", back, "--mode", mode)


def serve_with_double(settings: Settings, say, **commands):
    """`serve_until_told`, with a double."""
    return until_told(settings, say, worker=scripted(settings), **commands)


until_told = serve.serve_until_told
serve.serve_until_told = serve_with_double

if __name__ == "__main__":
    name = sys.argv.pop(1)
    if name == "mtplx-worker":
        sys.argv[1:] = scripted(Settings.load())[4:]
    {"mtplx": mtplx, "mtplx-broker": broker, "mtplx-worker": double}[name](prog_name=name)
