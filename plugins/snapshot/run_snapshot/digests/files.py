"""Digests of files: sha256 for integrity, xxh3 to see quickly whether a touched file changed (`file-sha256-v1`)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import xxhash

__all__ = ["FileDigest", "digest_file", "git_blob", "sha256_of", "xxh3_of_file"]

_BUFFER = 4 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class FileDigest:
    """One file's content."""

    bytes: int
    sha256: str
    xxh3: str


def digest_file(path: Path) -> FileDigest:
    """Both digests in one reading."""
    sha, fast, size = hashlib.sha256(), xxhash.xxh3_128(), 0
    buffer = bytearray(_BUFFER)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            sha.update(view[:count])
            fast.update(view[:count])
            size += count
    return FileDigest(bytes=size, sha256=sha.hexdigest(), xxh3=fast.hexdigest())


def xxh3_of_file(path: Path) -> str:
    """The fast digest alone."""
    fast = xxhash.xxh3_128()
    buffer = bytearray(_BUFFER)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            fast.update(view[:count])
    return fast.hexdigest()


def sha256_of(content: bytes) -> str:
    """The sha256 of some bytes, in hex."""
    return hashlib.sha256(content).hexdigest()


def git_blob(content: bytes) -> str:
    """The id git gives to this content when no filter (line endings, LFS) applies."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
