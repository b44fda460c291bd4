"""A log file as text: its encoding, pieces of bounded size, lines of bounded length."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from pathlib import Path

from grpo_lightning.errors import DataError
from grpo_lightning.logs.records import Tally

__all__ = ["LINE_CHARS", "NESTED", "Source"]

CHUNK_BYTES = 1 << 20
LINE_CHARS = 8 << 20  # a longer line is skipped and counted
HEAD_BYTES = 1 << 18
NESTED = "\x1e"  # stands for "cursor up", which tqdm prints behind a bar inside another
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class Source:
    """A file to read several times. Memory stays bounded whatever it holds."""

    def __init__(self, path: str | Path, *, whole_lines: bool = False) -> None:
        """With `whole_lines` a last line without an end is left for later: it is still being written."""
        self.path = Path(path)
        self.whole_lines = whole_lines
        head = self._head()
        self.encoding = encoding_of(head)
        self.head = codecs.getincrementaldecoder(self.encoding)("replace").decode(head)

    def size(self) -> int:
        """Bytes on disk."""
        return self.path.stat().st_size

    def chunks(self) -> Iterator[str]:
        """The text in pieces of at most a megabyte."""
        decoder = codecs.getincrementaldecoder(self.encoding)("replace")
        try:
            with self.path.open("rb") as file:
                while data := file.read(CHUNK_BYTES):
                    yield decoder.decode(data)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}.") from error
        yield decoder.decode(b"", final=True)

    def lines(self, tally: Tally) -> Iterator[str]:
        """Lines without ends, ANSI codes and NULs; a carriage return ends a line too. Empty ones are left out."""
        rest, skipping = "", False
        for chunk in self.chunks():
            if "\n" not in chunk and "\r" not in chunk:
                rest = "" if skipping else rest + chunk
                if len(rest) > LINE_CHARS:
                    tally.skip()
                    rest, skipping = "", True
                continue
            *whole, rest = (rest + chunk).replace("\r", "\n").split("\n")
            if skipping:
                del whole[0]
                skipping = False
            yield from _clean(whole)
        if rest and not self.whole_lines:
            tally.cut = True
            yield from _clean([rest])

    def _head(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                return file.read(HEAD_BYTES)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}.") from error


def encoding_of(head: bytes) -> str:
    """The encoding that a file's first bytes show: a byte order mark, UTF-16 by its zero bytes, UTF-8, or else Windows-1252."""
    for mark, name in _BOMS:
        if head.startswith(mark):
            return name
    sample = head[:4096]
    half = max(1, len(sample) // 2)
    for name, zeros in (("utf-16-le", sample[1::2]), ("utf-16-be", sample[::2])):
        if zeros.count(0) > 0.4 * half and sample.count(0) < 0.6 * len(sample):
            return name
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(head)
    except UnicodeDecodeError:
        return "cp1252"
    return "utf-8"


def _clean(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if not line:
            continue
        text = _ANSI.sub("", line.replace("\x1b[A", NESTED)) if "\x1b" in line else line
        text = text.replace("\x00", "") if "\x00" in text else text
        if text and not text.isspace():
            yield text
