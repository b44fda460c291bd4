"""Git through GitPython, every command with a time limit and without locks, prompts or the user's pagers."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from run_snapshot.errors import GitError
from run_snapshot.redact import redact_text

__all__ = ["Git", "Sink"]

# Settings under which git looks at the files themselves, not at what an index or a daemon remembers of them.
_SETTINGS = ("core.fsmonitor=false", "core.untrackedCache=false", "core.ignoreStat=false", "core.quotePath=false")
_ENVIRONMENT = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_PAGER": "cat"}
_PROBE_SECONDS = 5.0


class Sink(io.RawIOBase):
    """Takes what git prints: keeps a digest and the size of all, and the bytes up to a cap."""

    def __init__(self, cap: int) -> None:
        import hashlib

        super().__init__()
        self._sha256 = hashlib.sha256()
        self._cap = cap
        self.size = 0
        self.content = bytearray()

    def write(self, chunk: Any) -> int:
        """Take some bytes."""
        self._sha256.update(chunk)
        self.size += len(chunk)
        if self.size <= self._cap:
            self.content += chunk
        return len(chunk)

    @property
    def is_whole(self) -> bool:
        """Whether everything was kept."""
        return self.size <= self._cap

    @property
    def sha256(self) -> str:
        """Of everything, kept or not."""
        return self._sha256.hexdigest()


class Git:
    """Git commands in one folder."""

    def __init__(self, folder: Path, *, seconds: float = 30.0) -> None:
        self.folder = folder
        self._seconds = seconds
        self._git = _gitpython().Git(str(folder))
        self._environment = dict(_ENVIRONMENT)

    def run(self, *words: str, stdin: IO[bytes] | None = None) -> str:
        """What a command prints; a `GitError` when it fails or takes too long."""
        return os.fsdecode(self._execute(words, stdin, None)).rstrip("\n")

    def records(self, *words: str) -> list[str]:
        """What a command with `-z` prints, split."""
        return [record for record in os.fsdecode(self._execute(words, None, None)).split("\0") if record]

    def stream(self, sink: Sink, *words: str) -> None:
        """Let a command print into a sink."""
        self._execute(words, None, sink)

    def succeeds(self, *words: str) -> bool:
        """Whether a command ends with 0; a time-out is an error still."""
        try:
            self._execute(words, None, None)
        except GitError as error:
            if error.__cause__ is None:
                raise
            return False
        return True

    @contextmanager
    def fresh_index(self) -> Iterator[Git]:
        """This git with an index of HEAD that remembers nothing: assume-unchanged bits and file times are gone."""
        with tempfile.TemporaryDirectory(prefix="run-snapshot-") as folder:
            fresh = Git(self.folder, seconds=self._seconds)
            fresh._environment |= {"GIT_INDEX_FILE": str(Path(folder, "index"))}
            fresh.run("read-tree", "HEAD")
            yield fresh

    def hash_objects(self, paths: Sequence[str]) -> list[str]:
        """The blob ids that files would get, with the repository's filters (line endings, LFS)."""
        if not paths:
            return []
        with tempfile.TemporaryFile() as listing:
            listing.write(b"".join(os.fsencode(path) + b"\n" for path in paths))
            listing.seek(0)
            return self.run("hash-object", "--stdin-paths", stdin=listing).splitlines()

    def _execute(self, words: Sequence[str], stdin: IO[bytes] | None, sink: Sink | None) -> bytes:
        git = _gitpython()
        settings = [part for setting in _SETTINGS for part in ("-c", setting)]
        command = [self._git.GIT_PYTHON_GIT_EXECUTABLE or "git", *settings, *words]
        try:
            result: Any = self._git.execute(
                command,
                istream=stdin,
                output_stream=sink,
                stdout_as_string=False,
                strip_newline_in_stdout=False,
                kill_after_timeout=self._seconds,
                env=self._environment,
            )
        except git.exc.GitCommandError as error:
            raise _told(words, error, self._seconds) from (
                None if "Timeout: the command" in str(error.stderr) else error
            )
        except (git.exc.GitCommandNotFound, OSError) as error:
            raise GitError(f"git can't be run: {error}") from None
        return result if isinstance(result, bytes) else b""


def _told(words: Sequence[str], error: Any, seconds: float) -> GitError:
    text = str(error.stderr)
    if "Timeout: the command" in text:
        return GitError(f"`git {words[0]}` took longer than {seconds:g} s and was stopped")
    if "dubious ownership" in text:
        return GitError("another user owns the repository and git refuses it (git config safe.directory lets it)")
    lines = [line for line in text.strip().strip("'").splitlines() if line.strip()]
    return GitError(redact_text(f"`git {words[0]}` failed: {lines[0].strip() if lines else error.status}")[:300])


def _gitpython() -> Any:
    """The library; importing it runs git without a time limit, so git is tried before."""
    import sys

    if "git" not in sys.modules:
        _probe()
        os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    import git

    return git


def _probe() -> None:
    executable = os.environ.get("GIT_PYTHON_GIT_EXECUTABLE", "git")
    found = shutil.which(executable)
    if found is None:
        raise GitError(f"{executable!r} is not installed or not on the PATH")
    process = subprocess.Popen(
        [found, "version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        process.wait(_PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        raise GitError(f"`git version` did not answer within {_PROBE_SECONDS:g} s") from None
