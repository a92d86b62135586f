"""The shell entry points: what a newcomer meets first. No environment is built here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False
    )


def test_run_script_without_platform_prints_usage() -> None:
    result = run("bash", "scripts/run-qwen3-8b-grpo.sh")
    assert result.returncode == 2
    assert "cpu" in result.stderr and "cuda" in result.stderr and "rocm" in result.stderr


def test_env_refuses_an_unknown_platform() -> None:
    result = run("bash", "scripts/env.sh", "tpu")
    assert result.returncode == 1
    assert "'tpu' is unknown; choose cpu, cuda or rocm" in result.stderr


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_gpu_platform_outside_its_image_names_the_image(platform: str, tmp_path: Path) -> None:
    result = run("bash", "scripts/env.sh", platform, RLK_VENV=str(tmp_path / "venv"))
    assert result.returncode == 1
    assert f"Dockerfile.{platform}" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_setup_without_a_compiler_says_what_to_install(tmp_path: Path) -> None:
    result = run(sys.executable, "setup.py", "--version", RLK_BUILD="cpu", CXX=str(tmp_path / "missing-g++"))
    assert result.returncode != 0
    assert "no C++ compiler: install g++" in result.stderr


def test_environment_without_a_compiler_fails_before_it_downloads(tmp_path: Path) -> None:
    places = {"RLK_VENV": str(tmp_path / "venv"), "VIRTUAL_ENV": ""}
    result = run("bash", "scripts/env.sh", "cpu", CXX=str(tmp_path / "missing-g++"), **places)
    assert result.returncode == 1
    assert "no C++ compiler: install g++" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_setup_refuses_an_unknown_build() -> None:
    result = run(sys.executable, "setup.py", "--version", RLK_BUILD="gpu")
    assert result.returncode != 0
    assert "RLK_BUILD='gpu' must be one of auto, cpu, cuda, rocm, skip" in result.stderr


def test_setup_skip_builds_nothing() -> None:
    result = run(sys.executable, "setup.py", "--version", RLK_BUILD="skip", CXX="missing-g++")
    assert result.returncode == 0, result.stderr


def test_check_lock_reports_each_difference(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("# comment\npytest==0.0.1\nno-such-package==1.0\nnumpy>=1\n", encoding="utf-8")
    result = run(sys.executable, "scripts/check_lock.py", str(lock))
    assert result.returncode == 1
    assert "pytest: wanted 0.0.1, found" in result.stdout
    assert "no-such-package: wanted 1.0, not installed" in result.stdout
    assert "not a pin: numpy>=1" in result.stdout


def test_lock_is_satisfied_by_the_environment_under_test() -> None:
    result = run(sys.executable, "scripts/check_lock.py", "requirements/cpu.txt")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("script", sorted(str(path.relative_to(ROOT)) for path in (ROOT / "scripts").glob("*.sh")))
def test_shell_syntax(script: str) -> None:
    assert shutil.which("bash")
    result = run("bash", "-n", script)
    assert result.returncode == 0, result.stderr
