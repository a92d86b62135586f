"""The exchange through peer memory without a GPU: kernels on threads under a race detector, launches, build."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from rl_kernel.errors import ContractError
from rl_kernel.ops.collectives import peer

ROOT = Path(__file__).parents[2]
FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a"]


def _build(folder: Path, *flags: str) -> Path:
    binary = folder / "simulate_exchange"
    command = ["g++", "-O1", "-g", "-std=c++20", "-fsanitize=thread", "-ffp-contract=off", "-pthread"]
    command += ["-DRLK_SIMULATION", *flags, f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'ops'}"]
    command += [str(ROOT / "tests/ops/simulate_exchange.cpp"), "-o", str(binary)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "tsan" in done.stderr and "cannot find" in done.stderr:
        pytest.skip("g++ has no thread sanitizer here")
    assert done.returncode == 0, done.stderr[-3000:]
    return binary


def _simulate(binary: Path, ranks: int, calls: int, seed: int) -> subprocess.CompletedProcess:
    command = [str(binary), str(ranks), str(calls), str(seed)]
    if shutil.which("setarch"):  # the detector wants memory where it expects it
        command = ["setarch", "-R", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_kernels_on_threads_have_the_bits_and_no_race(tmp_path):
    binary = _build(tmp_path)
    for ranks, calls in ((2, 30), (3, 12), (4, 12), (8, 4)):
        done = _simulate(binary, ranks, calls, seed=ranks)
        assert done.returncode == 0 and " wrong 0" in done.stdout, done.stdout + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_slot_too_few_is_a_race(tmp_path):
    """Negative control of the simulation."""
    binary = _build(tmp_path, "-DRLK_SIMULATED_SLOTS=2")
    done = _simulate(binary, 2, 60, seed=1)
    assert done.returncode != 0 and "data race" in done.stderr


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
@pytest.mark.parametrize(
    "limits", [peer.Limits(), peer.Limits(0, 0), peer.Limits(0, 1 << 40)], ids=["default", "sliced", "whole"]
)
def test_every_launch_fits_its_buffer(ranks, limits):
    source = random.Random(ranks)
    for mib in (16, 64):
        layout = peer.layout_of(ranks, mib << 20)
        end = layout.slots_offset + layout.lanes * peer.SLOTS * layout.slot_bytes
        assert end <= mib << 20 and layout.slots_offset % 128 == 0 and layout.slot_bytes % 16 == 0
        for _ in range(500):
            numel, mode = int(2 ** source.uniform(0, 28)), source.choice((peer.WHOLE, peer.SCATTER, peer.GATHER))
            size = 1 if mode == peer.GATHER else source.choice((2, 4))
            chosen = peer.plan(mode, numel, size, ranks, layout, limits)
            assert 1 <= chosen.lanes <= layout.lanes and chosen.threads in range(32, 513, 32)
            if chosen.chunk == 0:
                items = (numel * size + 7) // 8
                share = -(-items // chosen.lanes)
                assert share <= layout.mailbox_items and (chosen.lanes - 1) * share < items
                continue
            sliced = chosen.mode == peer.SLICED
            parts = ranks if sliced or mode == peer.SCATTER else 1
            assert chosen.chunk % 16 == 0 and chosen.chunk * size * parts <= layout.result_offset
            assert chosen.chunk * 4 <= layout.slot_bytes - layout.result_offset or not sliced
            assert chosen.lanes <= -(-numel // (chosen.chunk * (ranks if sliced else 1)))


def test_errors_name_the_setting(monkeypatch):
    with pytest.raises(ContractError, match="RLK_COLLECTIVES_BUFFER_MIB"):
        peer.layout_of(8, 4 << 20)
    monkeypatch.setenv("RLK_COLLECTIVES", "fast")
    with pytest.raises(ContractError, match="auto, peer or gather"):
        peer._choice()
    monkeypatch.setenv("RLK_COLLECTIVES_BUFFER_MIB", "-1")
    with pytest.raises(ContractError, match="RLK_COLLECTIVES_BUFFER_MIB"):
        peer._number("RLK_COLLECTIVES_BUFFER_MIB", 64)


def test_ranks_take_one_path_for_one_reason():
    def fact(**changes):
        return {"reason": None, "machine": "a", "uuid": "0", **changes}

    device = torch.device("cuda", 0)
    assert peer._disagreement([fact(), fact(uuid="1")], device) is None
    assert "rank 1: not built" in peer._disagreement([fact(), fact(uuid="1", reason="not built")], device)
    assert "several machines" in peer._disagreement([fact(), fact(uuid="1", machine="b")], device)
    assert "share a GPU" in peer._disagreement([fact(), fact()], device)


def test_cpu_ranks_need_nothing():
    assert peer.prepare(None) is False and isinstance(peer.report(), dict) and peer.describe()


def test_schemas_are_valid():
    text = (ROOT / "csrc/gpu/bindings.cpp").read_text(encoding="utf-8")
    defined = []
    for body in re.findall(r"m\.def\((.*?)\);", text, re.S):
        defined.append(torch._C.parse_schema("rlk::" + "".join(re.findall(r'"([^"]*)"', body))).name)
    assert sorted(defined) == sorted(f"rlk::{name}" for name in re.findall(r'm\.impl\("(\w+)"', text))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_compiles_without_spills(tmp_path):
    run = subprocess.run(
        ["nvcc", *FLAGS, f"-I{ROOT / 'csrc'}", "-Xptxas", "-v", "-cubin", "-o", str(tmp_path / "exchange.cubin"),
         str(ROOT / "csrc/gpu/exchange.cu")],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", run.stderr)]
    assert spills and max(spills) <= 16, run.stderr  # a value kept over a call that rare ends make
    disassembler = shutil.which("cuobjdump")
    if disassembler:
        listing = subprocess.run(
            [disassembler, "--dump-sass", str(tmp_path / "exchange.cubin")], capture_output=True, text=True
        ).stdout
        assert "FADD" in listing and "FFMA" not in listing and not re.search(r"\b(RED|ATOM)\w*\.\S*(F32|BF16)", listing)


def _prepared(group, failing: int | None, environment: dict[str, str], only: int | None = None):
    """`prepare` on real processes, with the GPU's part replaced. ``only``: the rank that has ``environment``."""
    import warnings

    from tests.ops.test_peer_exchange import fake_gpus

    with pytest.MonkeyPatch.context() as patch:
        if only in (None, group.rank()):
            for name, value in environment.items():
                patch.setenv(name, value)
        fake_gpus(patch, group, failing)
        peer._known.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                made: object = peer.prepare(group)
                again = peer.prepare(group)
                assert made == again
            except Exception as error:  # noqa: BLE001 - the kind is what is tested
                made = f"{type(error).__name__}: {error}"
        found = peer.report().get(group.group_name, {"path": "none", "reason": None})
        peer._known.clear()
        return made, found["path"], found["reason"], [str(w.message) for w in caught]


