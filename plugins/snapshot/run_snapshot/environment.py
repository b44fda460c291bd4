"""What the run ran on: distributions, Python, platform, accelerator, and the environment variables that matter."""

from __future__ import annotations

import os
import platform
import re
import site
import sys
import sysconfig
from pathlib import Path
from typing import Any

from run_snapshot.digests.files import sha256_of
from run_snapshot.distributions import Installed, edited_files, find_installed
from run_snapshot.redact import redact

__all__ = [
    "ALLOWED_VARIABLES",
    "describe_environment",
    "describe_machine",
    "describe_variables",
    "installed_of",
    "path_files_now",
]

# Other variables are neither stored nor named.
ALLOWED_VARIABLES = re.compile(
    r"(?:CUDA|NCCL|CUBLAS|CUDNN|NVIDIA|ROCR|HIP|HSA|XLA|TORCH|TORCHINDUCTOR|PYTORCH|OMP|MKL|OPENBLAS|GLOO|KMP|PL|VLLM|TRL|PEFT"
    r"|TRANSFORMERS|DEEPSPEED|ACCELERATE|TOKENIZERS|HF_DATASETS|HF_HUB)_\w+"
    r"|HF_HOME|PYTHONHASHSEED|PYTHONPATH|PYTHONOPTIMIZE|LD_PRELOAD|LD_LIBRARY_PATH|WORLD_SIZE|LOCAL_WORLD_SIZE|LC_ALL|TZ"
)


def describe_environment(*, full: bool = False) -> dict[str, Any]:
    """The environment member. `full` hashes every installed file against its RECORD, else only those that look edited."""
    installed = find_installed()
    edited = {dist.name: list(edited_files(dist, full=full)) for dist in installed if dist.record_sha256}
    return {
        **describe_machine(),
        "variables": describe_variables(),
        "path_files": path_files_now(),
        "distributions": [dist.to_json() for dist in installed],
        "edited": {name: files for name, files in edited.items() if files},
        "duplicates": sorted({dist.name for dist in installed if dist.shadowed}),
    }


def describe_machine() -> dict[str, Any]:
    """Python, platform and accelerator."""
    return {
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "abi": sysconfig.get_config_var("SOABI") or "",
        },
        "platform": {
            "system": platform.system(),
            "machine": platform.machine(),
            "kernel": platform.release(),
            "libc": "-".join(platform.libc_ver()),
            "cpus": os.cpu_count() or 0,
        },
        "accelerator": _accelerator(),
    }


def describe_variables() -> dict[str, str]:
    """The allow-listed environment variables, without secrets."""
    allowed = {name: value for name, value in os.environ.items() if ALLOWED_VARIABLES.fullmatch(name)}
    clean: dict[str, str] = redact(allowed)
    return dict(sorted(clean.items()))


def installed_of(environment: dict[str, Any]) -> tuple[Installed, ...]:
    """The distributions that an environment member lists."""
    return tuple(Installed(**entry) for entry in environment["distributions"])


def _accelerator() -> dict[str, Any]:
    """Of torch, when the run has loaded it; it is not loaded for this."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    cuda = torch.cuda
    return {
        "torch": str(torch.__version__),
        "torch_build": sha256_of(torch.__config__.show().encode())[:16],
        "cuda": torch.version.cuda or "",
        "cudnn": torch.backends.cudnn.version() or 0 if torch.version.cuda else 0,
        "devices": [cuda.get_device_name(i) for i in range(cuda.device_count())] if cuda.is_available() else [],
        "driver": _driver(),
    }


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""


def path_files_now() -> dict[str, str]:
    """The .pth files of the site folders: they can run code at every start."""
    folders = {Path(folder) for folder in (*site.getsitepackages(), sysconfig.get_path("purelib"))}
    files = sorted(file for folder in folders if folder.is_dir() for file in folder.glob("*.pth"))
    return {file.name: sha256_of(file.read_bytes()) for file in files}
