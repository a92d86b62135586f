r"""Find the final answer in a response: ``\boxed{...}`` or the ``Answer: ...`` line that DAPO's prompts ask for.

Plain string scanning in linear time; nothing here can hang on a hostile response.
"""

from __future__ import annotations

import re

MAX_ANSWER_CHARS = 512  # longer "answers" are no answers, and would only feed the parser
_ANSWER_LINE = re.compile(r"(?i)answer[ \t]*[:：]")
_BOXED = ("\\boxed", "\\fbox")
_EMPHASIS = "*_` \t"


def _boxed(text: str) -> tuple[int, str] | None:
    """Position and content of the last complete box; ``\\boxed 5`` counts too."""
    end = len(text)
    while True:
        start, command = max((text.rfind(c, 0, end), c) for c in _BOXED)
        if start < 0:
            return None
        rest = start + len(command)
        while rest < len(text) and text[rest] == " ":
            rest += 1
        if rest < len(text) and text[rest] == "{":
            depth = 0
            for i in range(rest, min(len(text), rest + MAX_ANSWER_CHARS + 2)):
                if text[i] == "{" and text[i - 1] != "\\":
                    depth += 1
                elif text[i] == "}" and text[i - 1] != "\\":
                    depth -= 1
                    if depth == 0:
                        return start, text[rest + 1 : i]
        elif rest > start + len(command) and (word := text[rest:].split(maxsplit=1)):
            return start, word[0].rstrip("$.,")
        end = start  # unbalanced: look for an earlier one


def _answer_line(text: str) -> tuple[int, str] | None:
    found = None
    for match in _ANSWER_LINE.finditer(text):
        found = match
    if found is None:
        return None
    line = text[found.end() :].split("\n", 1)[0]
    return found.start(), line


def _clean(answer: str) -> str:
    answer = answer.strip().strip(_EMPHASIS)
    while answer.endswith((".", "。")):
        answer = answer[:-1].rstrip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inner = answer[len(opening) : -len(closing)]
        if len(answer) > len(opening) + len(closing) and answer.startswith(opening) and answer.endswith(closing):
            answer = inner.strip()
            break
    return answer.strip(_EMPHASIS).rstrip(".").strip()


def extract_answer(response: str) -> str | None:
    r"""The final answer of ``response``, or None.

    Only the text after the last ``</think>`` counts. Of the last ``\boxed{}`` and the last ``Answer:`` line the later
    one wins; a box on an answer line is that line's answer. Dollar signs, emphasis and a full stop are removed.
    """
    text = response.rsplit("</think>", 1)[-1]
    candidates = [c for c in (_boxed(text), _answer_line(text)) if c is not None]
    if not candidates:
        return None
    answer = max(candidates)[1]
    inner = _boxed(answer)
    cleaned = _clean(answer if inner is None else inner[1])
    return cleaned if 0 < len(cleaned) <= MAX_ANSWER_CHARS else None


def normalize(answer: str) -> str:
    """A form in which trivially equal answers are equal strings (a shortcut; math-verify decides the rest)."""
    text = _clean(answer).replace(" ", "").replace("\\!", "").replace("\\,", "")
    text = text.replace("dfrac", "frac").replace("tfrac", "frac")
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+", text):
        text = text.replace(",", "")
    return text.removeprefix("+")
