"""`export` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grpo_lightning.cli.main import main

pytest.importorskip("grpo_prometheus", reason="the Prometheus plugin is not installed")

RULE = '- {name: low, signal: kl, below: 0.1, for_steps: 3, action: notify, summary: "kl is {value:.2f}"}\n'


def test_grafana_writes_a_file_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "grafana", "-o", str(tmp_path / "new" / "dashboards")]) == 0
    files = sorted((tmp_path / "new" / "dashboards").iterdir())
    assert [path.name for path in files] == ["1_overview.json", "2_health.json", "3_diagnosis.json"]
    assert capsys.readouterr().out.split() == [str(path) for path in files]
    for path in files:
        board = json.loads(path.read_text())
        assert board["panels"]
        assert board["templating"]["list"][0]["name"] == "run_id"


def test_prometheus_writes_rules_to_stdout_and_says_what_it_could_not_express(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["export", "prometheus"]) == 0
    told = capsys.readouterr()
    groups = yaml.safe_load(told.out)["groups"]
    assert [group["name"] for group in groups] == [
        "grpo-lightning, judged by Prometheus",
        "grpo-lightning, judged by the run",
    ]
    assert "can't be expressed in PromQL" in told.err
    assert "reward_collapsed: it holds reward_mean against a ruler" in told.err


def test_prometheus_takes_other_rules_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text(RULE)
    out = tmp_path / "deep" / "rules.yml"
    assert main(["export", "prometheus", "--rules", str(tmp_path / "mine.yaml"), "-o", str(out)]) == 0
    (group,) = yaml.safe_load(out.read_text())["groups"]
    assert [rule.get("alert") for rule in group["rules"] if "alert" in rule] == ["low"]
    assert capsys.readouterr().out.strip() == str(out)


BAD = {
    "no target": (["export"], "--help"),
    "unknown target": (["export", "datadog"], "datadog"),
    "unknown option": (["export", "grafana", "--rules", "x"], "--rules"),
    "no such rules": (["export", "prometheus", "--rules", "nowhere.yaml"], "nowhere.yaml"),
    "a typo in a signal": (["export", "prometheus", "--rules", "TYPO"], "did you mean kl"),
    "a folder in the way": (["export", "prometheus", "-o", "FOLDER"], "Give a writable path"),
    "a file in the way": (["export", "grafana", "-o", "FILE/x"], "Give a writable path"),
}


@pytest.mark.parametrize(("argv", "named"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], named: str
) -> None:
    (tmp_path / "typo.yaml").write_text(RULE.replace("signal: kl", "signal: kll"))
    (tmp_path / "file").write_text("")
    places = {"TYPO": tmp_path / "typo.yaml", "FOLDER": tmp_path, "FILE/x": tmp_path / "file" / "x"}
    assert main([str(places.get(arg, arg)) for arg in argv]) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("error: ")
    assert len(told.splitlines()) == 1
    assert named in told


_WITHOUT = """
import sys
sys.modules["grpo_prometheus"] = None
from grpo_lightning.cli.main import main
sys.exit(main(["export", "grafana"]))
"""


def test_without_the_plugin_the_message_has_the_command(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == "error: `export` needs the Prometheus plugin: pip install grpo-lightning-prometheus."


def test_it_starts_fast() -> None:
    code = (
        "import sys; from grpo_lightning.cli.main import main; main(['export', 'prometheus']); print(file=sys.stderr)"
    )
    heavy = "; sys.exit(bool({'torch', 'lightning', 'mlflow', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code + heavy], capture_output=True, text=True, check=False)
    assert done.returncode == 0