def fake_gpus(patch, group, failing):
    class Peers:
        ranks, calls, device = group.size(), {}, torch.device("cuda", 0)

    def mapped(*arguments):
        if group.rank() == failing:
            raise RuntimeError("no handle\nmore")
        return Peers()

    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "device_count", lambda: 0)
    patch.setattr(torch.cuda, "synchronize", lambda device: None)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch.setattr(peer, "_unavailable", lambda group, device, choice: None)
    patch.setattr(peer, "_uuid", lambda index: str(group.rank()))
    patch.setattr(peer, "_map", mapped)


def test_prepare_agrees_over_the_ranks(ranks):
    for made, path, reason, warned in ranks.run(2, _prepared, None, {}):
        assert made is True and path == "peer" and reason is None and not warned
    for rank, (made, path, reason, warned) in enumerate(ranks.run(4, _prepared, 2, {})):
        assert made is False and path == "gather" and "rank 2" in reason and "no handle" in reason
        assert len(warned) == (rank == 0)
    for made, path, reason, _ in ranks.run(2, _prepared, 1, {"RLK_COLLECTIVES": "peer"}):
        assert "UnsupportedError" in made and "rank 1" in reason and path == "gather"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RLK_COLLECTIVES", "fast", "must be auto, peer or gather"),
        ("RLK_COLLECTIVES_BUFFER_MIB", "-1", "must be a whole number above 0"),
        ("RLK_COLLECTIVES_BUFFER_MIB", "2", "is too small for 4 ranks; use at least 16"),
        ("RLK_COLLECTIVES_TIMEOUT_S", "soon", "must be a whole number above 0"),
    ],
)
def test_a_wrong_setting_of_one_rank_is_an_error_of_all(ranks, name, value, said):
    """A rank that raised alone would leave the others in their collective until the group's timeout."""
    for made, path, _, _ in ranks.run(4, _prepared, None, {name: value}, 2):
        assert made.startswith("ContractError: rank 2: " + name) and said in made and "unset it" in made
        assert path == "none"


@pytest.mark.parametrize(
    ("name", "value"),
    [("RLK_COLLECTIVES", "peer"), ("RLK_COLLECTIVES_BUFFER_MIB", "32"), ("RLK_COLLECTIVES_TIMEOUT_S", "5")],
)
def test_settings_that_differ_are_an_error_of_all_ranks(ranks, name, value):
    found = ranks.run(4, _prepared, None, {name: value}, 1)
    assert len({made for made, *_ in found}) == 1
    assert found[0][0].startswith(f"ContractError: {name} differs") and "on rank 0, rank 2, rank 3" in found[0][0]
    assert f"{value} on rank 1" in found[0][0].replace("'", "")
    for made, *_ in ranks.run(4, _prepared, None, {name: value}):  # the same value everywhere is fine
        assert made is True
