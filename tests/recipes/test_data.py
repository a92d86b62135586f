"""Prompts: what is read, what is refused (with file and line), and the order in which they are drawn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.config import DataConfig
from recipes.data import PromptDataset, load_tokenizer
from recipes.data.arithmetic import generate
from recipes.data.prompts import epoch_order
from recipes.data.sources import ARITHMETIC_DIR, read_rows
from recipes.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer()


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def plain(path: str, **changes: Any) -> DataConfig:
    return replace(DataConfig(path=path), **changes)


# ---------------------------------------------------------------------- the set that ships


def test_shipped_files_are_what_the_generator_writes() -> None:
    for name, text in generate.files().items():
        assert (ARITHMETIC_DIR / name).read_text() == text, f"run python -m recipes.data.arithmetic.generate ({name})"


def test_arithmetic_set(tokenizer: Any) -> None:
    data = PromptDataset(DataConfig(), tokenizer, max_prompt_len=64, vocab_size=len(tokenizer))
    assert data.counts.rows == data.counts.kept == len(data) >= 64
    assert 100 <= len(tokenizer) <= 300
    for prompt in data.prompts:
        question = prompt.text.rsplit("<|user|>", 1)[1].removesuffix("<|assistant|>")
        left, op, right = question.split()
        value = generate.POWERS[left] * int(right) if op == "times" else int(left) + int(right)
        assert prompt.answer == str(value)
        assert tokenizer.decode(list(prompt.prompt_ids)) == prompt.text
        assert tokenizer.unk_token_id not in prompt.prompt_ids
    lengths = {len(p.prompt_ids) for p in data.prompts}
    assert len(lengths) >= 3 and max(lengths) <= 64
    long = [p.prompt_ids for p in data.prompts if len(p.prompt_ids) > 40]
    shared = next(i for i, ids in enumerate(zip(*long)) if len(set(ids)) > 1)
    assert shared >= 32, "long prompts share at least one key-value block"


def test_tokenizer(tokenizer: Any) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer("hundred times 45", add_special_tokens=False).input_ids) == [
        "hundred", " times", " ", "4", "5",
    ]  # fmt: skip
    text = "".join(map(chr, range(32, 127))) + "\n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    assert tokenizer("é", add_special_tokens=False).input_ids == [tokenizer.unk_token_id]
    assert tokenizer.eos_token == "<|end|>" and tokenizer.pad_token_id == 0
    chat = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|system|>a<|user|>b<|assistant|>c<|end|>"


# ---------------------------------------------------------------------- layouts


def test_dapo_layout(tmp_path: Path, tokenizer: Any) -> None:
    row = {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": "Solve. 1 plus 1"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "x"},
    }
    path = write(tmp_path / "dapo.jsonl", [row])
    data = PromptDataset(plain(path, label_key="reward_model.ground_truth"), tokenizer)
    assert data[0].text == "<|user|>Solve. 1 plus 1<|assistant|>" and data[0].answer == "2"
    as_text = {**row, "reward_model": json.dumps(row["reward_model"])}
    path = write(tmp_path / "text.jsonl", [as_text])
    assert PromptDataset(plain(path, label_key="reward_model.ground_truth"), tokenizer)[0].answer == "2"


def test_string_prompts_with_and_without_template(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", [{"q": "3 plus 4", "label": 7}])
    assert PromptDataset(plain(path, prompt_key="q"), tokenizer)[0].text == "3 plus 4"
    data = PromptDataset(plain(path, prompt_key="q", chat_template=True, system_prompt="Add."), tokenizer)
    assert data[0].text == "<|system|>Add.<|user|>3 plus 4<|assistant|>" and data[0].answer == "7"


def test_parquet_and_folder(tmp_path: Path, tokenizer: Any) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    rows = [{"prompt": [{"role": "user", "content": f"{i} plus 1"}], "label": str(i + 1)} for i in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train-0.parquet")
    write(tmp_path / "train-1.jsonl", [{"prompt": "x", "label": "y"}])
    write(tmp_path / "test.jsonl", [{"prompt": "t", "label": "y"}])
    data = PromptDataset(plain(str(tmp_path)), tokenizer)
    assert [p.answer for p in data.prompts] == ["1", "2", "3", "4", "y"]
    assert [r.fields["prompt"] for r in read_rows(str(tmp_path), split="test")] == ["t"]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="bad.parquet: cannot be read as parquet"):
        read_rows(str(tmp_path / "bad.parquet"))


def test_json_array_and_limit(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": "p", "label": i} for i in range(5)]))
    assert len(read_rows(str(tmp_path / "a.json"), limit=2)) == 2
    (tmp_path / "b.json").write_text('[{"a": 1},\n {"a": }]')
    with pytest.raises(DataError, match=r"b.json:2: not JSON"):
        read_rows(str(tmp_path / "b.json"))


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "x", "label": 1', r"a.jsonl:3: not JSON at column \d+"),
        (b"[1, 2]", r"a.jsonl:3: a JSON list, an object is needed"),
        (b'{"prompt": "\xff", "label": 1}', r"a.jsonl:3: byte 13 is not UTF-8"),
        (b'{"prompt": "x", "answer": 1}', r"a.jsonl:3: no field 'label'; found answer, prompt.*data.label_key"),
        (rb'{"prompt": "half a pair: \ud800", "label": 1}', r"a.jsonl:3: cannot be used: .*surrogates"),
        (b'{"question": "x", "label": 1}', r"a.jsonl:3: no field 'prompt'; found label, question.*data.prompt_key"),
        (b'{"prompt": "x", "label": null}', r"a.jsonl:3: field 'label' is None"),
        (b'{"prompt": "x", "label": "  "}', r"a.jsonl:3: field 'label' is '  '"),
        (b'{"prompt": "", "label": 1}', r"a.jsonl:3: field 'prompt' is empty"),
        (b'{"prompt": 5, "label": 1}', r"a.jsonl:3: field 'prompt' is int"),
        (b'{"prompt": [{"content": "x"}], "label": 1}', r"a.jsonl:3: message 0 of 'prompt' lacks role or content"),
        (b'{"prompt": [{"role": "pirate", "content": "x"}], "label": 1}', r"a.jsonl:3: the chat template .*pirate"),
    ],
)  # fmt: skip
def test_broken_line_is_named(tmp_path: Path, tokenizer: Any, line: bytes, message: str) -> None:
    good = b'{"prompt": "1 plus 1", "label": 2}\n\n'  # an empty line counts, and is skipped
    (tmp_path / "a.jsonl").write_bytes(good + line + b"\n")
    with pytest.raises(DataError, match=message):
        PromptDataset(plain(str(tmp_path / "a.jsonl")), tokenizer)


def test_missing_and_empty(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        read_rows(str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="no rows"):
        read_rows(str(tmp_path / "empty.jsonl"))
    (tmp_path / "x.csv").write_text("a,b\n")
    with pytest.raises(DataError, match="unknown format '.csv'"):
        read_rows(str(tmp_path / "x.csv"))
    with pytest.raises(DataError, match="The arithmetic set has: train"):
        read_rows("arithmetic", split="validation")


def test_hub_name_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("the hub is not reachable")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError, match=r"data.path=some/name: cannot load split 'train' from the hub.*not reachable"):
        read_rows("some/name")


def test_template_is_required_for_messages(tmp_path: Path, tokenizer: Any) -> None:
    class Bare:
        chat_template = None

    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        PromptDataset(DataConfig(), Bare())


def test_length_limit(tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "1" * n, "label": n} for n in (3, 9, 5, 10)])
    data = PromptDataset(plain(path), tokenizer, max_prompt_len=5)
    assert [p.answer for p in data.prompts] == ["3", "5"] and [p.index for p in data.prompts] == [0, 1]
    assert (data.counts.dropped_overlong, data.counts.longest_prompt) == (2, 10)
    assert "kept 2 of 4 prompts; dropped 2 longer than 5 tokens" in caplog.text
    with pytest.raises(DataError, match=r"a.jsonl:2: the prompt has 9 tokens, the limit is 5"):
        PromptDataset(plain(path), tokenizer, max_prompt_len=5, overlong="error")
    with pytest.raises(DataError, match="all 4 prompts are longer than 2 tokens .the longest has 10.*max_prompt_len"):
        PromptDataset(plain(path), tokenizer, max_prompt_len=2)
    with pytest.raises(ConfigError, match="data.overlong"):
        PromptDataset(plain(path), tokenizer, overlong="cut")


def test_token_outside_of_the_vocabulary(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"train.jsonl:\d+: token id \d+ is outside the model's vocabulary of 64"):
        PromptDataset(DataConfig(), tokenizer, vocab_size=64)


def test_a_missing_tokenizer_folder_is_named_without_asking_the_hub(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"tokenizer {tmp_path}/none .*model.path.*: no such folder"):
        load_tokenizer(f"{tmp_path}/none")


def test_duplicates(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "a", "label": 1}, {"prompt": "a", "label": 2}, {"prompt": "a", "label": 1}]
    path = write(tmp_path / "a.jsonl", rows)
    data = PromptDataset(plain(path), tokenizer)
    assert (len(data), data.counts.dropped_duplicate) == (2, 1)
    assert len(PromptDataset(plain(path), tokenizer, duplicates="keep")) == 3
    with pytest.raises(DataError, match=r"a.jsonl:3: repeats .*a.jsonl:1"):
        PromptDataset(plain(path), tokenizer, duplicates="error")


# ---------------------------------------------------------------------- order


def test_order_depends_on_seed_and_step_only(tokenizer: Any) -> None:
    data = PromptDataset(DataConfig(), tokenizer, seed=3)
    first = [data.batch(step, 7) for step in range(42)]
    again = PromptDataset(DataConfig(), tokenizer, seed=3)
    assert again.batch(41, 7) == first[41]  # a resumed run starts here
    assert again.batch(2, 7) == first[2]
    n = len(data)
    stream = [p.index for p in data.take(0, 3 * n)]
    epochs = [stream[i * n : (i + 1) * n] for i in range(3)]
    assert all(sorted(e) == list(range(n)) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    steps = 3 * n // 7
    assert [p.index for batch in first[:steps] for p in batch] == stream[: steps * 7]
    other = PromptDataset(DataConfig(), tokenizer, seed=4)
    assert [p.index for p in other.take(0, n)] != epochs[0]
    fixed = PromptDataset(replace(DataConfig(), shuffle=False), tokenizer, seed=3)
    assert [p.index for p in fixed.take(0, 5)] == [0, 1, 2, 3, 4]
    assert data.epoch_of(0, 7) == 0 and data.epoch_of(n, 7) == 7


def test_order_is_pinned() -> None:
    """A change of the generator would break every resumed run."""
    assert epoch_order(10, seed=0, epoch=0).tolist() == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]
    assert epoch_order(10, seed=0, epoch=1).tolist() == [7, 4, 5, 1, 9, 8, 6, 2, 0, 3]
    assert np.array_equal(np.sort(epoch_order(1000, seed=9, epoch=7)), np.arange(1000))


def test_identity_is_the_content_that_the_run_sees(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "1", "label": "a"}, {"prompt": "12", "label": "b"}]

    def identity(name: str, content: list[Any]) -> str:
        return PromptDataset(plain(write(tmp_path / name, content)), tokenizer).info()["sha256"]

    first = identity("a.jsonl", rows)
    assert len(first) == 64 and identity("b.jsonl", rows) == first
    for other in (rows[::-1], rows[:1], [rows[0], {**rows[1], "label": "c"}], [rows[0], {**rows[1], "prompt": "13"}]):
        assert identity("c.jsonl", other) != first
