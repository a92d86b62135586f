"""A process of ``bench_linear_logp.py``: one implementation, measured when it is asked.

A request is a line of JSON on standard input, the answer a line on standard output; the end of the input ends the
process. Whatever a peer prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peers import IGNORE, PEERS, Call, Peer

Tensors = tuple[torch.Tensor, ...]
Reading = dict[str, Any]

# On an H200 at 700 W a stream of products that begins after a rest runs at 1600 to 1700 MHz for 26 to 45 ms; then the
# power limit takes the clock down, to 1370 MHz within 30 ms more. A figure must not mix the two.
STRETCH = 25.0  # ms from the first call after a rest: what ends later may have seen the step
ENOUGH = 6  # timed calls within stretches of a turn: no more stretches follow
HOT = 1.2  # an estimate of a call's time comes from whatever clock the card then has, and may be this much too long
GROUP = 5.0  # ms between the events of sustained calls


def counts(ms: float) -> tuple[int, int]:
    """Warm-up and timed calls of a stretch: one more than fit, for an estimate that is too long."""
    calls = math.ceil(STRETCH / ms)
    return (3, min(calls - 3, 12)) if calls >= 12 else (1, max(calls - 1, 2))


def sensor(device: str) -> Callable[[], Reading] | None:
    """Reads clock, power and what limits the clock through NVML; None where that cannot be had."""
    if device != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")  # new and old
        reasons = next(getattr(pynvml, name) for name in names if hasattr(pynvml, name))
    except Exception:  # noqa: BLE001 - no figure depends on it
        return None

    def read() -> Reading:
        reading: Reading = {}
        for name, get in (
            ("mhz", lambda: pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM)),
            ("watts", lambda: pynvml.nvmlDeviceGetPowerUsage(card) / 1e3),
            ("reasons", lambda: hex(reasons(card))),
        ):
            with contextlib.suppress(Exception):
                reading[name] = get()
        return reading

    return read


class _Mark:
    """A CUDA event where there is no GPU: shows that the script works, times nothing of worth."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: _Mark) -> float:
        return (end.at - self.at) * 1e3


