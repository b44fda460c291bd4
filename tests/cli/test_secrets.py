"""Sixty planted secrets, in a real run: none is in its directory, the MLflow store, what it printed or its reports."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from support.tiny import make_tiny_model, write_prompts

from grpo_lightning.cli.main import main

pytest.importorskip("run_snapshot")
READ_AS_YAML = ("[MASK]", "[CLS]", "[SEP]", "yes")  # the command line's parser makes lists and switches of them
LIST = Path(__file__).parents[2] / "plugins" / "snapshot" / "tests" / "test_snapshot_redact.py"


def planted() -> ModuleType:
    """The plug-in's list of secrets and of names that only look like one."""
    spec = importlib.util.spec_from_file_location("planted_secrets", LIST)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def test_no_planted_secret_is_written_anywhere(
    tmp_path: Path, mlflow_template: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    known = planted()
    named = {name: f"pL4nt3d{i:02d}x{i * 7919 % 9973:04d}" for i, (name, _) in enumerate(known.BY_NAME)}
    named["mycorp_token"] = f"{known.A}07"  # known by its look alone
    shaped = [(text, secret) for text, secret in known.BY_SHAPE if len(secret) >= 6]
    project = tmp_path / "project"
    project.mkdir()
    make_tiny_model(project)
    write_prompts(project / "train.jsonl")
    (project / "my_reward.py").write_text(
        "def length(completions, **_):\n    return [len(c) % 3 for c in completions]\n"
    )
    git(project, "init", "-q")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "all")
    git(project, "remote", "add", "origin", f"https://ada:{named['password']}@git.example.org/a.git")
    with (project / "my_reward.py").open("a") as file:
        file.write(f'\nAPI_KEY = "{named["api_key"]}"\npassword = "{named["passphrase"]}"\n')
    (project / "conf.yaml").write_text("".join(f"{name}: {value}\n" for name, value in named.items()))
    settings = {
        "model": {
            "model": "tiny-llama",
            "rewards": [{"path": "my_reward.py:length", "kwargs": named | known.LOOK_ALIKES}],
            "group_size": 4,
            "sampling": {"max_new_tokens": 4},
        },
        "data": {"train": "train.jsonl", "prompts_per_step": 4},
        "trainer": {"max_steps": 2, "accelerator": "cpu"},
        "run": {"name": "planted", "description": "\n".join(text for text, _ in shaped)},
        "snapshot": {"lock": "off"},
    }
    config = tmp_path / "config.yaml"  # the user's own file, which nobody rewrites
    config.write_text(yaml.safe_dump(settings))
    (tmp_path / "store.db").write_bytes(mlflow_template.read_bytes())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'store.db'}")
    for name, value in named.items():
        monkeypatch.setenv(name.upper().replace(".", "_").replace("-", "_"), value)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", named["MLFLOW_TRACKING_TOKEN"])
    monkeypatch.chdir(project)
    assert main(["fit", "--config", str(config)]) == 0
    (run,) = (project / "runs").iterdir()
    assert main(["report", str(run), "-o", str(tmp_path / "report.html")]) == 0
    main(["audit", "--html", str(tmp_path / "audit.html")])
    main(["snapshot", "show", str(run)])
    said = capfd.readouterr()
    places = [
        p for p in (*run.rglob("*"), *tmp_path.glob("store.db*"), *tmp_path.glob("mlartifacts/**/*")) if p.is_file()
    ]
    contents = {str(p): p.read_bytes() for p in [*places, tmp_path / "report.html", tmp_path / "audit.html"]}
    contents |= {"stdout": said.out.encode(), "stderr": said.err.encode()}
    secrets = [*named.values(), *(secret for _, secret in shaped)]
    leaks = [(secret, place) for secret in secrets for place, content in contents.items() if secret.encode() in content]
    names = {v: k for k, v in named.items()}
    assert sorted({(names.get(s, s), p.rpartition("/")[2]) for s, p in leaks}) == []
    same = {k: v for k, v in known.LOOK_ALIKES.items() if v not in READ_AS_YAML}
    assert len(same) >= 30
    for file in (run / "snapshot" / "config.json", run / "config.yaml"):
        kept = yaml.safe_load(file.read_text())["model"]["rewards"][0]["kwargs"]
        assert {name: kept[name] for name in same} == same
