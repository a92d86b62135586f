"""The process that talks to W&B for :class:`recipes.metrics.wandb_logger.WandbLogger`.

One JSON object a line on standard input: first the options, then one row of metrics each, at last ``{"exit_code": n}``.
One JSON object on standard output: ``{"mode": "online"}``, or ``{"error": "..."}`` when W&B did not start. End of input
means that the run died; the W&B run is then closed as failed.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path
from typing import IO, Any

RUN_ID_FILE = "wandb-run-id"
_AXES = ("consistency/*", "reward/*", "loss/*", "train/*", "rollout/*", "kernel/*", "data/*", "time/*", "perf/*")


def _start(options: dict[str, Any]) -> Any:
    import wandb

    run_dir, mode = Path(options["run_dir"]), options["mode"]
    id_file = run_dir / RUN_ID_FILE
    if id_file.is_file():
        run_id = id_file.read_text().strip()
    else:
        run_id = secrets.token_hex(4)
        id_file.write_text(run_id + "\n")
    wanted = {
        "init_timeout": options["init_seconds"],
        "console": "off",
        "silent": True,
        "disable_git": True,
        "save_code": False,
        "x_disable_stats": True,
        "x_graphql_retry_max": 2,
        "x_graphql_timeout_seconds": 5,
    }
    # Names that start with x_ come and go between versions.
    settings = wandb.Settings(**{k: v for k, v in wanted.items() if k in wandb.Settings.model_fields})
    run = wandb.init(
        dir=str(run_dir),
        mode=mode,
        id=run_id,
        resume="allow" if mode == "online" else None,
        settings=settings,
        **options["init"],
    )
    run.define_metric("step")
    for pattern in _AXES:
        run.define_metric(pattern, step_metric="step")
    return run


def main(source: IO[str], answers: IO[str]) -> None:
    """Serve one run."""

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    options = json.loads(source.readline())
    try:
        run = _start(options)
    except BaseException as error:  # noqa: BLE001 - reported to the parent, whatever it is
        answer({"error": f"{type(error).__name__}: {error}"})
        return
    answer({"mode": options["mode"]})
    exit_code = 1
    for line in source:
        row = json.loads(line)
        if "exit_code" in row:
            exit_code = row["exit_code"]
            break
        if "summary" in row:
            run.summary.update(row["summary"])
        else:
            run.log(row)
    run.finish(exit_code=exit_code)


if __name__ == "__main__":
    # W&B prints as it likes; keep the answers apart from that.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(sys.stdin, channel)
