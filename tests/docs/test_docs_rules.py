"""The generated pages of rules and runbooks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grpo_lightning.cli.main import main
from grpo_lightning.health import Condition, Rule, parse_rules, shipped_rules

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("docs")
    subprocess.run(
        [sys.executable, str(ROOT / "docs/generate/rules.py"), "-o", str(out)],
        check=True,
    )
    return out


def test_every_rule_is_listed_with_its_action_and_a_link_that_leads_somewhere(
    site: Path,
) -> None:
    page = (site / "rules.md").read_text()
    for rule in shipped_rules():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| [`{rule.name}`]")]
        link = re.search(r"\]\(([^)]+)\)", row)
        assert link is not None
        assert (site / link[1]).is_file()
        assert row.count("|") == 5, "four cells"
        assert f"| {rule.action} |" in row
        assert "{" not in row


def test_the_page_names_every_key_of_a_rule(site: Path) -> None:
    prose = (site / "rules.md").read_text().split("## The shipped rules")[0]
    words = set(re.findall(r"[a-z_]+", prose))
    written = {
        "else_signal",
        "else_unit",
        "condition",
    }  # for logs that lack a signal; not a key
    for name in {*Rule.__dataclass_fields__, *Condition.__dataclass_fields__} - written:
        stem = name.removesuffix("_above").removesuffix("_below")
        assert stem in words or f"{stem}_below" in words or f"{stem}_above" in words, name


def test_the_pages_example_is_a_rule(site: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (site / "rules.md").read_text(), re.DOTALL)
    assert parse_rules(blocks[0])[0].for_steps == 20


def test_the_pages_commands_do_what_it_says(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```bash\n(.*?)```", (site / "rules.md").read_text(), re.DOTALL)
    shell = block.split("python -m grpo_lightning")[0]
    subprocess.run(["bash", "-e", "-c", shell], check=True)
    assert main(["rules", "check", "mine/rules.yaml"]) == 0
    assert main(["rules", "test", "mine/rules.yaml"]) == 0


def test_mkdocs_makes_the_pages() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    assert "docs/generate/rules.py" in config
    assert "rules.md" in str(yaml.safe_load(re.sub(r"!!python\S+", "", config))["nav"])