class Card:
    """The clock and the allocator of a device."""

    def __init__(self, device: str) -> None:
        self.device, self.cuda, self.sensor = device, device == "cuda", sensor(device)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def rest(self, seconds: float) -> None:
        self.wait()
        time.sleep(seconds)

    def mark(self) -> Any:
        mark = torch.cuda.Event(enable_timing=True) if self.cuda else _Mark()
        mark.record()
        return mark

    def reading(self) -> list[Reading]:
        return [self.sensor()] if self.sensor else []

    def queue(self, call: Callable[[], object], counts: Sequence[int], latency: bool) -> tuple[Any, list[Any]]:
        """Marks before the warm-up calls, and before and after each timed one."""
        first, marks = self.mark(), []
        for _ in range(counts[0]):
            call()
        if latency:
            self.wait()
        for _ in range(counts[1]):
            start = self.mark()
            call()
            marks.append((start, self.mark()))
            if latency:
                self.wait()
        return first, marks

    def times(self, call: Callable[[], object], counts: Sequence[int], latency: bool) -> list[float]:
        """Milliseconds of each timed call. ``latency``: waits for the GPU after each."""
        _, marks = self.queue(call, counts, latency)
        self.wait()
        return [round(start.elapsed_time(end), 4) for start, end in marks]

    def queued(
        self, call: Callable[[], object], rest: float, stretches: int
    ) -> tuple[list[float], bool, list[Reading]]:
        """Milliseconds of calls that ended before the clock's step and True, or of those after and False."""
        ms = min(self.times(call, (1, 2), False))  # also puts memory into the allocator
        early, late, readings = list[float](), list[float](), list[Reading]()
        for _ in range(stretches):
            self.rest(rest)
            first, marks = self.queue(call, counts(ms), False)
            readings += self.reading()
            self.wait()
            for start, end in marks:
                times = early if first.elapsed_time(end) <= STRETCH else late
                times.append(round(start.elapsed_time(end), 4))
            if len(early) >= ENOUGH or (not early and 2 * ms > HOT * STRETCH):
                break
        return early or late, bool(early), readings

    def sustained(
        self, call: Callable[[], object], ms: float, seconds: Sequence[float]
    ) -> tuple[list[float], list[Reading]]:
        """Milliseconds a call, each the mean of a few, after as many calls as bring the card to its lasting clock.

        ``ms``: what a call takes at least; ``seconds``: before and while it is timed.
        """
        before, timed = (math.ceil(1e3 * x / ms) for x in seconds)
        size = max(1, int(GROUP / ms))
        for _ in range(before):
            call()
        marks = [self.mark()]
        for _ in range(max(math.ceil(timed / size), 3)):
            for _ in range(size):
                call()
            marks.append(self.mark())
        readings = self.reading()  # the CPU is ahead: the last calls still run
        self.wait()
        return [round(start.elapsed_time(end) / size, 4) for start, end in zip(marks, marks[1:])], readings

    def peak_mib(self, call: Callable[[], object]) -> float:
        """Memory above what was allocated before, results included."""
        if not self.cuda:
            call()
            return 0.0
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        self.wait()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        del result
        return round(peak, 1)

    def clear(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


def inputs(shape: Sequence[int], device: str) -> Tensors:
    """Peaked softmax like a trained model's: one token a row is lifted by 10 to 20, mostly the target."""
    tokens, hidden, vocabulary = shape
    g = torch.Generator(device=device).manual_seed(0)
    w = torch.empty(vocabulary, hidden, device=device, dtype=torch.bfloat16).normal_(0, 0.02, generator=g)
    top = torch.randint(0, vocabulary, (tokens,), device=device, generator=g)
    other = torch.randint(0, vocabulary, (tokens,), device=device, generator=g)
    t = torch.where(torch.rand(tokens, device=device, generator=g) < 0.95, top, other)
    row = w[top].float()
    lift = torch.empty(tokens, 1, device=device).uniform_(10, 20, generator=g)
    h = torch.randn(tokens, hidden, device=device, generator=g) + lift * row / row.pow(2).sum(-1, keepdim=True)
    return h.bfloat16(), w, t, torch.randn(tokens, device=device, generator=g)


def without_gradients(call: Call, h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> Callable[[], torch.Tensor]:
    h, w = h.detach(), w.detach()  # some look at requires_grad alone

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return call(h, w, t)

    return forward


@dataclass(frozen=True)
class Variant:
    """Calls on the operands of a shape."""

    forward: Callable[[], object] | None  # None: it has none of its own
    both: Callable[[], Tensors]  # forward and backward -> (losses [T] or their mean, dH, dW)
    operations: int  # 6 or 8 THV in ``both``
    logp: bool = False  # log-probabilities come instead of losses


def of_peer(peer: Peer, call: Call, h: torch.Tensor, w: torch.Tensor, t: torch.Tensor, g: torch.Tensor) -> Variant:
    if short := -h.shape[0] % peer.multiple:
        h = torch.nn.functional.pad(h.detach(), (0, 0, 0, short)).requires_grad_()
        t, g = torch.nn.functional.pad(t, (0, short), value=IGNORE), torch.nn.functional.pad(g, (0, short))
    upstream = None if peer.mean else -g if peer.logp else g

    def both() -> Tensors:
        out = call(h, w, t)
        return (out, *torch.autograd.grad(out, (h, w), None if upstream is None else upstream.to(out.dtype)))

    return Variant(without_gradients(call, h, w, t), both, peer.operations, peer.logp)


def of_ours(name: str, h: torch.Tensor, w: torch.Tensor, t: torch.Tensor, g: torch.Tensor) -> Variant:
    from rl_kernel.ops.linear_logp import linear_logp, sm90
    from rl_kernel.ops.linear_logp.policy import linear_policy_loss

    def bound(mib: int) -> None:
        sm90.WORKSPACE_BYTES = mib << 20

    upstream = -g

    def scheduled(mib: int) -> Callable[[], Tensors]:
        def both() -> Tensors:
            bound(mib)
            logp = linear_logp(h, w, t).logp
            return (logp, *torch.autograd.grad(logp, (h, w), upstream))

        return both

    def forward(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        bound(8192)
        return linear_logp(h, w, t).logp

    bound(8192)
    with torch.no_grad():  # as after the rollout: no ratio is clipped, no row's gradient zero (which takes less power)
        old = linear_logp(h, w, t).logp

    def fused() -> Tensors:
        bound(512)
        loss, logp, _ = linear_policy_loss(h, w, t, old, g)
        return (logp, *torch.autograd.grad(loss, (h, w)))

    if name == "kept":
        return Variant(without_gradients(forward, h, w, t), scheduled(8192), 6, True)
    if name == "fused policy loss, 512 MiB":
        return Variant(None, fused, 6, True)
    tokens = h.shape[0]  # 512 MiB would keep all logits of few tokens
    return Variant(None, scheduled(512 if tokens > 4000 else 128 if tokens > 1000 else 64), 8, True)


OURS = ("kept", "fused policy loss, 512 MiB", "recompute")


class Bench:
    def __init__(self, key: str, device: str) -> None:
        self.key, self.card = key, Card(device)
        self.shape: list[int] = []
        self.data: Tensors = ()
        self.variants: dict[str, Variant] = {}
        self.call: Call | None = None
        if key in PEERS:
            self.call = PEERS[key].load()

    def at(self, shape: list[int]) -> None:
        """Operands of a shape, instead of those before."""
        if shape != self.shape:
            self.variants.clear()
            self.data = ()
            self.card.clear()
            gc.freeze()  # imports and compiled code: going through them takes tenths of a second, many times in a run
            self.data, self.shape = inputs(shape, self.card.device), shape
            self.data[0].requires_grad_(), self.data[1].requires_grad_()
            self.card.wait()

    def variant(self, name: str) -> Variant:
        if name not in self.variants:
            if self.call is None:
                self.variants[name] = of_ours(name, *self.data)
            else:
                self.variants[name] = of_peer(PEERS[self.key], self.call, *self.data)
        return self.variants[name]

    def names(self) -> tuple[str, ...]:
        return OURS if self.call is None else (PEERS[self.key].name,)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "shape" in request:
            self.at(request["shape"])
        return getattr(self, "do_" + request["do"])(request)

    def do_start(self, request: dict[str, Any]) -> dict[str, Any]:
        return {}

    def do_inputs(self, request: dict[str, Any]) -> dict[str, Any]:
        self.card.clear()
        return {}

    def do_warm(self, request: dict[str, Any]) -> dict[str, Any]:
        """Compiles what the measurements will launch."""
        for name in self.names():
            variant = self.variant(name)
            for call in (variant.forward, variant.both):
                if call:
                    call()
            self.card.wait()
            self.card.clear()
        return {}

    def do_measure(self, request: dict[str, Any]) -> dict[str, Any]:
        """Times of the parts and methods asked for; where ``check`` is, what the results are, and the peak memory."""
        variant, answer = self.variant(request["variant"]), dict[str, Any]()
        self.card.clear()
        began = time.monotonic()
        if request["check"]:
            answer |= self.found(variant.both(), -1.0 if variant.logp else 1.0)
            answer["peak_mib"] = self.card.peak_mib(variant.both)
            answer["operations"] = variant.operations
            if not answer["finite"]:
                return answer
        spent = {"check": time.monotonic() - began}
        answer |= self.timed({"both": variant.both, "forward": variant.forward}, request, spent) | {"spent": spent}
        self.card.clear()
        return answer

    def timed(
        self,
        parts: Mapping[str, Callable[[], object] | None],
        request: dict[str, Any],
        spent: dict[str, float],
    ) -> dict[str, Any]:
        """Lists of milliseconds by part and method, with ``_cold`` and ``_card`` (readings); fills ``spent``."""
        answer = dict[str, Any]()
        for method in request["methods"]:
            began = time.monotonic()
            for part in request["parts"]:
                name, call = f"{part}_{method}", parts[part]
                if call is None:
                    continue
                if method == "queued":
                    times, cold, readings = self.card.queued(call, request["rest"], request["stretches"])
                    answer |= {name: times, f"{name}_cold": cold, f"{name}_card": readings}
                elif method == "latency":
                    self.card.rest(request["rest"])
                    answer[name] = self.card.times(call, request["counts"], True)
                else:
                    least = max(min(answer[f"{part}_queued"]), 1e-3)
                    times, readings = self.card.sustained(call, least, request["sustained"])
                    answer |= {name: times, f"{name}_card": readings}
            spent[method] = time.monotonic() - began
        return answer

    def found(self, results: Tensors, sign: float = 1.0) -> dict[str, Any]:
        """Mean loss over the tokens of the shape, and norms of the gradients, by which all are compared."""
        losses, dh, dw = results
        loss = losses.detach().float().reshape(-1)[: self.shape[0]].mean() * sign
        norms = [torch.linalg.vector_norm(x, dtype=torch.float32) for x in (dh, dw)]
        values = [float(x) for x in (loss, *norms)]
        finite = all(x == x and abs(x) != float("inf") for x in values)
        return {"finite": finite, "loss": values[0], "norms": values[1:]}

    def do_reference(self, request: dict[str, Any]) -> dict[str, Any]:
        """What torch eager finds, with the gradients that come in and with those of the mean loss."""
        h, w, t, g = self.data
        losses = PEERS["eager"].load()(h, w, t)
        answer = {}
        for name, upstream in (("token", g), ("mean", torch.full_like(g, 1 / g.shape[0]))):
            dh, dw = torch.autograd.grad(losses, (h, w), upstream, retain_graph=True)
            answer[name] = self.found((losses, dh, dw))
            del dh, dw
        del losses
        self.card.clear()
        return answer

    def do_library(self, request: dict[str, Any]) -> dict[str, Any]:
        """The product that gives logits, and the three of forward and backward, nothing else."""
        h, w = (x.detach() for x in self.data[:2])
        x = torch.empty(h.shape[0], w.shape[0], device=h.device, dtype=h.dtype)
        dh, dw = torch.empty_like(h), torch.empty_like(w)

        def forward() -> None:
            torch.mm(h, w.t(), out=x)

        def both() -> None:
            forward()
            torch.mm(x, w, out=dh)
            torch.mm(x.t(), h, out=dw)

        both()
        methods = [method for method in request["methods"] if method != "latency"]
        return self.timed({"both": both, "forward": forward}, request | {"methods": methods}, {})

    def do_burst(self, request: dict[str, Any]) -> dict[str, Any]:
        """Milliseconds of an n x n x n product."""
        n = request["n"]
        a, b = (torch.randn(n, n, device=self.card.device).bfloat16() for _ in range(2))
        return {"ms": self.card.times(lambda: torch.mm(a, b), (3, 12), True)}

    def do_backend(self, request: dict[str, Any]) -> dict[str, Any]:
        from rl_kernel import registry

        return {"backend": registry.resolve("linear_logp", torch.device(self.card.device), torch.bfloat16).backend}


def failed(error: BaseException) -> dict[str, Any]:
    reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return {"status": "oom", "reason": reason}
    return {"status": "blocked" if isinstance(error, ImportError) else "failure", "reason": reason}


def serve(key: str, device: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    bench: Bench | None = None
    for line in sys.stdin:
        lost = False
        try:
            bench = bench or Bench(key, device)
            answer = bench.answer(json.loads(line))
        except Exception as error:  # noqa: BLE001 - any failure of a peer is a finding
            import traceback

            traceback.print_exc()
            answer = failed(error)
            lost = "CUDA error" in str(error)  # the context is gone, and every later call would fail with it
        if "status" in answer and bench and not lost:
            bench.variants.clear()
            bench.card.clear()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if lost:
            os._exit(1)
