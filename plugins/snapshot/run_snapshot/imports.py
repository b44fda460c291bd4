"""Which of a project's files a module imports, read from the sources without running them."""

from __future__ import annotations

import ast
import importlib.util
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

__all__ = ["Closure", "Source", "follow_imports", "is_installed", "locate_module"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A module's file."""

    module: str  # dotted name; a file given by path has its stem
    file: Path
    folder: Path | None = None  # where a file given by path lies: its imports are looked for here too


@dataclass(kw_only=True, slots=True)
class Closure:
    """The files that some modules reach through imports."""

    files: dict[Path, str] = field(default_factory=dict)  # file -> module
    external: set[str] = field(default_factory=set)  # top-level names of installed distributions
    notes: list[str] = field(default_factory=list)  # what could not be followed


def follow_imports(starts: Iterable[Source]) -> Closure:
    """The project's own files that the starts reach, themselves included.

    Installed packages are named and not followed, except the package that a start itself lies in. Imports inside
    functions count; `importlib.import_module("name")` counts when the name is written out.
    """
    closure = Closure()
    starts = list(starts)
    inside = {start.module.split(".")[0] for start in starts if is_installed(start.file)}
    waiting = starts
    while waiting:
        source = waiting.pop()
        if source.file in closure.files:
            continue
        closure.files[source.file] = source.module
        waiting += _reached(source, inside, closure)
    return closure


def is_installed(file: Path) -> bool:
    """Whether a file belongs to Python or to an installed distribution, not to a project."""
    text = str(file)
    return any(text.startswith(folder) for folder in _installed_folders()) or bool(
        {"site-packages", "dist-packages"} & set(file.parts)
    )


def locate_module(name: str, extra: Iterable[Path] = ()) -> ModuleSpec | None:
    """Where a dotted name would be imported from; nothing is imported for it. `extra` is looked in last, after the path."""
    parts = name.split(".")
    spec = _top_level(parts[0], extra)
    for depth in range(2, len(parts) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(".".join(parts[:depth]), list(spec.submodule_search_locations))
    return spec


def _reached(source: Source, inside: set[str], closure: Closure) -> list[Source]:
    if source.file.suffix != ".py":
        return []
    try:
        tree = ast.parse(source.file.read_bytes())
    except (SyntaxError, ValueError) as error:
        closure.notes.append(f"{source.file.name} can't be parsed ({error}): its imports are not followed")
        return []
    found: list[Source] = []
    for name in dict.fromkeys(_imported_names(tree, source, closure)):
        found += _sources(name, source, inside, closure)
    return found


def _sources(name: str, source: Source, inside: set[str], closure: Closure) -> Iterator[Source]:
    """The files of a dotted name: of the module, and of every package on the way to it."""
    top = name.split(".", maxsplit=1)[0]
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return
    parts = name.split(".")
    extra = [source.folder] if source.folder else []
    for depth in range(1, len(parts) + 1):
        dotted = ".".join(parts[:depth])
        spec = locate_module(dotted, extra)
        if spec is None:
            return  # an attribute of the module before, or not installed
        if not spec.has_location or spec.origin is None:
            continue  # a namespace package
        file = Path(spec.origin).resolve()
        if is_installed(file) and top not in inside:
            closure.external.add(top)
            return
        yield Source(module=dotted, file=file, folder=source.folder)


def _imported_names(tree: ast.AST, source: Source, closure: Closure) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, source)
            if base:
                yield base
            yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.Call) and _is_dynamic(node.func):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value.lstrip(".")
            else:
                closure.notes.append(
                    f"{source.file.name}, line {node.lineno}: an import by a computed name is not followed"
                )


def _base(node: ast.ImportFrom, source: Source) -> str:
    """The module that a `from` names, absolute."""
    if not node.level:
        return node.module or ""
    package = source.module.split(".")
    if source.file.name != "__init__.py":
        package = package[:-1]
    package = package[: len(package) - (node.level - 1)]
    return ".".join([*package, *([node.module] if node.module else [])])


def _is_dynamic(function: ast.expr) -> bool:
    name = (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
    return name in ("import_module", "__import__")


def _top_level(name: str, extra: Iterable[Path]) -> ModuleSpec | None:
    loaded = sys.modules.get(name)
    spec = getattr(loaded, "__spec__", None)
    if spec is not None and spec.origin != "built-in":
        return spec if isinstance(spec, ModuleSpec) else None
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        found = None
    if found is not None and found.has_location:
        return found
    # A folder without __init__.py gives way to a module anywhere later on the path.
    return PathFinder.find_spec(name, [*map(str, extra), str(Path.cwd())]) or found


@lru_cache(maxsize=1)
def _installed_folders() -> tuple[str, ...]:
    """Where Python and distributions lie."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {*(sysconfig.get_path(name) for name in names), *site.getsitepackages(), site.getusersitepackages()}
    return tuple(f"{Path(folder).resolve()}/" for folder in folders if folder)
