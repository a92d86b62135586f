"""Rewards: answers found and compared, hostile expressions survived, partial credit of the arithmetic set."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from recipes.config import RewardConfig
from recipes.data import load_tokenizer
from recipes.errors import ConfigError, DataError
from recipes.reward import RewardItem, RewardResult, build_reward, compute_rewards, decode_response
from recipes.reward.arithmetic import score
from recipes.reward.extract import extract_answer, normalize
from recipes.reward.math import MathReward


def item(response: str, answer: str = "1", finish: str = "stop") -> RewardItem:
    return RewardItem(response, answer, finish)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{3} and an open \boxed{4", "3"),
        (r"\boxed 5", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{7}", "7"),
        ("Answer: 34", "34"),
        ("work\nAnswer: 3\nAnswer: $-\\frac{1}{2}$.\n", "-\\frac{1}{2}"),
        ("**Answer:** 12.", "12"),
        ("the final answer： 8", "8"),
        (r"Answer: \boxed{9}", "9"),
        (r"\boxed{1} no. Answer: 2", "2"),
        (r"Answer: 2, or \boxed{1}", "1"),
        ("Answer: 5 </think> Answer: 6", "6"),
        ("Answer: 5 </think> nothing", None),
        ("Answer:", None),
        ("I do not know", None),
        ("", None),
        (r"\boxed{}", None),
        ("Answer: " + "9" * 600, None),
        (r"\boxed{" * 2000, None),
    ],
)
def test_extraction(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer


def test_normalize() -> None:
    assert normalize(r" \dfrac{1}{2} ") == normalize(r"\frac{1}{2}")
    assert normalize("1,234,567") == "1234567" and normalize("1,2") == "1,2"
    assert normalize("+5") == "5"


@pytest.fixture(scope="module")
def math_reward() -> Iterator[MathReward]:
    pytest.importorskip("math_verify")
    reward = MathReward(timeout_s=2.0, num_workers=1)
    yield reward
    reward.close()


def test_math_equivalence(math_reward: MathReward) -> None:
    items = [
        item(r"\boxed{\frac12}", "0.5"),
        item(r"\boxed{x=3}", "3"),
        item(r"\boxed{(x+1)^2}", "x^2+2x+1"),
        item("Answer: 1,234", "1234"),
        item(r"Answer: $\sqrt{8}$", r"2\sqrt{2}"),
        item("Answer: 35", "34"),
        item("no answer", "34"),
        item(r"\boxed{\frac{}{}}}}", "34"),
    ]
    result = math_reward(items)
    assert result.rewards == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert result.metrics["reward/mean"] == result.metrics["reward/accuracy"] == 5 / 8
    assert result.metrics["reward/no_answer_count"] == 1
    assert math_reward([]).metrics["reward/mean"] == 0.0


def test_pathological_expressions_cannot_hang(math_reward: MathReward) -> None:
    hostile = r"\boxed{9^{9^{9^{9}}}}"
    start = time.monotonic()
    result = math_reward([item(hostile, "3"), item(hostile, "3"), item(r"\boxed{\frac12}", "0.5")])
    assert time.monotonic() - start < 40  # 2 s of limit for the distinct pair, and new workers
    assert result.rewards == [0.0, 0.0, 1.0]
    assert result.metrics["reward/timeout_count"] + result.metrics["reward/error_count"] == 2


def test_no_worker_survives() -> None:
    pytest.importorskip("math_verify")
    reward = MathReward(timeout_s=5.0, num_workers=2)
    reward([item(r"\boxed{\frac12}", "0.5"), item(r"\boxed{\frac13}", "0.5")])
    pids = [w._process.pid for w in reward._workers if w._process is not None]
    reward.close()
    reward.close()
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


# ---------------------------------------------------------------------- arithmetic


def test_arithmetic_stages() -> None:
    """Each stage of learning earns more than the one before."""
    stages = [
        score("x!k w", "40", stopped=False),
        score("x!4 w", "40", stopped=False),
        score("75338", "40", stopped=False),
        score("75338", "40", stopped=True),
        score("75", "40", stopped=True) + 1e-9,
        score("45", "40", stopped=True),
        score("40", "40", stopped=False),
        score("40", "40", stopped=True),
    ]
    assert stages == sorted(stages) and stages[0] == 0.0 and stages[-1] == 1.0
    assert len(set(stages)) == len(stages)
    assert score("", "40", stopped=True) == 0.0
    assert score("40", "40", stopped=False) < 1.0


def test_arithmetic_batch() -> None:
    result = compute_rewards([item("40", "40"), item("4a", "40"), item("40", "40", "length")])
    assert result.rewards[0] == 1.0 and result.metrics["reward/accuracy"] == 1 / 3
    assert result.metrics["reward/stopped_fraction"] == 2 / 3
    assert result.metrics["reward/max"] == 1.0 and result.metrics["reward/min"] == min(result.rewards)


def test_decoding_keeps_misplaced_special_tokens() -> None:
    tokenizer = load_tokenizer()
    ids = tokenizer("40", add_special_tokens=False).input_ids
    end, user = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|user|>")
    assert decode_response(tokenizer, [*ids, end], "stop") == "40"
    assert decode_response(tokenizer, ids, "length") == "40"
    assert decode_response(tokenizer, [user, *ids, end], "stop") == "<|user|>40"
    assert decode_response(tokenizer, [end], "stop") == ""


# ---------------------------------------------------------------------- selection


def by_length(items: Sequence[RewardItem]) -> list[float]:
    return [float(len(i.response)) for i in items]


def with_metrics(items: Sequence[RewardItem]) -> RewardResult:
    return RewardResult([0.5 for _ in items], {"reward/extra": 3})


def too_few(items: Sequence[RewardItem]) -> list[float]:
    return [0.0]


def not_a_number(items: Sequence[RewardItem]) -> list[float]:
    return [float("nan") for _ in items]


def test_dotted_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    items = [item("ab"), item("")]
    assert compute_rewards(items, "test_reward.by_length").rewards == [2.0, 0.0]
    result = compute_rewards(items, "test_reward.with_metrics")
    assert result.metrics["reward/extra"] == 3 and result.metrics["reward/mean"] == 0.5
    with pytest.raises(DataError, match="1 rewards for 2 items"):
        compute_rewards(items, "test_reward.too_few")
    with pytest.raises(DataError, match="item 0 got nan"):
        compute_rewards(items, "test_reward.not_a_number")
    for name in ("arithmatic", "no.such.module", "test_reward.nothing", "test_reward.os"):
        with pytest.raises(ConfigError, match="reward.name"):
            build_reward(name)


def test_settings_reach_the_math_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    reward = build_reward(RewardConfig(name="math", timeout_s=3.0, num_workers=2))
    assert isinstance(reward, MathReward) and reward.timeout_s == 3.0 and len(reward._workers) == 2
    with pytest.raises(ConfigError, match="must be positive"):
        MathReward(timeout_s=0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="math-verify is not installed"):
        build_reward("math")
