"""Transport of the collectives through memory that all GPUs of one machine can read (csrc/gpu/exchange.cuh).

Where a group's ranks sit on different GPUs of one machine, each call is one kernel: payloads go to the other ranks over
NVLink or xGMI and every rank adds them in the tree of the contract. Everywhere else the payloads are gathered by the
process group's backend (NCCL, RCCL, gloo) and summed locally. Both paths return the same bits, so the choice is one of
speed; :func:`report` says which was made and why.

The memory is torch's symmetric memory, without NVLink multicast. It is set up once for each group, by :func:`prepare`
or by the group's first call outside a graph capture. Calls can be captured in CUDA graphs and replayed.

Environment:
    RLK_COLLECTIVES: ``auto`` (default), ``peer`` (an error where it cannot be had), ``gather`` (never).
    RLK_COLLECTIVES_BUFFER_MIB: memory of one group on each GPU, 64 by default; larger payloads pass through in pieces.
    RLK_COLLECTIVES_TIMEOUT_S: a kernel that waits longer for another rank fails, 600 by default.

All ranks of a group need the same values. Ranks exchange them before anything else, so that a value that is wrong, or
another one, on one rank is an error of every rank instead of a rank that waits for one that is gone.
"""

from __future__ import annotations

import os
import socket
import warnings
import weakref
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl_kernel import platform
from rl_kernel.errors import ContractError, UnsupportedError

MAX_RANKS = 8
LANES = 64  # thread blocks of a large call
MAILBOX_ITEMS = 512  # of 8 bytes, a lane's part of a small payload
SLOTS = 3
_FLAG_BYTES = 128
WHOLE, SLICED, SCATTER, GATHER = range(4)  # exchange.h


@dataclass(frozen=True)
class Limits:
    """Bytes that a rank sends (payload times the other ranks) up to which a path is taken."""

    small: int = 256 << 10  # words beside their tag: one trip, twice the bytes
    whole: int = 2 << 20  # every rank reads all payloads: one round; beyond it each rank sums a slice


@dataclass(frozen=True)
class Layout:
    """Places in a symmetric buffer, in bytes."""

    lanes: int
    steps_offset: int  # this rank's own counters, in memory that no engine's sleep mode can discard
    mailbox_offset: int
    mailbox_items: int
    slots_offset: int
    slot_bytes: int
    result_offset: int


@dataclass(frozen=True)
class Plan:
    """One launch, the same on every rank, since it follows from the shapes. ``chunk`` 0: the path of small payloads."""

    mode: int
    lanes: int
    chunk: int
    threads: int

    @property
    def name(self) -> str:
        kind = ("all_reduce whole", "all_reduce sliced", "reduce_scatter", "all_gather")[self.mode]
        return f"{kind.split()[0]} small" if self.chunk == 0 else kind


