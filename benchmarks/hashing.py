"""The digest of weights against reading the same memory, against sha256, and against model-signing on the same file.

    python benchmarks/hashing.py [--mib 1024] [--rounds 5]

The file is a safetensors file of random bfloat16 matrices, in the page cache. All ways take turns, and the best of the rounds
counts, so that other work on the machine hits none of them alone. Reading is the faster of numpy's sum and exclusive or over
the tensors that are hashed, on two threads, 16 MiB at a time. sha256 is hashlib's over the file, on one thread, as tools record
it; model-signing is `model_signing.hashing.hash` with its defaults, which is sha256 as well. The table also says what a capture
and a look at every checkpoint cost here. The last line is JSON: `vs_read` (our speed over that of reading the same memory; 1 is
as fast as looking at it), `vs_sha256` and `vs_model_signing` (how many times as fast, on the same file).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "snapshot"))

from run_snapshot import capture, check, verify
from run_snapshot.digests import digest_state, digest_weights_file

PART = 16 * 2**20  # bytes


def make_model(file: Path, mib: int) -> None:
    """Matrices of 32 MiB, and small vectors between them as models have."""
    torch.manual_seed(0)
    state = {
        f"layers.{i}.weight": torch.randint(-(2**15), 2**15, (4096, 4096), dtype=torch.int16) for i in range(mib // 32)
    }
    state = {name: matrix.view(torch.bfloat16) for name, matrix in state.items()}
    norms = {f"layers.{i}.norm": torch.ones(4096, dtype=torch.bfloat16) for i in range(mib // 32)}
    save_file(state | norms, file)


def read_memory(state: dict[str, torch.Tensor], look: np.ufunc) -> None:
    """Look at every byte, on two threads."""
    words = [tensor.reshape(-1).view(torch.int64).numpy().view(np.uint64) for tensor in state.values()]
    step = PART // 8
    parts = [whole[at : at + step] for whole in words for at in range(0, len(whole), step)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(look.reduce, parts))


def sha256_file(file: Path) -> None:
    """The file's sha256, as hashlib reads it."""
    digest, buffer = sha256(), bytearray(2**20)
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(buffer):
            digest.update(memoryview(buffer)[:count])


def model_signing(file: Path) -> None:
    """What model-signing does to a model by default."""
    import model_signing.hashing

    model_signing.hashing.hash(file)


def seconds_of(ways: dict[str, Callable[[Path], object]], file: Path, rounds: int) -> dict[str, float]:
    """The best time of each way; they take turns."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            begin = perf_counter()
            way(file)
            best[name] = min(best[name], perf_counter() - begin)
    return best


def cost_of_checks(folder: Path) -> dict[str, float]:
    """Seconds of a capture, a quick check and a verification of this project and environment."""
    rows = folder / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"messages": [{"role": "user", "content": f"{i}+1"}]}) + "\n" for i in range(20_000))
    )
    root = Path(__file__).parents[1]
    costs = {}
    begin = perf_counter()
    path = capture(folder / "run" / "snapshot", data_files=[rows], project=root, seeds={"seed": 0}).path
    costs["capture, 20,000 chat rows"] = perf_counter() - begin
    for name, look in {"check at a checkpoint": lambda: check(path), "verify": lambda: verify(path)}.items():
        look()
        begin = perf_counter()
        look()
        costs[name] = perf_counter() - begin
    return costs


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "model.safetensors")
        make_model(file, options.mib)
        state = dict(torch.load(_as_torch(file), mmap=True, weights_only=True))
        ways: dict[str, Callable[[Path], object]] = {
            "read by a sum, 2 threads": lambda _: read_memory(state, np.add),
            "read by an exclusive or, 2 threads": lambda _: read_memory(state, np.bitwise_xor),
            "weights digest of the file, 2 threads": digest_weights_file,
            "weights digest of a state dict, 2 threads": lambda _: digest_state(state),
            "sha256, 1 thread": sha256_file,
            "model-signing, its default": model_signing,
        }
        best = seconds_of(ways, file, options.rounds)
        size = file.stat().st_size
        print(f"{size / 2**30:.2f} GiB of bfloat16, best of {options.rounds}")
        for way, seconds in best.items():
            print(f"  {way:44}{seconds:8.3f} s{size / 1e9 / seconds:8.2f} GB/s")
        for what, seconds in cost_of_checks(Path(name)).items():
            print(f"  {what:44}{seconds:8.3f} s")
    ours = best["weights digest of the file, 2 threads"]
    of_memory = best["weights digest of a state dict, 2 threads"]
    result = {
        "vs_read": min(seconds for way, seconds in best.items() if way.startswith("read")) / of_memory,
        "vs_sha256": best["sha256, 1 thread"] / ours,
        "vs_model_signing": best["model-signing, its default"] / ours,
    }
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


def _as_torch(file: Path) -> Path:
    from safetensors.torch import load_file

    torch.save(load_file(file), file.with_suffix(".pt"))
    return file.with_suffix(".pt")


if __name__ == "__main__":
    main()
