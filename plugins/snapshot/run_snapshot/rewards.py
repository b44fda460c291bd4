"""Reward functions: their sources, those that they import from the project, what they close over, and their git blobs."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from run_snapshot.digests.files import git_blob, sha256_of
from run_snapshot.distributions import owners
from run_snapshot.errors import GitError, UsageError
from run_snapshot.git import Git
from run_snapshot.imports import Closure, Source, follow_imports, locate_module
from run_snapshot.redact import redact, redact_text
from run_snapshot.repository import find_repository

__all__ = ["RewardFile", "RewardFunction", "Rewards", "read_rewards"]

FileState = Literal["clean", "changed", "untracked", "outside", "unknown"]
_SOURCE_CAP = 2**20  # bytes of a source that is copied


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFunction:
    """One function of the run."""

    path: str  # as the config names it
    file: str
    module: str
    qualname: str
    settings: dict[str, Any]  # defaults, closure, partial arguments, an object's attributes


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFile:
    """One source that the rewards are made of."""

    path: str  # absolute
    module: str
    sha256: str
    blob: str  # as git would store it
    state: FileState  # of this file against its repository's revision
    repository: str
    revision: str
    head_blob: str  # "" when the revision does not have it
    why: str  # of `unknown`
    source: str  # redacted; "" when not text or too long
    patch: str  # from the revision to the file, redacted


@dataclass(kw_only=True, slots=True)
class Rewards:
    """All reward code of a run."""

    functions: list[RewardFunction] = field(default_factory=list)
    files: list[RewardFile] = field(default_factory=list)
    external: dict[str, str] = field(default_factory=dict)  # distribution -> version, of what the files import
    notes: list[str] = field(default_factory=list)
    unresolved: list[str] = field(default_factory=list)  # functions whose source was not found, and why


def read_rewards(rewards: Iterable[str | Callable[..., Any]], *, seconds: float = 30.0) -> Rewards:
    """The sources behind import paths (``package.module:function``, ``file.py:function``) or functions."""
    result = Rewards()
    starts: list[Source] = []
    for reward in rewards:
        try:
            function, sources = _resolve(reward)
        except (UsageError, ImportError, SyntaxError, OSError) as error:
            result.unresolved.append(f"{_name(reward)}: {error}")
            continue
        result.functions.append(function)
        starts += sources
    closure = follow_imports(starts)
    result.notes += closure.notes
    result.external = _distributions(closure)
    result.files = _files(closure, seconds)
    return result


def _name(reward: str | Callable[..., Any]) -> str:
    return reward if isinstance(reward, str) else getattr(reward, "__qualname__", type(reward).__name__)


def _resolve(reward: str | Callable[..., Any]) -> tuple[RewardFunction, list[Source]]:
    if not isinstance(reward, str):
        return _from_object(_name(reward), reward)
    source, attribute = _from_path(reward)
    loaded = _loaded(source, attribute)
    if loaded is not None:
        function, more = _from_object(reward, loaded)
        return function, [source, *more]
    found = RewardFunction(path=reward, file=str(source.file), module=source.module, qualname=attribute, settings={})
    return found, [source]


def _from_path(path: str) -> tuple[Source, str]:
    module, colon, attribute = path.rpartition(":")
    if not colon:
        module, _, attribute = path.rpartition(".")
    if not module or not attribute or path.endswith(".py"):
        raise UsageError("it is no import path: write package.module:function or file.py:function")
    if module.endswith(".py"):
        file = Path(module).absolute()
        if not file.is_file():
            raise UsageError(f"the file {str(file)!r} does not exist")
        return Source(module=file.stem, file=file.resolve(), folder=file.parent), attribute
    spec = locate_module(module)
    if spec is None or spec.origin is None or not spec.has_location:
        raise UsageError(f"the module {module!r} is not found on the import path or in {str(Path.cwd())!r}")
    return Source(module=module, file=Path(spec.origin).resolve()), attribute


def _loaded(source: Source, attribute: str) -> Any:
    """The function when its module is imported already: the module is not run for a snapshot."""
    modules = [m for m in list(sys.modules.values()) if getattr(m, "__file__", None)]
    for module in modules:
        if Path(str(module.__file__)).name == source.file.name and Path(str(module.__file__)).resolve() == source.file:
            found: Any = module
            for name in attribute.split("."):
                found = getattr(found, name, None)
            return found
    return None


def _from_object(path: str, reward: Any) -> tuple[RewardFunction, list[Source]]:
    """A function, method, partial, class or callable object."""
    settings: dict[str, Any] = {}
    others: list[Any] = []
    target = _unwrapped(reward, settings, others)
    file = inspect.getsourcefile(target)
    if file is None or not Path(file).is_file():
        raise UsageError("its source is in no file: it was made by exec or typed into a prompt")
    function = RewardFunction(
        path=path,
        file=str(Path(file).resolve()),
        module=str(getattr(target, "__module__", "")),
        qualname=str(getattr(target, "__qualname__", "")),
        settings=redact(settings),
    )
    sources = [_source_of(part) for part in (target, *others)]
    return function, [source for source in sources if source is not None]


def _unwrapped(reward: Any, settings: dict[str, Any], others: list[Any]) -> Any:
    """The function or class behind a callable; what it carries goes into `settings`, what it calls into `others`."""
    if isinstance(reward, functools.partial):
        for key, value in [*enumerate(reward.args), *reward.keywords.items()]:
            settings[f"partial.{key}"] = _told(value, others)
        return _unwrapped(reward.func, settings, others)
    if inspect.ismethod(reward):
        settings.update({f"self.{k}": _told(v, others) for k, v in _attributes(reward.__self__).items()})
        return reward.__func__
    if inspect.isclass(reward):
        return reward
    if inspect.isfunction(reward):
        inner = inspect.unwrap(reward)
        if inner is not reward:
            others.append(reward)
        settings.update(_carried(inner, others))
        return inner
    settings.update({f"self.{k}": _told(v, others) for k, v in _attributes(reward).items()})
    return type(reward)


def _carried(function: Any, others: list[Any]) -> dict[str, Any]:
    """A function's defaults and closure."""
    cells = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
    carried = {f"closure.{name}": _told(value, others) for name, value in cells.items()}
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    return carried | {f"default.{name}": _told(value, others) for name, value in defaults.items()}


