"""Reward code: from import paths and functions, through closures and the project's own imports, down to git blobs."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run_snapshot.digests.files import git_blob
from run_snapshot.rewards import Rewards, read_rewards
from snapshot_support import git

FILES = {
    "rewards.py": "import json\nimport numpy\nimport helpers\nfrom lib import text\n\ndef score(completions, **_):\n"
                  "    from late import scale\n    return [scale(helpers.one()) for _ in completions]\n",
    "helpers.py": "from lib.deep.numbers import ONE\n\ndef one():\n    return ONE\n",
    "late.py": "def scale(x):\n    return 2 * x\n",
    "unused.py": "x = 1\n",
    "lib/__init__.py": "",
    "lib/text.py": "from . import words\nfrom .deep import numbers\n",
    "lib/words.py": "WORDS = ['a']\n",
    "lib/deep/__init__.py": "from importlib import import_module\nplugin = import_module('plugged')\n",
    "lib/deep/numbers.py": "ONE = 1\n",
    "plugged.py": "",
    "factory.py": "from late import scale\n\ndef make(bonus, table):\n    def score(completions, weight=0.5, **_):\n"
                  "        return [scale(bonus) + len(table) + weight for _ in completions]\n    return score\n",
    "objects.py": "import functools\nfrom helpers import one\n\nclass Scorer:\n    def __init__(self, target, api_key):\n"
                  "        self.target = target\n        self.api_key = api_key\n        self.inner = one\n"
                  "    def __call__(self, completions, **_):\n        return [self.target for _ in completions]\n",
}  # fmt: skip
CLOSURE = {"rewards", "helpers", "late", "lib", "lib.text", "lib.words", "lib.deep", "lib.deep.numbers", "plugged"}


@pytest.fixture
def project(make_repository: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    root = make_repository(files=FILES)
    monkeypatch.chdir(root)
    monkeypatch.syspath_prepend(str(root))
    yield root
    for name in [*(Path(f).stem for f in FILES), *CLOSURE]:
        sys.modules.pop(name, None)


def states(rewards: Rewards) -> dict[str, str]:
    return {file.module: file.state for file in rewards.files}


@pytest.mark.parametrize("path", ["rewards:score", "rewards.score", "rewards.py:score"])
def test_imports_of_the_project_are_followed(project: Path, path: str) -> None:
    rewards = read_rewards([path])
    assert states(rewards) == dict.fromkeys(CLOSURE, "clean")
    assert list(rewards.external) == ["numpy"]
    file = next(f for f in rewards.files if f.module == "rewards")
    assert file.blob == file.head_blob == git_blob(FILES["rewards.py"].encode())
    assert file.revision == git(project, "rev-parse", "HEAD")
    assert (rewards.notes, rewards.unresolved) == ([], [])
    assert "rewards" not in sys.modules  # nothing was run to find this out


def test_a_file_outside_of_the_path_finds_its_neighbours(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(project)])
    monkeypatch.chdir(tmp_path)
    assert states(read_rewards([f"{project}/rewards.py:score"])) == dict.fromkeys(CLOSURE, "clean")


@pytest.mark.parametrize("hidden", [False, True], ids=["plain edit", "assume-unchanged"])
def test_an_edited_helper_is_changed_and_has_a_patch(project: Path, hidden: bool) -> None:
    if hidden:
        git(project, "update-index", "--assume-unchanged", "late.py")
    (project / "late.py").write_text("def scale(x):\n    return 3 * x\n")
    (project / "unused.py").write_text("x = 2\n")  # not part of the reward
    rewards = read_rewards(["rewards:score"])
    assert states(rewards) == dict.fromkeys(CLOSURE, "clean") | {"late": "changed"}
    late = next(f for f in rewards.files if f.module == "late")
    assert (
        late.patch
        == "--- a/late.py\n+++ b/late.py\n@@ -1,2 +1,2 @@\n def scale(x):\n-    return 2 * x\n+    return 3 * x\n"
    )


def test_an_untracked_helper_is_not_clean(project: Path) -> None:
    (project / "fresh.py").write_text("Y = 1\n")
    (project / "late.py").write_text("from fresh import Y\n\ndef scale(x):\n    return Y * x\n")
    git(project, "commit", "-qam", "Use fresh")
    assert states(read_rewards(["rewards:score"])) == dict.fromkeys(CLOSURE, "clean") | {"fresh": "untracked"}


def test_ignored_and_outside(project: Path, tmp_path: Path) -> None:
    (project / ".gitignore").write_text("mine.py\n")
    (project / "mine.py").write_text("def f(): pass\n")
    (tmp_path / "free.py").write_text("def f(): pass\n")
    rewards = read_rewards(["mine.py:f", f"{tmp_path}/free.py:f"])
    assert states(rewards) == {"mine": "untracked", "free": "outside"}


def test_what_a_function_closes_over_is_recorded(project: Path) -> None:
    factory: Any = importlib.import_module("factory")
    made = factory.make(1.5, {"a": [1, 2]})
    rewards = read_rewards([made])
    assert rewards.functions[0].settings == {
        "closure.bonus": 1.5,
        "closure.table": {"a": [1, 2]},
        "default.weight": 0.5,
    }
    assert set(states(rewards)) == {"factory", "late"}
    other = read_rewards([factory.make(2.5, {"a": [1, 2]})]).functions[0].settings
    assert other["closure.bonus"] == 2.5


def test_partials_objects_and_methods(project: Path) -> None:
    objects: Any = importlib.import_module("objects")
    rewards_module: Any = importlib.import_module("rewards")
    scorer = objects.Scorer(3, "hunter2")
    partial = functools.partial(rewards_module.score, strict=True)
    rewards = read_rewards([scorer, partial, scorer.__call__, objects.Scorer])
    first, second, third, fourth = rewards.functions
    assert first.settings == {"self.target": 3, "self.api_key": "***", "self.inner": "<helpers.one>"}
    assert second.settings == {"partial.strict": True}
    assert third.qualname == "Scorer.__call__"
    assert (fourth.qualname, fourth.settings) == ("Scorer", {})
    assert set(states(rewards)) == CLOSURE | {"objects"}


def test_a_loaded_module_gives_its_functions_settings(project: Path) -> None:
    (project / "made.py").write_text("from factory import make\nscore = make(7, {})\n")
    importlib.import_module("made")
    (function,) = read_rewards(["made:score"]).functions
    assert function.settings["closure.bonus"] == 7
    sys.modules.pop("made")


def test_a_function_of_an_installed_package_stays_within_it() -> None:
    rewards = read_rewards(["packaging.version:parse"])
    modules = set(states(rewards))
    assert "packaging.version" in modules
    assert all(module.split(".")[0] == "packaging" for module in modules)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("exact_match", "no import path"), ("nowhere.at.all:f", "is not found"), ("missing.py:f", "does not exist"),
        ("rewards.py", "no import path"),
    ],
)  # fmt: skip
def test_what_is_not_found_is_said(project: Path, path: str, why: str) -> None:
    rewards = read_rewards([path, "rewards:score"])
    assert len(rewards.functions) == 1
    assert why in rewards.unresolved[0]


def test_code_without_a_file_is_said() -> None:
    space: dict[str, Any] = {}
    exec("def score(): return 1", space)
    assert "in no file" in read_rewards([space["score"]]).unresolved[0]


def test_what_cant_be_followed_is_noted(project: Path) -> None:
    (project / "odd.py").write_text(
        "import importlib\nimport broken\nname = 'x'\nimportlib.import_module(name)\ndef f(): pass\n"
    )
    (project / "broken.py").write_text("def f(:\n")
    notes = read_rewards(["odd.py:f"]).notes
    assert any("computed name" in note and "line 4" in note for note in notes)
    assert any("broken.py can't be parsed" in note for note in notes)


def test_a_hard_coded_key_is_not_copied(project: Path) -> None:
    (project / "keyed.py").write_text('API_KEY = "hunter2hunter2"\n\ndef f(): pass\n')
    (file,) = read_rewards(["keyed.py:f"]).files
    assert "hunter2hunter2" not in file.source
    assert file.blob == git_blob(b'API_KEY = "hunter2hunter2"\n\ndef f(): pass\n')


def test_a_project_on_the_path_is_followed_from_elsewhere(project: Path, tmp_path: Path) -> None:
    code = (
        "from run_snapshot.rewards import read_rewards as r; print(sorted(f.module for f in r(['lib.text:x']).files))"
    )
    env = {"PYTHONPATH": f"{Path(__file__).parents[1]}:{project}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(
        sorted({"lib", "lib.text", "lib.words", "lib.deep", "lib.deep.numbers", "plugged"})
    )
