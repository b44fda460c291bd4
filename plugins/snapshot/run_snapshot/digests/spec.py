"""The names of the digest specifications, and how fields become bytes.

`framed(a, b, …)` writes each field after its length as 8 bytes, little endian: two lists of fields never give the same
bytes. A change of what a digest covers is a new name; an old snapshot is judged by the name that it carries.
"""

from __future__ import annotations

import xxhash

__all__ = ["FILE_SPEC", "ROWS_SPEC", "WEIGHTS_SPEC", "framed", "xxh3"]

WEIGHTS_SPEC = "weights-xxh3-128-v1"
ROWS_SPEC = "rows-xxh3-128-v1"
FILE_SPEC = "file-sha256-v1"


def framed(*fields: bytes) -> bytes:
    """The fields, each after its length.

    >>> framed(b"ab")
    b'\\x02\\x00\\x00\\x00\\x00\\x00\\x00\\x00ab'
    """
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)


def xxh3(content: bytes | bytearray | memoryview) -> bytes:
    """The 16 bytes of XXH3-128 with seed 0, in canonical (big-endian) order."""
    return xxhash.xxh3_128_digest(content)
