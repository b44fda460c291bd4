"""A git repository: revision, whether it can be fetched again, and how the files on disk differ from it.

Clean or not is decided on the files' contents: they are hashed against the revision's blobs through an index that
remembers nothing, so an edit under `git update-index --assume-unchanged` shows.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from run_snapshot.digests.files import git_blob
from run_snapshot.errors import GitError
from run_snapshot.git import Git, Sink
from run_snapshot.redact import is_secret_file, redact_patch, redact_text

__all__ = ["CODE_SUFFIXES", "Patch", "Repository", "find_repository", "outputs_of", "read_repository", "untracked_code"]

State = Literal["clean", "dirty", "unknown"]

PATCH_CAP = 8 * 2**20  # bytes of a patch that is stored
_FILE_CAP = 2**20  # bytes of an untracked file that goes into the patch
CODE_SUFFIXES = frozenset(
    ".py .pyi .pyx .pxd .so .pyd .c .cc .cpp .cu .cuh .h .hpp .rs .sh .toml .cfg .ini .yaml .yml .jinja .j2 .ipynb".split()  # noqa: SIM905
)
_OUTPUTS = frozenset({"mlruns", "mlartifacts", "lightning_logs", "wandb", "checkpoints", "node_modules", "__pycache__"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """What brings the revision to what was on disk, new files included."""

    text: str  # redacted; "" when it was over the cap
    sha256: str  # of the patch as git prints it
    bytes: int
    is_whole: bool  # within the cap
    is_redacted: bool  # a secret was taken out: it no longer restores the file


@dataclass(frozen=True, kw_only=True, slots=True)
class Repository:
    """One repository at one time."""

    root: str
    status: str = "ok"  # or why nothing more is known
    revision: str = ""  # "" before the first commit
    branch: str = ""  # "" on a detached HEAD
    remote: str = ""  # without credentials
    is_bare: bool = False
    is_shallow: bool = False
    reachable: Literal["yes", "no", "unknown"] = "unknown"  # from a branch of a remote, as of the last fetch
    reachable_why: str = ""
    state: State = "unknown"
    changed: tuple[tuple[str, str, str], ...] = ()  # (path, blob in the revision, blob on disk); "" is absent
    untracked: tuple[tuple[str, str], ...] = ()  # (path, blob) of code that git does not follow
    submodules: tuple[tuple[str, str, str, str], ...] = ()  # (path, recorded, checked out, state)
    patch: Patch | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain types, without the patch's text."""
        record: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("root", "status", "revision", "branch", "remote", "is_bare", "is_shallow", "reachable",
                         "reachable_why", "state")
        }  # fmt: skip
        record |= {name: [list(row) for row in getattr(self, name)] for name in ("changed", "untracked", "submodules")}
        record["notes"] = list(self.notes)
        if self.patch is not None:
            keys = ("sha256", "bytes", "is_whole", "is_redacted")
            record["patch"] = {key: getattr(self.patch, key) for key in keys}
        return record


def find_repository(path: Path) -> Path | None:
    """The nearest folder above `path` that is a repository, found without running git."""
    start = path if path.is_dir() else path.parent
    for folder in (start, *start.parents):
        if (folder / ".git").exists() or _looks_bare(folder):
            return folder
    return None


def read_repository(
    root: Path, *, ignore: Sequence[Path] = (), seconds: float = 30.0, cap: int = PATCH_CAP
) -> Repository:
    """Everything about a repository; what git can't tell is said in `status`, and counts as unknown."""
    try:
        git = Git(root, seconds=seconds)
        return _read(git, root, ignore, cap)
    except GitError as error:
        return Repository(root=str(root), status=str(error), reachable_why=str(error))


def outputs_of(snapshot: Path) -> Path:
    """The folder whose files a run writes itself: its run directory, or the snapshot's folder alone."""
    return snapshot.parent if snapshot.name == "snapshot" and not (snapshot.parent / ".git").exists() else snapshot


def untracked_code(git: Git, root: Path, ignore: Sequence[Path] = ()) -> list[str]:
    """Code that git neither follows nor ignores; outputs of runs are left out."""
    ignored = [path.absolute() for path in ignore if not root.absolute().is_relative_to(path.absolute())]
    kept = []
    for name in git.records("ls-files", "--others", "--exclude-standard", "-z"):
        path = root / name
        if path.suffix.lower() not in CODE_SUFFIXES or _OUTPUTS & set(Path(name).parts) or not path.is_file():
            continue
        if not any(path.is_relative_to(folder) for folder in ignored) and not _in_a_run(path, root):
            kept.append(name)
    return sorted(kept)


def _read(git: Git, root: Path, ignore: Sequence[Path], cap: int) -> Repository:
    bare = git.run("rev-parse", "--is-bare-repository") == "true"
    has_head = git.succeeds("rev-parse", "--verify", "--quiet", "HEAD")
    revision = git.run("rev-parse", "HEAD") if has_head else ""
    shallow = git.run("rev-parse", "--is-shallow-repository") == "true"
    reachable, why = _reachable(git, revision, shallow)
    known: dict[str, Any] = {
        "root": str(root),
        "revision": revision,
        "branch": _line(git, "symbolic-ref", "--quiet", "--short", "HEAD"),
        "remote": redact_text(_remote(git)),
        "is_bare": bare,
        "is_shallow": shallow,
        "reachable": reachable,
        "reachable_why": why,
    }
    if bare or not has_head:
        why = "a bare repository has no files to compare" if bare else "the repository has no commit yet"
        return Repository(**known, notes=(why,))
    try:
        return Repository(**known, **_worktree(git, root, ignore, cap))
    except GitError as error:
        return Repository(**known, status=str(error))


