"""Writes ``train.jsonl`` and the tokenizer beside this file: ``python -m recipes.data.arithmetic.generate [FOLDER]``.

Deterministic: the same bytes every time, and a test compares them with the files in the repository.

Questions are products with a power of ten ("hundred times 4") and a few sums ("2 plus 3"). A policy of random weights
finds reward step by step: write digits, end the response, read the number, read the power of ten. Numbers stay below 6,
so that a policy that guesses is right often enough to learn from. Answers have 1 to 3 digits, so responses differ in
length. Most prompts are short; the others begin with one of two long system messages, which share more than a key-value
block of 32 tokens (only some, because a number is hard to find among sixty tokens).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

POWERS = {"one": 1, "ten": 10, "hundred": 100}
LARGEST = 5
SHORT = "You are a careful calculator. Answer with the digits of the number and nothing else."
LONG = SHORT + (
    " A number times ten ends with one zero more, a number times hundred ends with two. Add the numbers of a sum."
)
LONGEST = LONG + " Do not write words. Stop after the last digit."
BRIEF = ("You are careful.", "You write digits.", "You are a calculator.")

PAD, UNKNOWN, SYSTEM, USER, ASSISTANT, END = "<|pad|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (PAD, UNKNOWN, SYSTEM, USER, ASSISTANT, END)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{%- endif -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{%- if message['role'] == 'assistant' -%}{{ '<|end|>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


def products(*words: str) -> list[tuple[str, str]]:
    """(question, answer) for each power of ten in ``words`` and each number."""
    return [(f"{word} times {n}", str(POWERS[word] * n)) for word in words for n in range(1, LARGEST + 1)]


def sums() -> list[tuple[str, str]]:
    """(question, answer) for each pair of numbers whose sum is at most ``LARGEST``."""
    pairs = [(a, b) for a in range(1, LARGEST) for b in range(1, LARGEST) if a + b <= LARGEST]
    return [(f"{a} plus {b}", str(a + b)) for a, b in pairs]


def rows() -> list[dict[str, object]]:
    """The data set: chat messages, and the answer as text."""
    easy = products("one", "ten")
    groups: list[tuple[str | None, list[tuple[str, str]]]] = [(None, [*easy, *products("hundred"), *sums()])]
    groups += [(system, easy) for system in (*BRIEF, LONG, LONGEST)]
    out: list[dict[str, object]] = []
    for system, questions in groups:
        messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        for question, answer in questions:
            out.append({"prompt": [*messages, {"role": "user", "content": question}], "label": answer})
    return out


def vocabulary() -> list[str]:
    """Special tokens, printable ASCII, and the words of the set with the space before them. A digit is a token."""
    characters = ["\n", *(chr(c) for c in range(32, 127))]
    text = " ".join([LONGEST, *BRIEF, *POWERS, "times plus"])
    words = {w.strip(".,") for w in text.split()}
    words = {w for w in words if w.isalpha() and len(w) > 1}
    pieces = sorted({f" {w}" for w in words} | set(POWERS) | {"You"})
    return [*SPECIAL_TOKENS, *characters, *pieces]


def tokenizer_json() -> str:
    """A unigram tokenizer whose best segmentation takes the longest words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    pieces = vocabulary()
    # One word costs less than its letters, and words less than words cut differently: the score grows with the length.
    scored = [(piece, -10.0 if len(piece) == 1 else -10.0 - 0.01 / len(piece)) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=pieces.index(UNKNOWN), byte_fallback=False))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    return tokenizer.to_str(pretty=True) + "\n"


def tokenizer_config() -> str:
    """``tokenizer_config.json``."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return json.dumps(config, indent=2) + "\n"


def files() -> dict[str, str]:
    """Name and text of every file."""
    lines = [json.dumps(row, separators=(", ", ": ")) for row in rows()]
    return {
        "train.jsonl": "\n".join(lines) + "\n",
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": tokenizer_config(),
    }


def main() -> None:
    """Write the files."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (folder / name).write_text(text)
        print(f"{folder / name}: {len(text)} bytes")


if __name__ == "__main__":
    main()
