"""Real repositories and real folders; nothing here stands in for git, pip or MLflow."""

from __future__ import annotations

import base64
import hashlib
import importlib
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

IDENTITY = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "protocol.file.allow=always")


def git(folder: Path, *words: str) -> str:
    """Run git and give what it prints."""
    done = subprocess.run(["git", *IDENTITY, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder: Path, files: dict[str, str], message: str = "Change") -> str:
    """Write files, commit them, give the revision."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def make_repository(tmp_path: Path) -> Callable[..., Path]:
    """Makes repositories with one commit."""

    def make(name: str = "project", files: dict[str, str] | None = None) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        git(folder, "init", "-q", "-b", "main")
        commit(folder, files or {"train.py": "lr = 1\n", "README.md": "hello\n"})
        return folder

    return make


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> Path:
    """A wheel that pip installs."""
    plain = name.lower().replace("-", "_").replace(".", "_")
    info = f"{plain}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    contents = {
        **files,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, text in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(text.encode())}")
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{plain}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in contents.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,"]) + "\n")
    return wheel


def install(target: Path, wheel: Path) -> None:
    """Let pip install a wheel into a folder."""
    quiet = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--no-compile"]
    words = ["install", *quiet, "--target", str(target), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, capture_output=True)


def _holds_distributions(entry: str) -> bool:
    """True for site folders and for folders of editable installs."""
    folder = Path(entry or ".")
    return "site-packages" in entry or any(folder.glob("*.egg-info")) or any(folder.glob("*.dist-info"))


@contextmanager
def only_installed(folder: Path) -> Iterator[None]:
    """Let the import path hold Python itself and one site folder: a small environment of which everything is known."""
    import git.repo  # what is imported late comes first
    import pyarrow.parquet

    assert git.repo
    assert pyarrow.parquet
    path, argv = sys.path, sys.argv
    importlib.invalidate_caches()
    sys.path = [str(folder), *(entry for entry in path if not _holds_distributions(entry))]
    sys.argv = [str(folder / "no-script.py")]
    try:
        yield
    finally:
        sys.path, sys.argv = path, argv