def _worktree(git: Git, root: Path, ignore: Sequence[Path], cap: int) -> dict[str, Any]:
    """How the files on disk differ from HEAD."""
    untracked = untracked_code(git, root, ignore)
    sparse = {line[2:] for line in git.records("ls-files", "-v", "-z") if line[0] in "Ss"}
    with git.fresh_index() as fresh:
        fresh.succeeds("update-index", "-q", "--really-refresh")
        changed, links = _changed(fresh, root, sparse)
        shown = [name for name in untracked if _goes_into_patch(root / name, name)]
        for some in _batches(shown):
            fresh.run("add", "--intent-to-add", "--", *some)
        submodules = _submodules(git, root, links)
        patch = _patch(fresh, cap) if changed or shown else None
    dirty = bool(changed or untracked) or any(row[3] != "clean" or row[1] != row[2] for row in submodules)
    left_out = [name for name in untracked if name not in set(shown)]
    return {
        "state": "dirty" if dirty else "clean",
        "changed": tuple(changed),
        "untracked": tuple(zip(untracked, git.hash_objects(untracked), strict=True)),
        "submodules": tuple(submodules),
        "patch": patch,
        "notes": tuple(f"{name}: kept by digest only" for name in left_out),
    }


def _changed(fresh: Git, root: Path, sparse: set[str]) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Changed files with their blobs, and the paths of submodules."""
    fields = fresh.records("diff-index", "--raw", "-z", "--no-renames", "--ignore-submodules=all", "HEAD")
    rows = [(fields[i].split(), fields[i + 1]) for i in range(0, len(fields), 2)]
    rows = [(head, name) for head, name in rows if not (name in sparse and not (root / name).exists())]
    blobs = {name: _blob_on_disk(fresh, root / name, name) for _, name in rows}
    changed = [(name, head[2] if set(head[2]) != {"0"} else "", blobs[name]) for head, name in rows]
    listing = fresh.records("ls-files", "--stage", "-z")
    links = [line.split("\t", 1)[1] for line in listing if line.startswith("160000")]
    return changed, links


def _blob_on_disk(git: Git, path: Path, name: str) -> str:
    if path.is_symlink():
        return git_blob(str(path.readlink()).encode())
    return git.hash_objects([name])[0] if path.is_file() else ""


def _submodules(git: Git, root: Path, links: list[str]) -> list[tuple[str, str, str, str]]:
    rows = []
    for name in links:
        recorded = git.run("rev-parse", f"HEAD:{name}")
        if not (root / name / ".git").exists():
            rows.append((name, recorded, "", "not checked out"))
            continue
        inner = read_repository(root / name)
        rows.append((name, recorded, inner.revision, inner.state if inner.status == "ok" else "unknown"))
    return rows


def _patch(fresh: Git, cap: int) -> Patch:
    sink = Sink(cap)
    options = ("--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--ignore-submodules=all")
    fresh.stream(sink, "diff", *options, "--src-prefix=a/", "--dst-prefix=b/", "HEAD")
    raw = bytes(sink.content).decode("utf-8", "surrogateescape") if sink.is_whole else ""
    text = redact_patch(raw)
    return Patch(text=text, sha256=sink.sha256, bytes=sink.size, is_whole=sink.is_whole, is_redacted=text != raw)


def _goes_into_patch(path: Path, name: str) -> bool:
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_size <= _FILE_CAP and not is_secret_file(name)


def _reachable(git: Git, revision: str, shallow: bool) -> tuple[Literal["yes", "no", "unknown"], str]:
    if not revision:
        return "no", "there is no commit yet"
    if shallow:
        return "unknown", "the clone is shallow"
    if not git.run("remote"):
        return "no", "the repository has no remote"
    branches = git.run("for-each-ref", "--contains", revision, "--count=1", "--format=%(refname:short)", "refs/remotes")
    if branches:
        return "yes", f"{branches} has it, as of the last fetch"
    return "no", "no branch of a remote has it, as of the last fetch"


def _remote(git: Git) -> str:
    names = git.run("remote").splitlines()
    if not names:
        return ""
    return _line(git, "config", "--get", f"remote.{'origin' if 'origin' in names else names[0]}.url")


def _line(git: Git, *words: str) -> str:
    return git.run(*words) if git.succeeds(*words) else ""


def _looks_bare(folder: Path) -> bool:
    return (folder / "HEAD").is_file() and (folder / "objects").is_dir() and (folder / "refs").is_dir()


def _in_a_run(path: Path, root: Path) -> bool:
    """Whether a folder above, within the repository, is a run's directory."""
    above = [folder for folder in path.parents if folder.is_relative_to(root) and folder != root]
    return any((folder / "snapshot" / "manifest.json").is_file() or ((folder / "manifest.json").is_file() and
               (folder / "environment.json").is_file()) for folder in above)  # fmt: skip


def _batches(names: list[str], size: int = 200) -> list[list[str]]:
    return [names[i : i + size] for i in range(0, len(names), size)]
