"""The doctor commands on a machine without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from recipes import doctor

ROOT = Path(__file__).resolve().parents[2]


def test_every_check_passes_in_the_locked_environment(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["doctor"])
    assert doctor.main() == 0, capsys.readouterr().out
    printed = capsys.readouterr().out
    assert "torch hip" in printed and "ok   operators" in printed


def test_a_failing_check_is_named_and_sets_the_exit_code(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["doctor", "--quick"])
    monkeypatch.setattr(doctor, "package_version", lambda name: None)
    assert doctor.main() == 1
    assert "FAIL engines: vllm and megatron-core not installed" in capsys.readouterr().out


def test_rocm_check_explains_a_cpu_torch() -> None:
    command = [sys.executable, "scripts/check_rocm_env.py"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    assert "torch.version.hip is None" in result.stdout and "FAIL GPUs are visible" in result.stdout
