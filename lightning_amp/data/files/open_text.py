"""Opens text files that may be gzip-compressed, which is detected from their content."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from lightning_amp.errors import DataError

GZIP_MAGIC = b"\x1f\x8b"


@contextmanager
def open_stream(path: Path, *, what: str) -> Iterator[BinaryIO]:
    """Open a plain or gzip-compressed file for reading bytes; messages call it `what`.

    Raises:
        DataError: The file is absent, is a directory, or its compressed stream is damaged.
    """
    if not path.is_file():
        found = "a directory" if path.is_dir() else "nothing"
        raise DataError(f"{path}: expected the {what}, found {found}; give the path of an existing file")
    try:
        with path.open("rb") as raw:
            compressed = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            if not compressed:
                yield raw
                return
            with gzip.open(raw) as stream:
                yield cast(BinaryIO, stream)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: the compressed {what} is truncated or damaged ({error}); copy or download it again"
        ) from error
