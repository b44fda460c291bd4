"""The digest of weights: an independent spelling of the specification, invariances, faults by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from run_snapshot.checks import compare_tree
from run_snapshot.digests import WeightsTree, compare_weights, digest_state, digest_weights_file
from run_snapshot.digests.weights import CHUNK
from run_snapshot.errors import DigestError
from safetensors.torch import save_file
from torch import Tensor, nn

VECTORS = json.loads((Path(__file__).parent / "vectors" / "weights-xxh3-128-v1.json").read_text())


def state_of(vector: dict[str, Any]) -> dict[str, Tensor]:
    """A vector's tensors: dtype, shape and the bytes in hex."""
    return {
        name: torch.frombuffer(bytearray.fromhex(content), dtype=getattr(torch, dtype)).reshape(shape)
        if content
        else torch.empty(shape, dtype=getattr(torch, dtype))
        for name, (dtype, shape, content) in vector["tensors"].items()
    }


def by_the_book(tensors: dict[str, tuple[str, list[int], bytes]]) -> str:
    """The root, written from the specification with nothing of the package."""

    def field(content: bytes) -> bytes:
        return len(content).to_bytes(8, "little") + content

    body = field(b"weights-xxh3-128-v1") + field(b"root")
    for name in sorted(tensors, key=str.encode):
        dtype, shape, content = tensors[name]
        chunks = b"".join(xxhash.xxh3_128(content[i : i + CHUNK]).digest() for i in range(0, len(content), CHUNK))
        head = [b"weights-xxh3-128-v1", b"tensor", dtype.encode(), str(shape).replace(" ", "").encode()]
        leaf = b"".join(map(field, [*head, len(content).to_bytes(8, "little"), chunks]))
        body += field(name.encode()) + field(xxhash.xxh3_128(leaf).digest())
    return xxhash.xxh3_128(body).hexdigest()


@pytest.mark.parametrize("vector", VECTORS, ids=[v["id"] for v in VECTORS])
def test_vectors_are_frozen(vector: dict[str, Any]) -> None:
    tree = digest_state(state_of(vector))
    assert (tree.root, tree.unique_root) == (vector["root"], vector["unique_root"])
    raw = {name: (d, s, bytes.fromhex(c)) for name, (d, s, c) in vector["tensors"].items()}
    assert by_the_book(raw) == vector["root"]


def test_large_tensors_are_chunked() -> None:
    tensor = torch.arange(CHUNK // 4 * 2 + 5, dtype=torch.float32)
    assert digest_state({"w": tensor}).root == by_the_book({"w": ("float32", [len(tensor)], tensor.numpy().tobytes())})


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64,
          torch.float8_e4m3fn, torch.int32]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (4, 3)], ids=str)
def test_a_file_has_the_digest_of_its_state(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    state = {"b": torch.randint(0, 2, shape).to(dtype), "a": torch.randint(0, 2, shape).to(dtype)}
    save_file(state, tmp_path / "m.safetensors")
    torch.save(state, tmp_path / "m.pt")
    torch.save({"epoch": 1, "state_dict": state}, tmp_path / "m.ckpt")
    roots = {digest_weights_file(tmp_path / name).root for name in ("m.safetensors", "m.pt", "m.ckpt")}
    assert roots == {digest_state(state).root}


def test_shards_have_the_digest_of_the_whole(tmp_path: Path) -> None:
    state = {name: torch.randn(3) for name in "abcd"}
    save_file({k: state[k] for k in "cb"}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({k: state[k] for k in "ad"}, tmp_path / "model-00002-of-00002.safetensors")
    assert digest_weights_file(tmp_path).root == digest_state(state).root


@settings(max_examples=30, deadline=None)
@given(st.permutations(["w", "bias", "é", "z.0", "z.10"]), st.integers(1, 4))
def test_neither_order_nor_threads_nor_layout_matter(names: list[str], threads: int) -> None:
    tensors = {name: torch.arange(6.0).reshape(2, 3) + len(name) for name in sorted(names)}
    shuffled = {name: tensors[name].t().contiguous().t() for name in names}
    assert not shuffled["w"].is_contiguous()
    assert digest_state(shuffled, threads=threads).root == digest_state(tensors).root


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda s: s["w"].view(torch.uint8).reshape(-1)[0].bitwise_xor_(1), "values changed"),
        (lambda s: s.__setitem__("w", -s["w"] * 0 * 1), "values changed"),
        (lambda s: s.__setitem__("w", s["w"].double()), "dtype float32 -> float64"),
        (lambda s: s.__setitem__("w", s["w"].reshape(3, 2)), "shape [2, 3] -> [3, 2]"),
        (lambda s: s.pop("w"), "missing"),
        (lambda s: s.__setitem__("new", torch.ones(1)), "added"),
    ],
    ids=["one bit", "minus zero", "dtype", "shape", "missing", "added"],
)
def test_a_change_names_its_tensor(change: Any, kind: str) -> None:
    state = {"w": torch.zeros(2, 3), "b": torch.ones(3)}
    before = digest_state(state)
    state = {name: tensor.clone() for name, tensor in state.items()}
    change(state)
    changes = compare_weights(before, digest_state(state))
    assert [(c.name, c.kind) for c in changes] == [("new" if kind == "added" else "w", kind)]


def test_names_and_contents_belong_together() -> None:
    a, b = torch.zeros(2), torch.ones(2)
    assert digest_state({"a": a, "b": b}).root != digest_state({"a": b, "b": a}).root
    assert digest_state({"ab": a, "c": b}).root != digest_state({"a": a, "bc": b}).root


