"""Rollout under pressure against the trainer, bit by bit: reports/rollout_pressure_<device>.{md,json}.

    python scripts/verify_rollout.py [--arms=strict,native] [--report=PATH] experiment=... [key=value ...]

One vLLM engine answers the same kind of requests in ways that production would: alone and in batches of 1 to 256,
arriving at random times, with prompts cut into chunks, with shared prefixes in the cache, with a cache too small for
all of them so that some are preempted, replayed in another order. Then a Megatron engine, in a process of its own and
with the same weights, computes every log-probability again in packs of its own making. Strict must differ nowhere,
neither from the trainer nor between two replays; ``consistency=native`` is the control and must differ.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pickle
import random
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from revision import revision

ROOT = Path(__file__).resolve().parents[1]
BATCHES = (1, 2, 3, 5, 8, 17, 32, 61, 100, 256)


def compose(overrides: list[str]) -> Any:
    """The run configuration of ``overrides``, as the entry point would build it."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    from recipes.config import build_config
    from recipes.main import CONFIGS  # registers the schema

    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return build_config(hydra_compose("train", overrides=overrides))


class Requests:
    """Prompts of random tokens; a third of them start with one of a few common prefixes."""

    def __init__(self, config: Any, seed: int) -> None:
        self.config, self.random = config, random.Random(seed)
        limit = config.rollout.max_prompt_len
        self.prefixes = [self.tokens(self.random.randint(limit // 4, limit // 2)) for _ in range(4)]

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.config.model.vocab_size) for _ in range(count)]

    def take(self, count: int) -> list[tuple[list[int], int, int]]:
        """(prompt, seed, response length) of ``count`` requests."""
        found = []
        for _ in range(count):
            prompt = self.tokens(self.random.randint(1, self.config.rollout.max_prompt_len // 2))
            if self.random.random() < 1 / 3:
                prompt = self.random.choice(self.prefixes) + prompt
            length = self.random.randint(1, self.config.rollout.max_response_len)
            found.append((prompt[: self.config.rollout.max_prompt_len], self.random.getrandbits(62), length))
        return found


def params_of(config: Any, length: int) -> Any:
    from recipes.engines.types import SamplingParams

    return SamplingParams(temperature=config.temperature, max_tokens=length, n=1, ignore_eos=True)


def arriving(engine: Any, config: Any, requests: list, generator: random.Random) -> list:
    """Responses to requests that arrive one by one while others are being answered."""
    core, waiting, done = engine._llm.llm_engine, list(enumerate(requests)), {}
    while waiting or core.has_unfinished_requests():
        for _ in range(min(len(waiting), generator.choice((0, 0, 0, 1, 2, 7)))):
            index, (prompt, seed, length) = waiting.pop(0)
            core.add_request(
                str(index), {"prompt_token_ids": prompt}, engine._vllm_params(params_of(config, length), seed)
            )
        if not core.has_unfinished_requests():
            continue
        for output in core.step():
            if output.finished:
                done[int(output.request_id)] = output
    return [engine._sample(done[index], index, 1) for index in range(len(requests))]


def batched(engine: Any, config: Any, requests: list) -> list:
    """Responses to requests of one batch: equal lengths are asked for together."""
    outputs = engine._llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _, _ in requests],
        [engine._vllm_params(params_of(config, length), seed) for _, seed, length in requests],
        use_tqdm=False,
    )
    return [engine._sample(output, index, 1) for index, output in enumerate(outputs)]


def rollout(config: Any, path: Path) -> None:
    """All scenarios on one engine, then again on one with a small cache; samples are pickled to ``path``."""
    import rl_kernel
    from recipes.engines.megatron_weights import hf_shapes, initial_reader
    from recipes.engines.vllm import VllmEngine

    source = Requests(config, config.trainer.seed)
    sets = {f"batch of {count}": source.take(count) for count in BATCHES}
    sets["random arrivals"] = source.take(96)
    found: dict[str, Any] = {}
    counters: dict[str, Any] = {}
    tight = replace(
        config.rollout,
        max_num_batched_tokens=max(config.rollout.max_num_seqs, 384),
        kv_cache_bytes=config.rollout.kv_cache_bytes // 8 if config.rollout.kv_cache_bytes else 0,
    )
    for name, settings in (("roomy", config.rollout), ("chunked, preempting", tight)):
        with VllmEngine(config.model, settings, config.consistency, seed=config.trainer.seed) as engine:
            read = initial_reader(config.model, config.trainer.seed, engine.device)  # as the trainer will
            weights = {name: read(name) for name in hf_shapes(config.model)}
            engine.update_weights(weights, 0)
            del weights
            with rl_kernel.set_mode(config.consistency.mode):
                if name == "roomy":
                    for key, requests in sets.items():
                        if key != "random arrivals":
                            found[key] = (requests, batched(engine, config, requests))
                    arrivals = sets["random arrivals"]
                    found["random arrivals"] = (arrivals, arriving(engine, config, arrivals, random.Random(1)))
                    shuffled = [r for key in ("batch of 17", "batch of 61", "random arrivals") for r in sets[key]]
                    random.Random(2).shuffle(shuffled)
                    found["replayed in another order"] = (shuffled, batched(engine, config, shuffled))
                else:
                    pressed = sets["batch of 256"] + sets["random arrivals"]
                    found["chunked, preempting"] = (pressed, batched(engine, config, pressed))
            info = engine.info()
            counters[name] = {k: info.get(k) for k in ("contract", "preemptions", "prefix_cache_hit_tokens")}
            counters[name]["backends"] = info.get("backends")
    path.write_bytes(pickle.dumps((found, counters)))


def replays(found: dict[str, Any]) -> tuple[int, int]:
    """(responses that were drawn twice, of these with another token or another bit)."""
    first: dict[Any, Any] = {}
    twice = differing = 0
    for requests, samples in found.values():
        for (prompt, seed, length), sample in zip(requests, samples, strict=True):
            key = (tuple(prompt), seed, length)
            if key not in first:
                first[key] = sample
                continue
            twice += 1
            before = first[key]
            same = before.response_ids == sample.response_ids
            differing += not (same and before.rollout_logp.tobytes() == sample.rollout_logp.tobytes())
    return twice, differing


def compare(config: Any, path: Path) -> dict[str, Any]:
    """Every log-probability again by the trainer; counts of differing fp32 bit patterns by scenario."""
    import numpy as np
    import torch

    from recipes.engines.megatron import MegatronEngine
    from recipes.engines.types import PackedBatch

    found, counters = pickle.loads(path.read_bytes())
    engine = MegatronEngine(
        config.model, config.train, config.consistency, role="reference", seed=config.trainer.seed, master_port=29641
    )
    rows = []
    generator = random.Random(3)
    for name, (_, samples) in found.items():
        order = list(range(len(samples)))
        generator.shuffle(order)
        packs: list[list[int]] = [[]]
        for index in order:
            if (
                sum(samples[i].num_tokens for i in packs[-1]) + samples[index].num_tokens
                > config.train.micro_batch_tokens
            ):
                packs.append([])
            packs[-1].append(index)
        tokens = differing = 0
        worst = 0.0
        for pack in filter(None, packs):
            batch = PackedBatch.from_samples([samples[i] for i in pack])
            logp = engine.forward_logp(batch, config.temperature).logp[batch.active].numpy()
            wanted = batch.rollout_logp[batch.active].numpy()
            differing += int((logp.view(np.int32) != wanted.view(np.int32)).sum())
            worst = max(worst, float(np.abs(logp - wanted).max(initial=0.0)))
            tokens += logp.size
        rows.append({"scenario": name, "responses": len(samples), "tokens": tokens, "mismatches": differing,
                     "max_abs_diff": worst})  # fmt: skip
    twice, moved = replays(found)
    contract = engine.info()["contract"]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    engine.shutdown()
    return {"device": device, "contract": contract, "rows": rows, "replayed": twice, "replays_differing": moved,
            "engine": counters}  # fmt: skip


def phase(name: str, path: Path, overrides: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, __file__, f"--phase={name}", f"--file={path}", *overrides],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return done.stdout


def markdown(arms: dict[str, Any], about: dict[str, str]) -> str:
    lines = ["# Rollout under pressure, compared with the trainer bit by bit", ""]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    for mode, arm in arms.items():
        lines += [
            "",
            f"## {mode}",
            "",
            "| scenario | responses | tokens | mismatches | max abs diff |",
            "|---|---|---|---|---|",
        ]
        for row in arm["rows"]:
            cells = [row["scenario"], row["responses"], f"{row['tokens']:,}", f"{row['mismatches']:,}"]
            lines.append("| " + " | ".join(map(str, [*cells, f"{row['max_abs_diff']:.3g}"])) + " |")
        lines += ["", f"{arm['replayed']} responses were drawn a second time in other company; "
                  f"{arm['replays_differing']} of them differ in a token or a bit.", ""]  # fmt: skip
        lines += [f"- {name}: {json.dumps(facts)}" for name, facts in arm["engine"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default="strict,native", help="values of consistency, one run each")
    report = ROOT / "reports/rollout_pressure"
    parser.add_argument("--report", type=Path, default=report, help="where it goes, without .md and .json")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for the entry point")
    # Of the processes that it starts:
    parser.add_argument("--phase", choices=["rollout", "compare"], help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    overrides = options.overrides
    sys.path.insert(0, str(ROOT))
    if options.phase is not None:
        config = compose(overrides)
        if options.phase == "rollout":
            rollout(config, options.file)
        else:
            print(json.dumps(compare(config, options.file)))
        return
    arms: dict[str, Any] = {}
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        for mode in options.arms.split(","):
            path = Path(folder) / f"{mode}.pickle"
            own = [*overrides, f"consistency={mode}"]
            phase("rollout", path, own)
            arms[mode] = json.loads(phase("compare", path, own).splitlines()[-1])
            print(mode, json.dumps(arms[mode]), flush=True)
    about = {
        "command": shlex.join(["python", *sys.argv]),
        "commit": revision(),
        "device": next(iter(arms.values()))["device"],
        "date": datetime.date.today().isoformat(),
        "seconds": f"{time.time() - started:.0f}",
    }
    options.report.with_suffix(".json").write_text(
        json.dumps({**about, "arms": arms}, indent=1) + "\n", encoding="utf-8"
    )
    options.report.with_suffix(".md").write_text(markdown(arms, about), encoding="utf-8")
    differing = {mode: sum(row["mismatches"] for row in arm["rows"]) for mode, arm in arms.items()}
    moved = "strict" in arms and arms["strict"]["replays_differing"]
    sys.exit(bool(differing.get("strict", 0) or moved or differing.get("native", 1) == 0))


if __name__ == "__main__":
    main()