def layout_of(ranks: int, buffer_bytes: int, lanes: int = LANES) -> Layout:
    """Cut a buffer of ``buffer_bytes`` for ``ranks`` ranks.

    Raises:
        ContractError: the buffer is too small for anything.
    """
    steps = lanes * _FLAG_BYTES
    mailbox = -(-(steps + 8 * lanes) // 128) * 128
    slots = mailbox + lanes * 2 * ranks * MAILBOX_ITEMS * 16
    chunk = (buffer_bytes - slots) // (lanes * SLOTS) // (4 * (ranks + 1)) // 16 * 16  # float32 values of a slice
    if chunk < 128:
        raise ContractError(
            f"RLK_COLLECTIVES_BUFFER_MIB={buffer_bytes / 2**20:g} is too small for {ranks} ranks; use at least 16"
        )
    return Layout(lanes, steps, mailbox, MAILBOX_ITEMS, slots, 4 * (ranks + 1) * chunk, 4 * ranks * chunk)


def plan(mode: int, numel: int, x_size: int, ranks: int, layout: Layout, limits: Limits) -> Plan:
    """The launch for ``numel`` elements: of x for WHOLE (either way of all_reduce) and GATHER, of one rank's share of x
    for SCATTER."""
    sent = numel * x_size * (ranks - 1)
    items = -(-numel * x_size // 8)
    if sent <= limits.small and items <= layout.lanes * layout.mailbox_items:
        share = -(-items // min(layout.lanes, -(-items // 256)))
        return Plan(mode, -(-items // share), 0, 512 if share > 256 else max(32, -(-share // 32) * 32))
    if mode == WHOLE and sent > limits.whole:
        mode = SLICED
    parts = ranks if mode in (SLICED, SCATTER) else 1
    slice_numel = -(-numel // ranks) if mode == SLICED else numel
    most = layout.result_offset // (parts * (4 if parts > 1 else x_size)) // 16 * 16
    lanes = min(layout.lanes, -(-slice_numel * parts * x_size // 8192))
    rounds = -(-slice_numel // (lanes * most))
    chunk = min(most, -(-slice_numel // (lanes * rounds) // 16) * 16)
    pieces = -(-numel // (chunk * (ranks if mode == SLICED else 1)))
    return Plan(mode, min(lanes, pieces), chunk, 512)


class Peers:
    """The symmetric buffers of one group, and its calls.

    Args:
        buffers: address of every rank's buffer in this process, in rank order; zeros before the first call.
        rank: this rank.
        buffer_bytes: size of each.
        device: this rank's GPU.
        limits, lanes, timeout_s: see above.
        steps: [lanes] int64 zeros on the GPU, made here by default.
        owner: kept alive with this object.

    All ranks make the same calls in the same order, as with every collective. Calls of one process may come from
    several streams: a call waits for the stream of the previous one. A captured graph is ordered by whoever replays it.
    """

    def __init__(
        self,
        buffers: list[int],
        rank: int,
        buffer_bytes: int,
        device: torch.device,
        *,
        limits: Limits | None = None,
        lanes: int = LANES,
        timeout_s: int = 600,
        steps: torch.Tensor | None = None,
        owner: object = None,
    ) -> None:
        self.rank, self.ranks, self.device = rank, len(buffers), device
        self._plans: dict[tuple[int, int, int], Plan] = {}
        self.limits = limits or Limits()
        self.layout = layout_of(self.ranks, buffer_bytes, lanes)
        self.calls: Counter[str] = Counter()
        self._buffers = torch.tensor(buffers, dtype=torch.int64, device="cpu")
        places = asdict(self.layout)
        del places["lanes"], places["steps_offset"]
        self._places = torch.tensor(list(places.values()), dtype=torch.int64, device="cpu")
        self._steps = torch.zeros(lanes, dtype=torch.int64, device=device) if steps is None else steps
        self._timeout_s, self._owner = timeout_s, owner
        self._raw_stream: int | None = None
        self._stream: torch.cuda.Stream | None = None
        self._launch = torch.ops.rlk.peer_exchange.default

    @property
    def limits(self) -> Limits:
        """Which path a call takes; the same on every rank."""
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._limits = limits
        self._plans.clear()

    def _run(self, mode: int, numel: int, x: torch.Tensor, out: torch.Tensor) -> None:
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        if raw != self._raw_stream and not torch.cuda.is_current_stream_capturing():
            stream = torch.cuda.current_stream(self.device)
            if self._stream is not None:
                stream.wait_stream(self._stream)
            self._raw_stream, self._stream = raw, stream
        size = x.element_size()
        chosen = self._plans.get((mode, numel, size))
        if chosen is None:
            chosen = self._plans[mode, numel, size] = plan(mode, numel, size, self.ranks, self.layout, self._limits)
        self.calls[chosen.name] += 1
        self._launch(
            x, out, self._steps, self._buffers, self._places,
            self.rank, chosen.mode, chosen.lanes, chosen.chunk, chosen.threads, self._timeout_s,
        )  # fmt: skip

    def all_reduce(self, x: torch.Tensor, out_dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
        """Tree sum of every rank's ``x``, rounded once; ``out`` may be given, contiguous."""
        x = x.contiguous()
        out = torch.empty(x.shape, dtype=out_dtype, device=x.device) if out is None else out
        if x.numel():
            self._run(WHOLE, x.numel(), x, out)
        return out

    def reduce_scatter(self, x: torch.Tensor, out_dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's rows of the tree sum of every rank's ``x`` [R * n, ...]."""
        x = x.contiguous()
        if out is None:
            out = torch.empty((x.shape[0] // self.ranks, *x.shape[1:]), dtype=out_dtype, device=x.device)
        if x.numel():
            self._run(SCATTER, x.numel() // self.ranks, x, out)
        return out

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[R, *x.shape] bytes of every rank's ``x``, any dtype."""
        x = x.contiguous()
        out = torch.empty((self.ranks, *x.shape), dtype=x.dtype, device=x.device) if out is None else out
        if x.numel():
            moved = x.view(-1).view(torch.uint8)
            self._run(GATHER, moved.numel(), moved, out.view(-1).view(torch.uint8))
        return out


@dataclass
class _Group:
    group: weakref.ReferenceType
    peers: Peers | None
    reason: str | None
    buffer_mib: float = 0.0
    gathered: Counter[str] = field(default_factory=Counter)


_known: dict[str, _Group] = {}
_met_in_capture: Counter[str] = Counter()


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdigit() or int(text) == 0:
        raise ContractError(f"{name}={text!r} must be a whole number above 0")
    return int(text)


def _choice() -> str:
    choice = os.environ.get("RLK_COLLECTIVES", "auto")
    if choice not in ("auto", "peer", "gather"):
        raise ContractError(f"RLK_COLLECTIVES={choice!r} must be auto, peer or gather")
    return choice


def _settings(ranks: int, max_bytes: int | None) -> dict[str, Any]:
    """What the environment and the caller of :func:`prepare` ask for, by name.

    Raises:
        ContractError: a value is wrong for a group of ``ranks`` ranks; names the variable.
    """
    choice, buffer_mib = _choice(), _number("RLK_COLLECTIVES_BUFFER_MIB", 64)
    if ranks <= MAX_RANKS:
        layout_of(ranks, buffer_mib << 20)
    return {
        "RLK_COLLECTIVES": choice,
        "RLK_COLLECTIVES_BUFFER_MIB": buffer_mib,
        "RLK_COLLECTIVES_TIMEOUT_S": _number("RLK_COLLECTIVES_TIMEOUT_S", 600),
        "max_bytes": max_bytes,
    }


def _require_same(answers: list[dict[str, Any] | str], names: list[str]) -> dict[str, Any]:
    """The settings of all ranks, where they are one; each rank computes this from the same answers.

    Args:
        answers: by rank, its :func:`_settings`, or what was wrong with them.
        names: of the ranks.

    Raises:
        ContractError: names the rank, the variable, the values and the fix.
    """
    found: list[dict[str, Any]] = []
    for name, answer in zip(names, answers, strict=True):
        if isinstance(answer, str):
            raise ContractError(f"{name}: {answer}. Correct or unset it there, and give every rank the same value")
        found.append(answer)
    for key in found[0]:
        values: dict[Any, list[str]] = {}
        for name, answer in zip(names, found, strict=True):
            values.setdefault(answer[key], []).append(name)
        if len(values) > 1:
            told = "; ".join(f"{value!r} on {', '.join(which)}" for value, which in values.items())
            raise ContractError(f"{key} differs within a process group: {told}. Give every rank the same value")
    return found[0]


def _unavailable(group: dist.ProcessGroup, device: torch.device, choice: str) -> str | None:
    """Why this process cannot take part, as far as it knows alone."""
    if choice == "gather":
        return "RLK_COLLECTIVES=gather"
    if group.size() > MAX_RANKS:
        return f"{group.size()} ranks; peer memory serves 2 to {MAX_RANKS}"
    family = platform.describe(device).family
    if family == "gfx942" and choice != "peer":
        return "not yet verified on gfx942; RLK_COLLECTIVES=peer tries it"
    if family not in ("sm90", "gfx942"):
        return f"{device} is neither sm90 nor gfx942"
    try:
        import rl_kernel._C_gpu  # noqa: F401 - registers torch.ops.rlk.peer_exchange
    except (ImportError, OSError) as error:
        return f"the GPU operators are not built ({error}); install with RLK_BUILD=cuda or rocm"
    if not hasattr(torch.ops.rlk, "peer_exchange"):
        return "the GPU operators are older than this package; build them again"
    try:
        import torch.distributed._symmetric_memory as symmetric

        backend = symmetric.get_backend(device)
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        return f"this torch has no symmetric memory ({error})"
    return None if backend in (None, "CUDA") else f"symmetric memory of this process is {backend}'s, not CUDA's"


def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _uuid(index: int) -> str:
    return str(getattr(torch.cuda.get_device_properties(index), "uuid", index))


def _disagreement(facts: list[dict[str, Any]], device: torch.device) -> str | None:
    """Why the ranks cannot use peer memory together; computed by each rank from the same facts."""
    for rank, fact in enumerate(facts):
        if fact["reason"]:
            return f"rank {rank}: {fact['reason']}"
    if len({fact["machine"] for fact in facts}) > 1:
        return "the ranks are on several machines"
    if len({fact["uuid"] for fact in facts}) < len(facts):
        return "two ranks share a GPU"
    visible = {_uuid(i): i for i in range(torch.cuda.device_count())}
    for rank, fact in enumerate(facts):  # a GPU that this process does not see can still be reached
        other = visible.get(fact["uuid"])
        if other is not None and other != device.index and not torch.cuda.can_device_access_peer(device.index, other):
            return f"no peer access from {device} to the GPU of rank {rank}"
    return None


@torch.inference_mode(False)  # engines call inside inference mode; the buffers outlive it
def _map(group: dist.ProcessGroup, device: torch.device, size: int, timeout_s: int) -> Peers:
    import torch.distributed._symmetric_memory as symmetric

    # Multicast objects are never needed here, and some machines must not create any.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    memory = symmetric.empty(size, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(memory, group)
    offset = memory.data_ptr() - handle.buffer_ptrs[handle.rank]
    if handle.rank != group.rank() or handle.world_size != group.size() or offset < 0:
        raise RuntimeError("symmetric memory numbers the ranks in another way than the group")
    memory.zero_()
    buffers = [address + offset for address in handle.buffer_ptrs]
    layout = layout_of(group.size(), size)
    return Peers(
        buffers,
        handle.rank,
        size,
        device,
        timeout_s=timeout_s,
        steps=memory[layout.steps_offset :][: 8 * layout.lanes].view(torch.int64),
        owner=(memory, handle),
    )


def plain(group: dist.ProcessGroup | None) -> Any:
    """``group``, or the present one inside a wrapper of it.

    vime's trainers destroy their process groups while the GPUs serve rollout and make them anew afterwards, behind a
    ``ProcessGroup`` that has no name of its own and keeps the one in use as ``group``.
    """
    inner = getattr(group, "__dict__", {}).get("group")
    return inner if isinstance(inner, dist.ProcessGroup) else group


def prepare(group: dist.ProcessGroup | None, max_bytes: int | None = None) -> bool:
    """Set up peer memory for ``group``; collective over it, once, before any capture. Engines call it where they start.

    Args:
        group: process group of 2 to 8 ranks on the GPUs of one machine; each rank's GPU is its current device.
        max_bytes: largest payload that the caller has in mind; the buffer is not made larger than it needs.

    Returns:
        Whether the group uses peer memory. If not, :func:`report` has the reason and calls gather through the group.

    Raises:
        UnsupportedError: ``RLK_COLLECTIVES=peer`` and peer memory cannot be had.
        ContractError: a variable is wrong, or differs between the ranks; on every rank, naming the one.
    """
    group = plain(group)
    if not torch.cuda.is_available() or group is None or group.size() == 1:
        return False
    known = _known.get(group.group_name)
    if known is not None and known.group() is group:
        return known.peers is not None
    if torch.cuda.is_current_stream_capturing():
        raise ContractError("collectives.prepare cannot run inside a graph capture; call it where the engine starts")
    device = torch.device("cuda", torch.cuda.current_device())
    ranks = group.size()

    def exchange(value: Any) -> list[Any]:
        values: list[Any] = [None] * ranks
        with torch.device("cpu"):  # engines build their layers under another default device
            dist.all_gather_object(values, value, group=group)
        return values

    def agreed(reason: str | None) -> str | None:
        """The first reason of any rank: all take the same path."""
        reasons = exchange(reason)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text), None)

    try:
        asked: dict[str, Any] | str = _settings(ranks, max_bytes)
    except ContractError as error:
        asked = str(error)
    names = [f"rank {dist.get_global_rank(group, rank)}" for rank in range(ranks)]
    if _known:
        torch.cuda.synchronize()  # no kernel of ours reads a peer's memory any more when the peers have our settings
    settings = _require_same(exchange(asked), names)
    for gone in [name for name, entry in _known.items() if entry.group() is None]:
        del _known[gone]  # with its memory
    choice, size = settings["RLK_COLLECTIVES"], settings["RLK_COLLECTIVES_BUFFER_MIB"] << 20
    if max_bytes is not None:
        size = min(size, max(16 << 20, 1 << (8 * max(1, max_bytes) - 1).bit_length()))
    facts = exchange(
        {"reason": _unavailable(group, device, choice), "machine": _machine(), "uuid": _uuid(device.index)}
    )
    peers = None
    reason = agreed(_disagreement(facts, device))
    if reason is None:
        failure = None
        try:
            peers = _map(group, device, size, settings["RLK_COLLECTIVES_TIMEOUT_S"])
            torch.cuda.synchronize(device)
        except Exception as error:  # noqa: BLE001 - whatever torch raises here, the other path works
            failure = f"setting up peer memory failed: {type(error).__name__}: {str(error).splitlines()[0]}"
        reason = agreed(failure)
        peers = peers if reason is None else None
    _known[group.group_name] = _Group(weakref.ref(group), peers, reason, size / 2**20)
    if reason is not None and group.rank() == 0 and choice == "auto":
        warnings.warn(f"collectives of group {group.group_name} gather through the group: {reason}", stacklevel=2)
    if peers is None and choice == "peer":
        raise UnsupportedError(f"RLK_COLLECTIVES=peer, but {reason}")
    return peers is not None


def of(group: dist.ProcessGroup, x: torch.Tensor, call: str) -> Peers | None:
    """The group's peer memory, set up at the first call outside a capture; ``None``: gather through the group."""
    if not x.is_cuda or group.size() == 1:
        return None
    known = _known.get(group.group_name)
    if known is None or known.group() is not group:
        if torch.cuda.is_current_stream_capturing():
            _met_in_capture[group.group_name] += 1
            return None
        with torch.cuda.device(x.device):
            prepare(group)
        known = _known[group.group_name]
    if known.peers is None or known.peers.device != x.device:
        known.gathered[call] += 1
        return None
    return known.peers


def report() -> dict[str, dict[str, Any]]:
    """By group name: path (``peer`` or ``gather``), why not ``peer``, buffer, and the calls by kernel.

    Captured calls count once. ``captured_unprepared`` are calls that were captured before the group was prepared: the
    graph gathers, with the same bits.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, known in _known.items():
        found[name] = {
            "path": "gather" if known.peers is None else "peer",
            "reason": known.reason,
            "ranks": None if known.peers is None else known.peers.ranks,
            "buffer_mib": 0.0 if known.peers is None else known.buffer_mib,
            "calls": dict(known.gathered if known.peers is None else known.peers.calls),
            "captured_unprepared": _met_in_capture[name],
        }
    for name, count in _met_in_capture.items():
        found.setdefault(name, {"path": "gather", "reason": "captured before it was prepared"})
        found[name]["captured_unprepared"] = count
    return found


def summary() -> str | None:
    """The transports of this process in a few words; ``None`` before a group on GPUs has been met."""
    used = sorted({"peer memory" if known.peers is not None else "gather" for known in _known.values()})
    return " and ".join(used) or None


def describe() -> list[str]:
    """:func:`report` as lines of text."""
    lines = []
    for name, known in report().items():
        why = f": {known['reason']}" if known["reason"] else ""
        lines.append(f"group {name}: {known['path']}{why}, calls {known.get('calls', {})}")
    return lines or ["no process group on GPUs has been met yet"]