@pytest.mark.parametrize("dropped", ["lm_head.weight", "embed.weight"])
def test_tied_weights_may_be_written_once(tmp_path: Path, dropped: str) -> None:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(4, 3), "lm_head": nn.Linear(3, 4, bias=False), "norm": nn.LayerNorm(3)}
    )
    model["lm_head"].weight = model["embed"].weight
    tree = digest_state(model.state_dict())
    assert tree.aliases == {"lm_head.weight": "embed.weight"}
    save_file({k: v for k, v in model.state_dict().items() if k != dropped}, tmp_path / "m.safetensors")
    found = digest_weights_file(tmp_path / "m.safetensors")
    assert compare_weights(tree, found) == () == compare_weights(found, tree)
    assert found.unique_root == tree.unique_root
    assert found.root != tree.root


def test_untied_weights_of_equal_values_must_all_be_there() -> None:
    state = {"a": torch.zeros(3), "b": torch.zeros(3), "embed": torch.ones(2)}
    state["head"] = state["embed"]
    found = digest_state({"a": state["a"], "embed": state["embed"], "head": state["embed"]})
    assert [(c.name, c.kind) for c in compare_weights(digest_state(state), found)] == [("b", "missing")]


@pytest.mark.parametrize(
    "prefix", ["module.", "_forward_module.", "_orig_mod.", "module._orig_mod.", "_forward_module._orig_mod."]
)
def test_wrappers_leave_no_trace(tmp_path: Path, prefix: str) -> None:
    state = {"model.w": torch.ones(2), "head.b": torch.zeros(1)}
    wrapped = {prefix + name: tensor for name, tensor in state.items()}
    save_file(wrapped, tmp_path / "m.safetensors")
    assert (
        digest_state(wrapped).root == digest_state(state).root == digest_weights_file(tmp_path / "m.safetensors").root
    )
    assert digest_state({"model._orig_mod.w": torch.ones(2), "head.b": torch.zeros(1)}).root == digest_state(state).root


def test_a_real_submodule_called_module_keeps_its_name() -> None:
    state = {"module.w": torch.ones(2), "other.w": torch.ones(2)}
    assert set(digest_state(state).tensors) == {"module.w", "other.w"}


def test_adapters_are_tensors_like_others() -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    model = get_peft_model(nn.Sequential(nn.Linear(4, 4)), LoraConfig(r=2, target_modules=["0"]))
    adapter = get_peft_model_state_dict(model)
    tree = digest_state(adapter)
    assert len(tree.tensors) == 2
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "lora_B" in n)[0, 0] += 1
    changes = compare_weights(tree, digest_state(get_peft_model_state_dict(model)))
    assert ["lora_B" in c.name for c in changes] == [True]


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
        ({"a": 1}, "dict"),
        (3, "int"),
    ],
    ids=["sparse", "meta", "quantized", "dict", "int"],
)
def test_what_has_no_bytes_is_refused_by_name(tensor: Any, word: str) -> None:
    with pytest.raises(DigestError, match=rf"'layer\.x'.*{word}"):
        digest_state({"layer.x": tensor, "w": torch.ones(1)})


def test_colliding_names_are_refused() -> None:
    with pytest.raises(DigestError, match="Two tensors are called 'w'"):
        digest_state({"w": torch.ones(1), "_orig_mod.w": torch.zeros(1)})


def test_views_with_conjugate_bits_are_their_values() -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    assert digest_state({"z": z.conj()}).root == digest_state({"z": z.conj().resolve_conj()}).root
    assert digest_state({"z": z.conj()}).root != digest_state({"z": z}).root


@pytest.mark.parametrize(
    "content",
    [b"", b"\x08", b"\xff" * 16, (2).to_bytes(8, "little") + b"[]", (9).to_bytes(8, "little") + b"not json!"],
    ids=["empty", "short", "huge header", "a list", "no JSON"],
)
def test_a_broken_file_is_said_to_be_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(DigestError, match="safetensors file"):
        digest_weights_file(tmp_path / "m.safetensors")


@pytest.mark.parametrize("offsets", [[0, 400], [-4, 4], [4, 0], [0, 4]], ids=str)
def test_a_header_that_lies_is_refused(tmp_path: Path, offsets: list[int]) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": offsets}}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(DigestError, match="'w' claims"):
        digest_weights_file(tmp_path / "m.safetensors")


def test_a_pickle_that_runs_code_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "owned",))

    torch.save({"state_dict": Evil()}, tmp_path / "m.ckpt")
    with pytest.raises(DigestError, match="weights_only"):
        digest_weights_file(tmp_path / "m.ckpt")
    assert not (tmp_path / "owned").exists()


def test_a_file_saved_again_is_the_same_tensors(tmp_path: Path) -> None:
    state = {"w": torch.randn(4), "b": torch.randn(2)}
    file = tmp_path / "m.safetensors"
    save_file(state, file)
    from run_snapshot.digests import digest_file

    entry = digest_file(file)
    files = {"": {"bytes": entry.bytes, "sha256": entry.sha256}}
    tree = WeightsTree.from_json(json.loads(json.dumps(digest_weights_file(file).to_json())))
    assert "the same file" in compare_tree(tree, file, files)[0].detail
    save_file(state, file, metadata={"saved": "again"})
    (again,) = compare_tree(tree, file, files)
    assert (again.verdict, again.detail) == ("ok", "re-saved, tensors same")
    save_file({**state, "w": state["w"] + 1}, file)
    (changed,) = compare_tree(tree, file, files)
    assert (changed.verdict, changed.name) == ("changed", "w")


def test_another_specification_is_unknown_not_changed() -> None:
    tree = digest_state({"w": torch.ones(1)}).to_json() | {"spec": "weights-other-v9"}
    with pytest.raises(DigestError, match="weights-other-v9"):
        WeightsTree.from_json(tree)
