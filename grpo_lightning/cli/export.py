"""`export grafana` and `export prometheus`: dashboards from the catalogue, alert rules from the health rules."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from grpo_lightning.cli.arguments import Parser
from grpo_lightning.errors import UsageError

__all__ = ["run_export"]

_EPILOG = """\
examples:
  grpo-lightning export grafana -o dashboards         three JSON files to import or provision
  grpo-lightning export prometheus -o rules.yml       the shipped rules; then: promtool check rules rules.yml
  grpo-lightning export prometheus --rules my.yaml    your own rules, on stdout
"""


def run_export(argv: list[str]) -> int:
    """Write files for Prometheus or Grafana; 0, or a `UsageError`."""
    args = _parser().parse_args(argv)
    return _grafana(args.out) if args.target == "grafana" else _prometheus(args.rules, args.out)


def _parser() -> Parser:
    parser = Parser(
        prog="grpo-lightning export",
        description="Dashboards for Grafana, alert rules for Prometheus.",
        epilog=_EPILOG,
    )
    targets = parser.add_subparsers(dest="target", required=True, metavar="prometheus|grafana")
    grafana = targets.add_parser("grafana", help="dashboards as JSON, one a page")
    grafana.add_argument("-o", "--out", type=Path, default=Path("grafana"), help="a folder (default: %(default)s)")
    prometheus = targets.add_parser("prometheus", help="alert rules as YAML")
    prometheus.add_argument("--rules", type=Path, help="a file of health rules (default: the shipped ones)")
    prometheus.add_argument("-o", "--out", type=Path, help="a file (default: stdout)")
    return parser


def _grafana(folder: Path) -> int:
    made: Mapping[str, Mapping[str, Any]] = _plugin("dashboards").build_dashboards()
    for page, dashboard in made.items():
        print(_write(folder / f"{page}.json", json.dumps(dashboard, indent=2) + "\n"))
    return 0


def _prometheus(rules: Path | None, out: Path | None) -> int:
    exported = _plugin("rules").export_rules(rules)
    if out is None:
        sys.stdout.write(exported.yaml)
    else:
        print(_write(out, exported.yaml))
    print(exported.summary, file=sys.stderr)
    return 0


def _plugin(module: str) -> Any:
    try:
        return import_module(f"grpo_prometheus.{module}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(("grpo_prometheus", "grafana_foundation_sdk", "prometheus_client")):
            raise
        raise UsageError("`export` needs the Prometheus plugin: pip install grpo-lightning-prometheus.") from error


def _write(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"Can't write {path}: {error.strerror}. Give a writable path with -o.") from error
    return path
