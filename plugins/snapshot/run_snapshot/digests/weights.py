"""The digest of a model's weights, `weights-xxh3-128-v1`.

* chunk: xxh3-128 of each 8 MiB of a tensor's bytes, row-major, little endian.
* tensor: xxh3-128 of framed(SPEC, "tensor", dtype, shape as JSON, number of bytes as 8 bytes LE, the chunks' digests joined).
* root: xxh3-128 of framed(SPEC, "root", name, tensor, name, tensor, …), names sorted by their UTF-8 bytes.
* unique root: xxh3-128 of framed(SPEC, "unique", the distinct tensor digests in order): the same whether tied weights are
  written once or twice, and under which of their names.

So neither file format, order, device nor memory layout matters; dtype does. Names lose `_orig_mod.` (torch.compile)
anywhere, and `module.` (DDP) or `_forward_module.` (FSDP) in front when all names have it. Buffers count. A sharded
tensor is gathered first (`full_tensor()`, which every rank has to call).
"""

from __future__ import annotations

import json
import math
import mmap
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from run_snapshot.digests.spec import WEIGHTS_SPEC, framed, xxh3
from run_snapshot.errors import DigestError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CHUNK",
    "TensorChange",
    "TensorDigest",
    "WeightsTree",
    "compare_weights",
    "digest_state",
    "digest_weights_file",
]

