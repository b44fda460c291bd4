"""Distributions that are really installed: by pip from wheels made here, edited, doubled, without pip."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from run_snapshot.distributions import edited_files, find_installed, freeze, owners, stat_digest
from run_snapshot.environment import ALLOWED_VARIABLES, describe_environment, describe_variables
from run_snapshot.locks import copy_locks, make_lock, pins_of
from snapshot_support import install, make_wheel


@pytest.fixture
def site_dir(tmp_path: Path) -> Path:
    """A folder with one package that pip installed."""
    folder = tmp_path / "site"
    install(folder, make_wheel(tmp_path, "Peach_Tools", "1.2", {"peach.py": "x = 1\n", "data/t.txt": "a\n"}))
    return folder


def test_a_distribution_is_described(site_dir: Path) -> None:
    (dist,) = find_installed([str(site_dir)])
    assert (dist.name, dist.version, dist.installer, dist.editable, dist.shadowed) == (
        "peach-tools",
        "1.2",
        "pip",
        False,
        False,
    )
    assert dist.url.startswith("file://")
    assert dist.url.endswith("peach_tools-1.2-py3-none-any.whl")
    assert len(dist.record_sha256) == 64


def test_the_record_digest_is_that_of_the_contents(site_dir: Path, tmp_path: Path) -> None:
    again, other = tmp_path / "again", tmp_path / "other"
    install(again, make_wheel(tmp_path, "Peach_Tools", "1.2", {"peach.py": "x = 1\n", "data/t.txt": "a\n"}))
    install(other, make_wheel(tmp_path / "b", "Peach_Tools", "1.2", {"peach.py": "x = 2\n", "data/t.txt": "a\n"}))
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(again)], check=True)  # .pyc files do not count
    digests = [find_installed([str(folder)])[0].record_sha256 for folder in (site_dir, again, other)]
    assert digests[0] == digests[1] != digests[2]


def test_an_edited_file_is_named(site_dir: Path) -> None:
    (dist,) = find_installed([str(site_dir)])
    assert edited_files(dist) == () == edited_files(dist, full=True)
    before = stat_digest(dist)
    file = site_dir / "peach.py"
    stat = file.stat()
    file.write_text("x = 2\n")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert stat_digest(dist) == before  # of the same size and time: only reading shows it
    assert edited_files(dist) == ()
    assert edited_files(dist, full=True) == ("peach.py",)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**10))
    assert stat_digest(dist) != before
    assert edited_files(dist) == ("peach.py",)
    (site_dir / "data" / "t.txt").unlink()
    assert edited_files(dist) == ("data/t.txt (gone)", "peach.py")


def test_a_quick_look_leaves_out_what_no_run_loads(tmp_path: Path) -> None:
    install(tmp_path / "site", make_wheel(tmp_path, "plum", "1.0", {"plum.py": "x = 1\n", "plum.h": "int x;\n"}))
    (dist,) = find_installed([str(tmp_path / "site")])
    before = stat_digest(dist, quick=True), stat_digest(dist)
    (tmp_path / "site" / "plum.h").write_text("long x;\n")
    assert (stat_digest(dist, quick=True) == before[0], stat_digest(dist) == before[1]) == (True, False)
    (tmp_path / "site" / "plum.py").write_text("x = 11\n")
    assert stat_digest(dist, quick=True) != before[0]


def test_two_distributions_of_one_name(site_dir: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    install(second, make_wheel(tmp_path, "peach.tools", "2.0", {"peach.py": "x = 2\n"}))
    found = find_installed([str(site_dir), str(second)])
    assert [(d.version, d.shadowed) for d in found] == [("1.2", False), ("2.0", True)]
    assert freeze(found).count("peach-tools") == 1


ORIGINS = {
    "index": ({}, "", "plum==1.0"),
    "editable": ({"url": "file:///home/ada/plum", "dir_info": {"editable": True}}, "file:///home/ada/plum",
                 "# editable: plum==1.0 from file:///home/ada/plum"),
    "vcs": ({"url": "https://ada:hunter2@git.example.org/plum.git", "vcs_info": {"vcs": "git", "commit_id": "abc123"}},
            "git+https://***@git.example.org/plum.git", "plum @ git+https://***@git.example.org/plum.git@abc123"),
    "url": ({"url": "https://files.example.org/plum.whl?token=hunter2", "archive_info": {}},
            "https://files.example.org/plum.whl?token=***", "plum @ https://files.example.org/plum.whl?token=***"),
}  # fmt: skip


@pytest.mark.parametrize("origin", ORIGINS)
def test_origins_lose_their_credentials(tmp_path: Path, origin: str) -> None:
    direct, url, line = ORIGINS[origin]
    install(tmp_path / "site", make_wheel(tmp_path, "plum", "1.0", {"plum.py": ""}))
    info = tmp_path / "site" / "plum-1.0.dist-info"
    (info / "direct_url.json").unlink()
    if direct:
        (info / "direct_url.json").write_text(json.dumps(direct))
    (dist,) = find_installed([str(tmp_path / "site")])
    assert (dist.url, dist.editable) == (url, origin == "editable")
    assert dist.commit == ("abc123" if origin == "vcs" else "")
    assert freeze([dist]) == line + "\n"


def test_broken_metadata_does_not_break_the_rest(site_dir: Path) -> None:
    (site_dir / "empty-1.0.dist-info").mkdir()
    (site_dir / "odd-1.0.dist-info").mkdir()
    (site_dir / "odd-1.0.dist-info" / "METADATA").write_bytes(b"\xff\xfe\x00garbage")
    assert [d.name for d in find_installed([str(site_dir)])] == ["peach-tools"]


def test_an_environment_without_pip(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    deps = tmp_path / "deps"
    deps.mkdir()
    home = Path(__import__("packaging").__file__).parents[1]
    for name in ("xxhash", "packaging", *(p.name for p in home.glob("xxhash-*.dist-info"))):
        (deps / name).symlink_to(home / name)
    code = "from run_snapshot.environment import describe_environment as d; print([x['name'] for x in d()['distributions']])"
    env = {"PYTHONPATH": f"{Path(__file__).parents[1]}:{deps}", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [str(venv / "bin" / "python"), "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() in (
        "['xxhash']",
        "['lightning-run-snapshot', 'xxhash']",
    )  # installed here, or only found


def test_the_environment_names_edits_doubles_and_pth_files(site_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site_dir))
    (site_dir / "peach.py").write_text("x = 12345\n")
    environment = describe_environment()
    assert environment["edited"]["peach-tools"] == ["peach.py"]
    assert "peach-tools" in {d["name"] for d in environment["distributions"]}
    assert environment["python"]["version"] == ".".join(map(str, sys.version_info[:3]))
    assert json.loads(json.dumps(environment)) == environment


@pytest.mark.parametrize(
    ("name", "is_kept"),
    [("CUDA_VISIBLE_DEVICES", True), ("OMP_NUM_THREADS", True), ("PYTHONHASHSEED", True), ("NCCL_DEBUG", True),
     ("HF_HUB_OFFLINE", True), ("HF_TOKEN", False), ("HOME", False), ("AWS_SECRET_ACCESS_KEY", False), ("MY_CUDA_X", False),
     ("WANDB_API_KEY", False)],
)  # fmt: skip
def test_only_listed_variables_are_kept(monkeypatch: pytest.MonkeyPatch, name: str, is_kept: bool) -> None:
    monkeypatch.setenv(name, "value-17")
    assert (describe_variables().get(name) == "value-17") is is_kept
    assert bool(ALLOWED_VARIABLES.fullmatch(name)) is is_kept


def test_a_listed_variable_may_still_hold_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    monkeypatch.setenv("TORCH_HUB_URL", "https://ada:hunter2@example.org")
    assert "hunter2" not in json.dumps(describe_variables())


LOCKS = {
    "requirements.txt": "--index-url https://ada:hunter2@pypi.example.org/simple\nplum==1.0 \\\n    --hash=sha256:aa\npear>=2\n",
    "uv.lock": 'version = 1\n[[package]]\nname = "Plum"\nversion = "1.1"\n',
    "poetry.lock": '[[package]]\nname = "pear"\nversion = "2.0"\n',
    "pylock.toml": 'lock-version = "1.0"\n[[packages]]\nname = "plum"\nversion = "1.0"\n',
}


def test_the_projects_locks_are_copied_and_held_against_the_environment(tmp_path: Path) -> None:
    for name, text in LOCKS.items():
        (tmp_path / name).write_text(text)
    install(tmp_path / "site", make_wheel(tmp_path, "plum", "1.0", {"plum.py": ""}))
    locks = {lock.name: lock for lock in copy_locks(tmp_path, find_installed([str(tmp_path / "site")]))}
    assert set(locks) == set(LOCKS)
    assert {name: lock.mismatches for name, lock in locks.items()} == {
        "requirements.txt": (), "poetry.lock": (), "pylock.toml": (), "uv.lock": ("plum: lock 1.1, installed 1.0",),
    }  # fmt: skip
    assert locks["requirements.txt"].hashed
    assert "hunter2" not in locks["requirements.txt"].text


@pytest.mark.parametrize(
    ("name", "text", "pins"),
    [
        ("requirements.txt", "a==1.0 ; python_version > '3'\nb==2 ; python_version < '3'\nc~=1.0\n-e .\n# e==1\n", {"a": "1.0"}),
        ("requirements.txt", "d @ file:///d.whl\nf==1 # why\n", {"f": "1"}),
        ("requirements.txt", "A_b==1.0.*\nx===1\n", {"x": "1"}),
        ("uv.lock", "not toml [", {}),
        ("Pipfile.lock", "{}", {}),
    ],
)  # fmt: skip
def test_pins_of_locks(name: str, text: str, pins: dict[str, str]) -> None:
    assert pins_of(name, text) == pins


def test_a_lock_that_cant_be_made_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", make_wheel(tmp_path, "no-such-plum-anywhere", "1.0", {"plum.py": ""}))
    (info,) = (tmp_path / "site").glob("*.dist-info")
    (info / "direct_url.json").unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    lock, status = make_lock(find_installed([str(tmp_path / "site")]), seconds=60)
    assert lock is None
    assert status.startswith("failed: ")


def test_a_lock_is_made_where_the_distributions_can_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path, "plum", "1.0", {"plum.py": ""})
    install(tmp_path / "site", wheel)
    (tmp_path / "site" / "plum-1.0.dist-info" / "direct_url.json").unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    lock, status = make_lock(find_installed([str(tmp_path / "site")]), seconds=60)
    assert status == "made"
    assert lock is not None
    assert lock.mismatches == ()
    assert f"--hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}" in lock.text
    assert str(tmp_path) not in lock.text.split("--hash")[0].replace(str(tmp_path / "freeze"), "")


def test_owners_of_packages() -> None:
    assert set(owners(["xxhash", "packaging", "nowhere"])) == {"xxhash", "packaging"}


def test_the_wheels_made_here_are_sound(tmp_path: Path) -> None:
    with zipfile.ZipFile(make_wheel(tmp_path, "plum", "1.0", {"plum.py": "x"})) as wheel:
        record = wheel.read("plum-1.0.dist-info/RECORD").decode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"x").digest()).rstrip(b"=").decode()
    assert f"plum.py,sha256={digest},1" in record
