"""A process that decides whether two mathematical expressions are equal, for :class:`recipes.reward.math.MathReward`.

One JSON pair ``[answer, candidate]`` a line on standard input; one of ``{"equal": bool}`` or ``{"error": "..."}`` a
line on standard output; ``{"ready": true}`` first. It has no time limit of its own: the parent kills it.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys

MEMORY_BYTES = 4 << 30  # a power tower may ask for all memory before the time limit strikes


def main() -> None:
    """Serve until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # stray prints must not look like answers
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    def send(message: dict[str, object]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    send({"ready": True})
    for line in sys.stdin:
        answer, candidate = json.loads(line)
        try:
            gold = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
            guess = parse(f"\\boxed{{{candidate}}}", parsing_timeout=None)
            send({"equal": bool(gold) and bool(guess) and bool(verify(gold, guess, timeout_seconds=None))})
        except (Exception, RecursionError) as error:  # noqa: BLE001 - whatever the parser raises is a wrong answer
            send({"error": f"{type(error).__name__}: {error}"[:200]})


if __name__ == "__main__":
    main()