CHUNK = 8 * 2**20  # bytes
_GROUP = 4 * 2**20  # bytes; small tensors share a job
_IN_FLIGHT = 6  # jobs; bounds what is copied from a device at once
_MAX_HEADER = 100 * 2**20  # bytes, as the safetensors library has it
_BITS = {
    "float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "int64": 64, "int32": 32, "int16": 16, "int8": 8,
    "uint64": 64, "uint32": 32, "uint16": 16, "uint8": 8, "bool": 8, "complex64": 64, "float8_e4m3fn": 8,
    "float8_e5m2": 8, "float8_e8m0fnu": 8,
}  # fmt: skip
_SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDigest:
    """One tensor's content; its name is not part of it."""

    dtype: str  # as torch spells it, without "torch."
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsTree:
    """The digests of all tensors and of all together."""

    root: str
    unique_root: str
    tensors: dict[str, TensorDigest]
    aliases: dict[str, str] = field(default_factory=dict)  # name -> the first name of the same memory
    spec: str = WEIGHTS_SPEC

    def to_json(self) -> dict[str, Any]:
        """As plain types."""
        tensors = {name: [t.dtype, list(t.shape), t.digest] for name, t in self.tensors.items()}
        return {
            "spec": self.spec,
            "root": self.root,
            "unique_root": self.unique_root,
            "aliases": dict(self.aliases),
            "tensors": tensors,
        }

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> WeightsTree:
        """From what `to_json` gave."""
        if tree.get("spec") != WEIGHTS_SPEC:
            raise DigestError(
                f"These weights were digested under {tree.get('spec')!r}, which this version does not know: "
                f"it knows {WEIGHTS_SPEC!r}. Install the version that made the snapshot."
            )
        tensors = {
            name: TensorDigest(dtype=dtype, shape=tuple(shape), digest=digest)
            for name, (dtype, shape, digest) in tree["tensors"].items()
        }
        return cls(
            root=tree["root"], unique_root=tree["unique_root"], tensors=tensors, aliases=dict(tree.get("aliases", {}))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorChange:
    """One tensor that is not as recorded."""

    name: str
    kind: str  # "values changed", "dtype a -> b", "shape a -> b", "missing", "added"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Raw:
    """One tensor's bytes, before they are hashed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: memoryview


def digest_state(state: Mapping[str, Tensor], *, threads: int = 2) -> WeightsTree:
    """The tree of a state dict; each tensor is named in the error when it has no bytes to hash."""
    if sys.byteorder != "little":
        raise DigestError(f"{WEIGHTS_SPEC} is defined on little-endian bytes and this machine is big-endian.")
    names = _plain_names(state)
    aliases = _aliases({names[name]: tensor for name, tensor in state.items() if _is_tensor(tensor)})
    raw = (_raw_tensor(names[name], tensor) for name, tensor in state.items() if tensor is not None)
    return _tree(raw, aliases=aliases, threads=threads)


def digest_weights_file(path: str | Path, *, threads: int = 2) -> WeightsTree:
    """The tree of a .safetensors file, a torch or Lightning checkpoint, or a folder of safetensors shards."""
    where = Path(path)
    if where.is_dir():
        return _tree(_shards(where), aliases={}, threads=threads)
    if where.suffix == ".safetensors":
        return _tree(_plainly_named(_safetensors(where)), aliases={}, threads=threads)
    if where.suffix in (".ckpt", ".pt", ".pth", ".bin"):
        return digest_state(load_state(where), threads=threads)
    raise DigestError(
        f"{str(where)!r} ends in {where.suffix!r}: give .safetensors, .ckpt, .pt, .pth, .bin or a folder."
    )


def load_state(path: Path) -> Mapping[str, Tensor]:
    """The state dict in a torch file, read without running code from it."""
    return state_in(load_checkpoint(path), path)


def load_checkpoint(path: Path) -> Any:
    """What a torch file holds, read without running code from it; tensors stay on disk until they are used."""
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, ValueError, EOFError, KeyError) as error:
        raise DigestError(f"{str(path)!r} can't be read as a torch file: {str(error).splitlines()[0][:200]}") from error
    except Exception as error:
        raise DigestError(f"{str(path)!r} can't be loaded with weights_only=True: {type(error).__name__}") from error


def state_in(loaded: Any, path: Path) -> Mapping[str, Tensor]:
    """The state dict inside a loaded checkpoint."""
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            return dict(loaded[key])
    if isinstance(loaded, Mapping) and loaded and all(_is_tensor(value) for value in loaded.values()):
        return loaded
    raise DigestError(f"{str(path)!r} holds no state dict: neither tensors by name nor a 'state_dict' of them.")


def compare_weights(recorded: WeightsTree, found: WeightsTree) -> tuple[TensorChange, ...]:
    """What differs by name; a tied weight that one side writes under fewer names does not."""
    if recorded.root == found.root:
        return ()
    changes = []
    known = {t.digest for t in recorded.tensors.values()}
    present = {t.digest for t in found.tensors.values()}
    for name in sorted(recorded.tensors.keys() | found.tensors.keys()):
        before, after = recorded.tensors.get(name), found.tensors.get(name)
        if before is not None and after is not None:
            if before.digest != after.digest:
                changes.append(TensorChange(name=name, kind=_kind(before, after)))
        elif after is None and not (before and before.digest in present and _is_tied(name, recorded, found)):
            changes.append(TensorChange(name=name, kind="missing"))
        elif before is None and not (after and after.digest in known and _is_tied(name, found, recorded)):
            changes.append(TensorChange(name=name, kind="added"))
    return tuple(changes)


def _is_tied(name: str, having: WeightsTree, lacking: WeightsTree) -> bool:
    """Whether `lacking` has the tensor under another of the names that `having` gives it."""
    digest = having.tensors[name].digest
    group = {other for other, tensor in having.tensors.items() if tensor.digest == digest and other != name}
    declared = having.aliases | {v: k for k, v in having.aliases.items()}
    return any(other in lacking.tensors for other in group) and (name in declared or not having.aliases)


def _kind(before: TensorDigest, after: TensorDigest) -> str:
    if before.dtype != after.dtype:
        return f"dtype {before.dtype} -> {after.dtype}"
    if before.shape != after.shape:
        return f"shape {list(before.shape)} -> {list(after.shape)}"
    return "values changed"


def _tree(raw: Iterable[_Raw], *, aliases: dict[str, str], threads: int) -> WeightsTree:
    heads: list[tuple[str, str, tuple[int, ...], int]] = []

    def chunks() -> Iterator[memoryview]:
        for tensor in raw:
            heads.append((tensor.name, tensor.dtype, tensor.shape, tensor.content.nbytes))
            for start in range(0, tensor.content.nbytes, CHUNK):
                yield tensor.content[start : start + CHUNK]

    with ThreadPoolExecutor(max_workers=threads) as pool:
        digests = [d for group in _bounded_map(pool, _hash_group, _grouped(chunks())) for d in group]
    tensors: dict[str, TensorDigest] = {}
    at = 0
    for name, dtype, shape, size in heads:
        count = -(-size // CHUNK)
        if name in tensors:
            raise DigestError(f"Two tensors are called {name!r} once prefixes of wrappers are taken off: rename one.")
        tensors[name] = TensorDigest(
            dtype=dtype, shape=shape, digest=_content(dtype, shape, size, digests[at : at + count])
        )
        at += count
    return _rooted(tensors, aliases)


def _content(dtype: str, shape: tuple[int, ...], size: int, chunks: list[bytes]) -> str:
    shape_json = json.dumps(list(shape), separators=(",", ":")).encode()
    parts = (WEIGHTS_SPEC.encode(), b"tensor", dtype.encode(), shape_json, size.to_bytes(8, "little"), b"".join(chunks))
    return xxh3(framed(*parts)).hex()


def _rooted(tensors: dict[str, TensorDigest], aliases: dict[str, str]) -> WeightsTree:
    ordered = sorted(tensors, key=lambda name: name.encode("utf-8", "surrogatepass"))
    pairs = [
        part
        for name in ordered
        for part in (name.encode("utf-8", "surrogatepass"), bytes.fromhex(tensors[name].digest))
    ]
    unique = sorted({bytes.fromhex(tensor.digest) for tensor in tensors.values()})
    spec = WEIGHTS_SPEC.encode()
    return WeightsTree(
        root=xxh3(framed(spec, b"root", *pairs)).hex(),
        unique_root=xxh3(framed(spec, b"unique", *unique)).hex(),
        tensors={name: tensors[name] for name in ordered},
        aliases=aliases,
    )


def _hash_group(views: list[memoryview]) -> list[bytes]:
    return [xxh3(view) for view in views]  # xxhash lets go of the GIL


def _grouped(chunks: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    group: list[memoryview] = []
    size = 0
    for chunk in chunks:
        group.append(chunk)
        size += chunk.nbytes
        if size >= _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def _bounded_map(pool: ThreadPoolExecutor, function: Callable[[_In], _Out], items: Iterable[_In]) -> Iterator[_Out]:
    """`pool.map`, in order, that reads only a few items ahead."""
    waiting: deque[Future[_Out]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) >= _IN_FLIGHT:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _raw_tensor(name: str, tensor: Any) -> _Raw:
    if isinstance(tensor, bytes | bytearray):  # some modules' extra state
        return _Raw(name=name, dtype="bytes", shape=(len(tensor),), content=memoryview(tensor))
    if not _is_tensor(tensor):
        raise DigestError(f"{name!r} is a {type(tensor).__name__}, not a tensor: leave it out of the state dict.")
    import torch

    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):  # a DTensor
        tensor = tensor.full_tensor()
    dtype = str(tensor.dtype).removeprefix("torch.")
    if (
        tensor.is_meta
        or tensor.is_quantized
        or tensor.layout != torch.strided
        or dtype.split("x")[0] in ("qint8", "quint8")
    ):
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise DigestError(
            f"{name!r} is a {kind} tensor, which {WEIGHTS_SPEC} does not cover: give it as plain tensors."
        )
    shape = tuple(tensor.shape)
    plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).cpu()
    return _Raw(name=name, dtype=dtype, shape=shape, content=memoryview(plain.numpy()))


def _aliases(state: Mapping[str, Any]) -> dict[str, str]:
    """Names of the same memory, under the first of them in order."""
    seen: dict[tuple[Any, ...], str] = {}
    aliases = {}
    for name in sorted(state):
        tensor = state[name]
        if tensor.layout != _strided() or tensor.is_meta or tensor.numel() == 0 or hasattr(tensor, "full_tensor"):
            continue
        key = (tensor.data_ptr(), str(tensor.device), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if seen.setdefault(key, name) != name:
            aliases[name] = seen[key]
    return aliases


def _strided() -> Any:
    import torch

    return torch.strided


def _plain_names(names: Iterable[str]) -> dict[str, str]:
    """Each name and what it is without the prefixes of wrappers."""
    plain = {name: name.replace("_orig_mod.", "") for name in names}
    for prefix in ("_forward_module.", "module."):
        while plain and all(name.startswith(prefix) for name in plain.values()):
            plain = {name: short.removeprefix(prefix) for name, short in plain.items()}
    return plain


def _plainly_named(raw: Iterable[_Raw]) -> Iterator[_Raw]:
    tensors = list(raw)
    names = _plain_names([tensor.name for tensor in tensors])
    for tensor in tensors:
        yield _Raw(name=names[tensor.name], dtype=tensor.dtype, shape=tensor.shape, content=tensor.content)


def _shards(folder: Path) -> Iterator[_Raw]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DigestError(f"The folder {str(folder)!r} has no .safetensors file.")
    yield from _plainly_named(tensor for file in files for tensor in _safetensors(file))


def _safetensors(path: Path) -> Iterator[_Raw]:
    """The tensors of a file as they lie in it, mapped and not copied; a header that lies is refused."""
    with path.open("rb") as file:
        size = path.stat().st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 0 < length <= min(_MAX_HEADER, size - 8):
            raise DigestError(f"{str(path)!r} is no safetensors file: its header's length is {length} of {size} bytes.")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise DigestError(f"{str(path)!r} is no safetensors file: its header is not JSON ({error}).") from error
        if not isinstance(header, dict):
            raise DigestError(f"{str(path)!r} is no safetensors file: its header is a {type(header).__name__}.")
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    for name, entry in header.items():
        if name != "__metadata__":
            yield _mapped(path, name, entry, mapped[8 + length :])


def _mapped(path: Path, name: str, entry: Any, content: memoryview) -> _Raw:
    try:
        dtype, shape = _SAFETENSORS[entry["dtype"]], tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise DigestError(f"{str(path)!r}: the header of {name!r} can't be read ({error!r}).") from error
    if not 0 <= begin <= end <= content.nbytes or (end - begin) * 8 != math.prod(shape) * _BITS[dtype]:
        raise DigestError(
            f"{str(path)!r}: {name!r} claims bytes {begin} to {end}, which do not fit {dtype} {list(shape)}."
        )
    return _Raw(name=name, dtype=dtype, shape=shape, content=content[begin:end])
