"""A file mapped read-only, whose size was taken when it was opened.

It knows no file type.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from cardan.errors import CheckpointError


class MappedFile:
    """The bytes of a file without reading them.

    Attributes:
        path: the file.
        size: its length in bytes.
        view: all of it, read-only.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise CheckpointError(f"{path} is empty. Fetch it again.") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
        self.view = memoryview(self._map)
        self.size = len(self.view)

    @property
    def buffer(self) -> mmap.mmap:
        """The map itself; slicing it copies to bytes, which is the fastest way to read many short pieces."""
        return self._map

    def close(self) -> None:
        """Give up the map. Memory that views still refer to stays mapped until the last of them is gone."""
        self.view.release()
        try:
            self._map.close()
        except BufferError:
            return
