"""The file of `--trace-file`: whole lines only, also where the disk is full."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path


class LineFile(io.TextIOBase):
    """Appends each text it gets in full or not at all. Nothing is buffered.

    Raises:
        OSError: from the constructor and from `write`, as the system says it.
    """

    def __init__(self, path: Path) -> None:
        # What is no file, such as a pipe that nobody reads, would keep the caller waiting for ever.
        number = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        self._file = open(number, "ab", buffering=0)  # noqa: SIM115, PTH123 - closed by `close`
        if not stat.S_ISREG(os.fstat(number).st_mode):
            self._file.close()
            raise OSError(errno.EINVAL, "it is no plain file", str(path))

    def write(self, text: str) -> int:
        """Append *text*; what was written of it is taken back where the rest does not fit."""
        data = text.encode()
        start = self._file.seek(0, os.SEEK_END)
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError:
            # Unless somebody else appends to the same file, too.
            if self._file.seek(0, os.SEEK_END) == start + written:
                self._file.truncate(start)
            raise
        return len(text)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()