def _attributes(value: Any) -> dict[str, Any]:
    return dict(getattr(value, "__dict__", {}))


def _told(value: Any, others: list[Any], depth: int = 0) -> Any:
    """A value as plain types; functions and objects by name, and their sources are followed."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple | set | frozenset) and depth < 4 and len(value) <= 1000:
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [_told(item, others, depth + 1) for item in items]
    if isinstance(value, dict) and depth < 4 and len(value) <= 1000:
        return {str(key): _told(item, others, depth + 1) for key, item in value.items()}
    named = value if hasattr(value, "__qualname__") else type(value)
    if callable(value):
        others.append(named)
    return f"<{getattr(named, '__module__', '')}.{named.__qualname__}>"


def _source_of(target: Any) -> Source | None:
    try:
        file = inspect.getsourcefile(target)
    except TypeError:
        return None
    if file is None or not Path(file).is_file():
        return None
    resolved = Path(file).resolve()
    module = str(getattr(target, "__module__", "")) or resolved.stem
    known = (
        importlib.util.find_spec(module)
        if module in sys.modules and getattr(sys.modules[module], "__spec__", None)
        else None
    )
    if known is None or locate_module(module) is None:
        return Source(module=resolved.stem, file=resolved, folder=resolved.parent)
    return Source(module=module, file=resolved)


def _distributions(closure: Closure) -> dict[str, str]:
    return owners(closure.external) if closure.external else {}


def _files(closure: Closure, seconds: float) -> list[RewardFile]:
    by_root: dict[Path | None, list[Path]] = defaultdict(list)
    for file in sorted(closure.files):
        by_root[find_repository(file)].append(file)
    files = []
    for root, members in by_root.items():
        files += _in_repository(root, members, closure, seconds) if root else [_file(f, closure) for f in members]
    return sorted(files, key=lambda file: (file.module, file.path))


def _in_repository(root: Path, members: list[Path], closure: Closure, seconds: float) -> list[RewardFile]:
    try:
        git = Git(root, seconds=seconds)
        revision = git.run("rev-parse", "HEAD")
        names = [file.relative_to(root.resolve()).as_posix() for file in members]
        listing = git.records("ls-tree", "-z", "HEAD", "--", *names)
        heads = {line.split("\t", 1)[1]: line.split("\t", 1)[0].split()[2] for line in listing}
        blobs = git.hash_objects(names)
        return [
            _file(file, closure, git=git, root=root, revision=revision, head=heads.get(name, ""), blob=blob)
            for file, name, blob in zip(members, names, blobs, strict=True)
        ]
    except (GitError, ValueError) as error:
        return [_file(file, closure, root=root, why=str(error)) for file in members]


def _file(
    file: Path, closure: Closure, *, git: Git | None = None, root: Path | None = None, revision: str = "", head: str = "",
    blob: str = "", why: str = ""
) -> RewardFile:  # fmt: skip
    content = file.read_bytes()
    state: FileState = "outside" if root is None else "unknown" if why else "untracked" if not head else "clean"
    if head and head != blob:
        state = "changed"
    text = content.decode("utf-8", "replace") if len(content) <= _SOURCE_CAP and file.suffix == ".py" else ""
    before = git.run("cat-file", "blob", head) + "\n" if git is not None and state == "changed" else ""
    return RewardFile(
        path=str(file),
        module=closure.files[file],
        sha256=sha256_of(content),
        blob=blob or git_blob(content),
        state=state,
        repository=str(root or ""),
        revision=revision,
        head_blob=head,
        why=why,
        source=redact_text(text),
        patch=redact_text(_unified(before, text, file.name)) if state == "changed" else "",
    )


def _unified(before: str, after: str, name: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
    )
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)
