"""The page of rules, made from the shipped ones, and their runbooks.

    python docs/generate/rules.py [-o FOLDER]

MkDocs runs it as a hook (`hooks:` in mkdocs.yml): the pages are in the site, not in the repository.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from grpo_lightning.health import Rule, runbook_path, shipped_path, shipped_rules
from grpo_lightning.health.records import Cause

__all__ = ["on_config", "on_files", "pages"]

NAME = "rules.md"
_PROSE = Path(__file__).with_name("rules.md")  # what people write; the tables go where it says so
_TABLES = "<!-- tables -->\n"
_FIELD = re.compile(r"\{(\w+)(:[^}]*)?\}")


def pages() -> dict[str, str]:
    """Every page by its path: the rules, and each runbook once."""
    rules = shipped_rules()
    tables = "\n".join(part for cause in get_args(Cause) for part in _of_cause(cause, rules))
    made = {NAME: _PROSE.read_text(encoding="utf-8").replace(_TABLES, tables)}
    return made | {name: path.read_text(encoding="utf-8") for name, path in _runbooks(rules)}


def _runbooks(rules: Sequence[Rule]) -> Iterator[tuple[str, Path]]:
    found = {rule.runbook: runbook_path(rule, shipped_path()) for rule in rules}
    return ((name, path) for name, path in sorted(found.items()) if path is not None)


def _of_cause(cause: str, rules: Sequence[Rule]) -> list[str]:
    rows = [_row(rule) for rule in rules if rule.cause == cause and not rule.quiet]
    return (
        [
            f"### Cause: {cause}\n",
            "| rule | signal | action | says |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
        if rows
        else []
    )


def _row(rule: Rule) -> str:
    signal = rule.condition.signal if rule.condition is not None else ", ".join(rule.together)
    says = _FIELD.sub(lambda field: f"*{field[1]}*", _text(rule.summary))
    return f"| [`{rule.name}`]({rule.runbook}) | `{signal}` | {rule.action} | {says} |"


def _text(text: str) -> str:
    """Characters that Markdown would read as something else."""
    for character in "\\|*`<>[]":
        text = text.replace(character, f"\\{character}")
    return text


def on_files(files: Any, config: Any) -> Any:
    """MkDocs' hook: add the pages to the site."""
    from mkdocs.structure.files import File

    for name, content in pages().items():
        files.append(File.generated(config, name, content=content))
    return files


def on_config(config: Any) -> Any:
    """MkDocs' hook: list the runbooks after the other pages."""
    if config.nav is not None:
        config.nav.append({"Runbooks": [name for name in pages() if name != NAME]})
    return config


def main(argv: Sequence[str] | None = None) -> None:
    """Write the pages into a folder, or the first to stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path)
    out = parser.parse_args(argv).out
    made = pages()
    if out is None:
        sys.stdout.write(made[NAME])
        return
    for name, content in made.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
