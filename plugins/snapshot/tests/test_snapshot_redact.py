"""Sixty planted secrets and thirty names that only look like one (nothing here was ever a working credential)."""

from __future__ import annotations

import json

import pytest
from run_snapshot.redact import REDACTED, Scrubber, is_secret_file, is_secret_name, redact, redact_patch, redact_text

A = "Zq7Rt9Lm2Xc4Vb6Nn8Kp1Hj3Gf5Ds0aW"  # random-looking filler, 32 characters

BY_NAME = [  # (name, value): settings and environment
    ("api_key", "hunter2"), ("apiKey", "hunter2"), ("OPENAI_API_KEY", "hunter2hunter2"), ("HF_TOKEN", "mytoken"),
    ("hf_token", "mytoken"), ("WANDB_API_KEY", "0123456789abcdef"), ("AWS_SECRET_ACCESS_KEY", "wJalr/abc+def"),
    ("AWS_SESSION_TOKEN", "abc"), ("aws_access_key_id", "AKIAIOSFODNN7EXAMPLE"), ("password", "correct-horse"),
    ("db.password", "pw"), ("PGPASSWORD", "pw"), ("passphrase", "open sesame"), ("client_secret", "shh"),
    ("secret", "shh"), ("github_token", "abc"), ("MLFLOW_TRACKING_TOKEN", "abcd"), ("MLFLOW_TRACKING_PASSWORD", "abcd"),
    ("auth_token", "abc"), ("access-token", "abc"), ("bearer_token", "abc"), ("private_key", "abc"),
    ("credentials", "user:pw"), ("Authorization", "Token abc"), ("cookie", "sid=1"), ("signing_key", "abc"),
    ("encryption_key", "abc"), ("storage_account_key", "abc=="), ("slack_bot_token", "abc"), ("token", "abcdef"),
    ("mycorp_token", A), ("deploy_key", "abc"),
]  # fmt: skip
BY_SHAPE = [  # (text, what must be gone)
    (f"see hf_{A} there", f"hf_{A}"), (f"sk-proj-{A}", A), (f"sk-ant-api03-{A}", A), (f"ghp_{A}1234", A),
    (f"github_pat_11{A}_{A}", A), (f"glpat-{A}", A), ("id AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
    (f"AIza{A}abc", A), (f"xoxb-1234567890-{A}", A), (f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.{A}", A),
    (f"npm_{A}", A), (f"pypi-AgEIcHlwaS5vcmc{A}", A), (f"SG.{A}.{A}", A), (f"dapi{'0a' * 16}", "0a" * 16), (f"hvs.{A}", A),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nabc\n-----END RSA PRIVATE KEY-----", "MIIEow"),
    ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNza\n-----END OPENSSH PRIVATE KEY-----", "b3BlbnNza"),
    ("https://ada:s3cr3t@git.example.org/a.git", "s3cr3t"), ("postgresql://ada:p@ss@db:5432/mlflow", "p@ss"),
    (f"git+https://{A}@git.example.org/a.git", A), ("https://x.org/f?access_token=abc&a=1", "abc&"),
    ("https://x.blob.example.org/f?sv=1&sig=Ab%2Bc", "Ab%2Bc"), ("https://b.example.org/k?X-Amz-Signature=deadbeef", "deadbeef"),
    (f"curl -H 'Authorization: Bearer {A}'", A), ("run --api-key hunter2 --lr 1", "hunter2"),
    ("login ada password hunter2", "hunter2"), ("Server=a;Password=hunter2;Database=b", "hunter2"),
    ("AccountName=a;AccountKey=Zm9v12==;", "Zm9v12=="),
]  # fmt: skip
LOOK_ALIKES = {
    "max_tokens": 512, "max_new_tokens": 64, "min_tokens": 1, "tokenizer": "gpt2", "tokenizer_name": "org/model",
    "token_budget": 4096, "key_size": 64, "pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>",
    "mask_token": "[MASK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "use_cls_token": True, "num_memory_tokens": 8,
    "tokens_per_second": 100.5, "num_key_value_heads": 4, "key_padding_mask": "left", "signal_token_fraction": 0.5,
    "pad_token_id": 0, "token_type_ids": [0, 1], "sort_key": "length", "primary_key": "id", "password_length": 12,
    "author": "Ada", "keyword": "grpo", "api_key_env": "OPENAI_API_KEY", "secret_name": "vault/path", "bypass": "yes",
    "image_token": "<image>", "compass": "north", "loss_per_token": 0.25, "credentials_file": "/etc/creds.json",
}  # fmt: skip


def test_there_are_sixty_secrets_and_thirty_look_alikes() -> None:
    assert len(BY_NAME) + len(BY_SHAPE) == 60
    assert len(LOOK_ALIKES) >= 30


@pytest.mark.parametrize(("name", "value"), BY_NAME, ids=[name for name, _ in BY_NAME])
def test_a_secret_is_known_by_its_name(name: str, value: str) -> None:
    assert redact({"a": {name: value}}) == {"a": {name: REDACTED}}


@pytest.mark.parametrize(("text", "secret"), BY_SHAPE, ids=[text[:18].split("\n")[0] for text, _ in BY_SHAPE])
def test_a_secret_is_known_by_its_shape(text: str, secret: str) -> None:
    assert secret in text
    assert secret not in redact_text(text)
    assert secret not in json.dumps(redact({"note": [text]}))


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_look_alike_stays(name: str) -> None:
    settings = {name: LOOK_ALIKES[name]}
    assert redact(settings) == settings
    for line in (
        f"{name} = {LOOK_ALIKES[name]!r}",
        f"{name}: {LOOK_ALIKES[name]}",
        f"run --{name} {LOOK_ALIKES[name]}",
    ):
        assert redact_text(line, style="settings") == line


@pytest.mark.parametrize(
    "line",
    [
        "password = get_password()", "def f(password: str, token: str | None = None):", "api_key = os.environ['API_KEY']",
        "token = tokenizer.encode(text)", "self.secret = secret", "tokens = {'token': 'the'}", "secret = None",
        "url = 'https://example.org/a@b'", "key = 'abc'", "for token in tokens:", "headers = basic auth",
        "uses: user@host.example.org", "import secrets", "@pytest.fixture", "commit 64ff49b253d8e3d1c0a1c9b6c6b6f7f6d5e4c3b2",
        "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    ],
)  # fmt: skip
def test_code_that_only_talks_of_secrets_stays(line: str) -> None:
    assert redact_text(line) == line


PATCH = f"""diff --git a/.env b/.env
--- /dev/null
+++ b/.env
@@ -0,0 +1,3 @@
+DB_PASSWORD=hunter2
+MYCORP_TOKEN={A}
+MAX_TOKENS=64
diff --git a/run.py b/run.py
--- a/run.py
+++ b/run.py
@@ -1 +1,4 @@
+API_KEY = "abc-def"
+password: str = 'open sesame'
+os.environ["HF_TOKEN"] = "hf_{A}"
+max_tokens = 64
diff --git a/conf.yaml b/conf.yaml
--- a/conf.yaml
+++ b/conf.yaml
@@ -1 +1,3 @@
+  password: hunter3
+  pad_token: "<pad>"
+  url: https://ada:hunter4@example.org
"""


def test_a_patch_loses_its_secrets_and_keeps_its_lines() -> None:
    clean = redact_patch(PATCH)
    for secret in ("hunter2", A, "abc-def", "open sesame", "hunter3", "hunter4"):
        assert secret not in clean
    for line in ("+MAX_TOKENS=64", "+max_tokens = 64", '+  pad_token: "<pad>"', "diff --git a/run.py b/run.py"):
        assert line in clean
    assert clean.count("\n") == PATCH.count("\n")


def test_what_one_place_names_a_secret_is_taken_out_everywhere() -> None:
    scrub = Scrubber([{"db": {"password": "correct-horse"}, "max_tokens": "12345678"}])
    assert scrub.text("failed for correct-horse with 12345678") == f"failed for {REDACTED} with 12345678"
    assert scrub.tree({"note": ["correct-horse"]}) == {"note": [REDACTED]}


def test_a_file_that_is_called_so_keeps_its_digest() -> None:
    scrub = Scrubber([{"password": "correct-horse"}])
    stat = {"code": {"tests/test_secrets.py": [120, 17, "9f86d081884c7d65"], "correct-horse.py": [1, 2, "ab"]}}
    kept = scrub.known_in(stat)["code"]
    assert kept == {"tests/test_secrets.py": [120, 17, "9f86d081884c7d65"], f"{REDACTED}.py": [1, 2, "ab"]}


def test_a_pair_of_name_and_value_is_one_setting() -> None:
    assert redact([{"name": "API_KEY", "value": "abc"}, {"name": "LR", "value": "1"}]) == [
        {"name": "API_KEY", "value": REDACTED},
        {"name": "LR", "value": "1"},
    ]


@pytest.mark.parametrize(
    ("path", "is_secret"),
    [(".env", True), ("a/.env.local", True), ("keys/id_ed25519", True), ("server.pem", True), ("credentials.json", True),
     ("environment.py", False), ("tokenizer.json", False), ("secretary.py", False), ("a/config.yaml", False)],
)  # fmt: skip
def test_files_that_hold_secrets_are_known_by_name(path: str, is_secret: bool) -> None:
    assert is_secret_file(path) is is_secret


def test_switches_and_empty_values_are_no_secrets() -> None:
    settings = {"token": True, "password": None, "api_key": ""}
    assert redact(settings) == settings
    assert not is_secret_name("")
