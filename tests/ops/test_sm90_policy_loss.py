"""The fused policy loss on Hopper: bytes of its gradients, error of its sums, and what it launches."""

from __future__ import annotations

import pytest
import torch

from rl_kernel.errors import ContractError
from rl_kernel.ops.linear_logp import linear_logp, sm90_schedules
from rl_kernel.ops.linear_logp.policy import linear_policy_loss
from tests.ops.gpu_harness import differing
from tests.ops.sm90_harness import SHAPES, assert_same, need_hopper, operands

need_hopper()

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("chunk", [None, 256])
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_loss_equals_linear_logp_and_autograd(shape, chunk, monkeypatch):
    if chunk:
        monkeypatch.setattr(sm90_schedules, "_chunk_rows", lambda call, tokens, width: min(tokens, chunk))
    h, w, t = operands(*shape)
    t[5:9] = -100
    g = torch.Generator(device="cuda").manual_seed(1)
    old, advantages = -torch.rand(len(t), device="cuda", generator=g), torch.randn(len(t), device="cuda", generator=g)
    old[6] = float("nan")  # nothing reads what belongs to an ignored token
    arguments = {"entropy_weight": 0.01, "normalizer": 64.0, "global_vocab_size": shape[3]}
    results = []
    for backend in ("sm90", "triton"):
        hidden, weight = h.clone().requires_grad_(), w.clone().requires_grad_()
        loss, values, metrics = linear_policy_loss(hidden, weight, t, old, advantages, backend=backend, **arguments)
        loss.backward()
        results.append([values, hidden.grad, weight.grad])
        assert metrics["tokens"] == len(t) - 4
    assert_same(*results)


def batch(tokens, seed=2):
    """Old log-probabilities, advantages and weights, with NaN beside the ignored rows 5 to 8."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    old, advantages, mask = (torch.randn(tokens, device="cuda", generator=g) for _ in range(3))
    old[6] = advantages[7] = mask[8] = float("nan")
    return old - 3, advantages, mask.abs()


def result(h, w, t, old, advantages, **arguments):
    """(logp, dH, dW), then sums by name: the loss and the metrics."""
    hidden, weight = h.clone().requires_grad_(), w.clone().requires_grad_()
    loss, values, metrics = linear_policy_loss(hidden, weight, t, old, advantages, backend="sm90", **arguments)
    loss.backward()
    return [values, hidden.grad, weight.grad], {"loss": loss.detach(), **metrics}


NORMALIZERS = ["none", "number", "tensor"]


def divided_by(normalizer):
    return {"none": None, "number": 37.7, "tensor": torch.tensor(37.7, device="cuda")}[normalizer]


def exact_sums(h, w, t, old, advantages, mask, by, entropy_weight):
    """The loss and the metrics from float64 sums, and the error of an fp32 sum in whatever order: T 2^-24 sum |x|."""
    with torch.no_grad():
        out = linear_logp(h, w, t, global_vocab_size=SHAPES[0][3])
    mask = torch.ones_like(old) if mask is None else mask
    by = mask.masked_fill(t == -100, 0.0).sum() if by is None else torch.as_tensor(by, device=old.device)
    rows = torch.stack([out.logp, out.lse, out.entropy])
    values = by_torch(rows, t, old, advantages, mask, by, (0.8, 1.2), entropy_weight)[0].double()
    return values.sum(1).tolist(), (len(t) * 2**-24 * values.abs().sum(1)).tolist()


@pytest.mark.parametrize("entropy_weight", [0.0, 0.01])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_token_loss_in_one_kernel_equals_torch(normalizer, masked, entropy_weight, monkeypatch):
    h, w, t = operands(*SHAPES[0])
    t[5:9] = -100
    old, advantages, mask = batch(len(t))
    arguments = {
        "mask": mask if masked else None, "normalizer": divided_by(normalizer), "entropy_weight": entropy_weight,
        "global_vocab_size": SHAPES[0][3],
    }  # fmt: skip
    found, sums = result(h, w, t, old, advantages, **arguments)
    again, same = result(h, w, t, old, advantages, **arguments)
    assert_same([*found, *sums.values()], [*again, *same.values()])
    monkeypatch.setenv("RLK_SM90_TOKEN_LOSS", "0")
    expected, right = result(h, w, t, old, advantages, **arguments)
    assert_same(found, expected)
    # In another order: each is as far from the exact sum of the same values as T roundings of it may lead.
    exact, bound = exact_sums(
        h, w, t, old, advantages, mask if masked else None, divided_by(normalizer), entropy_weight
    )
    for i, name in enumerate(("loss", "tokens", "clipped", "ratio", "k1_kl", "entropy")):
        assert max(abs(float(x[name]) - exact[i]) - bound[i] for x in (sums, right)) <= 0, name
    monkeypatch.delenv("RLK_SM90_TOKEN_LOSS")
    wrong, _ = result(h, w, t, old, advantages * 1.01, **arguments)
    assert [differing(a, b) > 0 for a, b in zip(wrong, found, strict=True)] == [False, True, True]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_number_of_rows_divides(share, monkeypatch):
    """Without mask and normalizer the sum of the weights is counted, not summed: the same value."""
    h, w, t = operands(*SHAPES[0])
    g = torch.Generator(device="cuda").manual_seed(5)
    t = torch.where(torch.rand(len(t), device="cuda", generator=g) < share, -100, t)
    old, advantages, _ = batch(len(t))
    old, advantages = old.nan_to_num(), advantages.nan_to_num()
    common = {"global_vocab_size": SHAPES[0][3], "entropy_weight": 0.01}
    count = (t != -100).sum().float()
    found, sums = result(h, w, t, old, advantages, **common)
    assert sums["tokens"] == count and bool(sums["loss"] == 0) == (share == 1.0)
    for more in ({"normalizer": count}, {"mask": torch.ones(len(t), device="cuda")}):
        assert_same(result(h, w, t, old, advantages, **more, **common)[0], found)
    nothing, sums = result(h, w, t, old, advantages, mask=torch.zeros(len(t), device="cuda"), **common)
    assert sums["loss"] == 0 and not any(x.count_nonzero() for x in nothing[1:])
    wrong, _ = result(h, w, t, old, advantages, normalizer=count + 1, **common)
    assert share == 1.0 or all(differing(a, b) for a, b in zip(wrong[1:], found[1:], strict=True))
    monkeypatch.setattr(sm90_schedules, "_COUNTED", 0)  # as with too many rows to count in fp32
    assert_same(result(h, w, t, old, advantages, **common)[0], found)


def by_torch(out, t, old, a, mask, by, clip, entropy_weight):
    """Values of tokens that are summed [6, T], the loss first, and the gradients: the torch code of policy.py."""
    leaves = out[0].clone().requires_grad_(), out[2].clone().requires_grad_()
    ignored = t == -100
    w, a = mask.masked_fill(ignored, 0.0), a.masked_fill(ignored, 0.0)
    difference = (leaves[0] - old).masked_fill(ignored, 0.0)
    ratio = torch.exp(difference)
    plain, clipped = ratio * a, ratio.clamp(*clip) * a
    objective = torch.minimum(plain, clipped)
    if entropy_weight:
        objective = objective + entropy_weight * leaves[1]
    values = [w * -objective / by, w, w * (clipped < plain), w * ratio, -(w * difference), w * leaves[1]]
    grads = torch.autograd.grad(values[0].sum(), leaves, allow_unused=True)
    return torch.stack([x.detach() for x in values]), grads


@pytest.mark.parametrize("tokens", [1, 31, 33, 255, 796, 1820, 4096, 4097, 9001, 70000])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.013])
def test_sums_of_tokens(tokens, entropy_weight):
    """Gradients have torch's bytes; errors of the sums against float64 are at most four times those of torch's sums."""
    clip, errors = (0.8, 1.28), []
    for seed in range(24):
        g = torch.Generator(device="cuda").manual_seed(seed)
        out = torch.randn(5, tokens, device="cuda", generator=g)
        old, advantages = out[0] + 0.3 * out[3], torch.randn(tokens, device="cuda", generator=g)
        mask = torch.rand(tokens, device="cuda", generator=g)
        t = torch.where(torch.rand(tokens, device="cuda", generator=g) < 0.2, -100, 7)
        out = torch.where(t == -100, 0.0, out)
        ints = torch.zeros(64 + tokens, device="cuda", dtype=torch.int32)
        ints[0] = (t != -100).sum()
        by = torch.tensor(37.7, device="cuda")
        arguments = (out, ints, t, -100, old, advantages, mask, by, None, *clip, entropy_weight)
        value, by_logp, by_entropy, metrics = torch.ops.rlk.sm90_token_loss(*arguments)
        again = torch.ops.rlk.sm90_token_loss(*arguments)
        assert_same([value, by_logp, by_entropy, metrics], again)
        values, grads = by_torch(out, t, old, advantages, mask, by, clip, entropy_weight)
        assert_same([by_logp], [grads[0]])
        active = t != -100  # nothing reads the others
        assert not entropy_weight or differing(by_entropy[active], grads[1][active]) == 0
        exact, eager = values.double().sum(1), torch.stack([x.sum() for x in values])
        own = torch.stack([value, *metrics])
        one_less = own.double() - values[:, -1].double()
        errors.append(torch.stack([(x.double() - exact).abs() for x in (own, eager, one_less)]))
    own, eager, one_less = torch.stack(errors).sum(0)
    assert bool((own <= 4 * eager).all()), (own, eager)
    assert bool((one_less > 4 * eager).all())


@pytest.mark.parametrize("sizes", [(0, 0), (0, 5), (5, 0), (8, 4095), (6147, 100003), (796 * 1024, 41 << 20)])
@pytest.mark.parametrize("factor", [1.0, 3.1, -0.37])
def test_scale_of_two_gradients(sizes, factor):
    g = torch.Generator(device="cuda").manual_seed(3)
    before = [torch.randn(n, device="cuda", generator=g).bfloat16() for n in sizes]
    after = [x.clone() for x in before]
    torch.ops.rlk.sm90_scale_(*after, torch.tensor(factor, device="cuda"))
    assert_same(after, [x * torch.tensor(factor, device="cuda").bfloat16() for x in before])
    assert [differing(a, b) > 0 for a, b in zip(after, before, strict=True)] == [n > 0 and factor != 1.0 for n in sizes]


@pytest.mark.parametrize("ignored", [False, True])
def test_weights_of_tokens(ignored):
    t = torch.arange(1003, device="cuda") % 9
    t = torch.where(t == 4, -100, t) if ignored else t
    mask = torch.randn(len(t), device="cuda")
    mask[4] = float("nan") if ignored else 1.0
    for weights in (mask, None):
        found = torch.ops.rlk.sm90_token_weights(t, -100, weights)
        plain = torch.ones_like(mask) if weights is None else mask
        assert_same([found], [plain.masked_fill(t == -100, 0.0)])
        assert (differing(found, plain) > 0) == ignored


def launched(call):
    """Names of the kernels, copies and fills of a call."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        call()
        torch.cuda.synchronize()
    return [event.name for event in record.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_kernels_of_a_call(normalizer, masked, monkeypatch):
    h, w, t = operands(*SHAPES[3])
    h, w = h.requires_grad_(), w.requires_grad_()
    old, advantages, mask = batch(len(t))
    arguments = {"mask": mask if masked else None, "normalizer": divided_by(normalizer), "backend": "sm90"}

    def forward():
        return linear_policy_loss(h, w, t, old, advantages, **arguments)[0]

    def both():
        return torch.autograd.grad(forward(), (h, w))

    def of_torch(names):
        return [name for name in names if "rlk::sm90" not in name]

    made, all_of_them = launched(forward), launched(both)
    if not all_of_them:
        pytest.skip("the profiler sees no kernels here")
    summed = masked and normalizer == "none"
    of_the_sum = 3 * summed  # a sum of weights, and 1 where that is 0
    assert len(of_torch(made)) == of_the_sum, made
    assert len(of_torch(all_of_them)) == of_the_sum + 1, all_of_them  # the gradient 1 of the loss, made by autograd
    for name, count in (("prepare", 1), ("merge", 1), ("token_losses", 1), ("token_weights", summed), ("scale", 1)):
        assert sum(f"{name}_kernel" in found for found in all_of_them) == count, all_of_them
    monkeypatch.setenv("RLK_SM90_TOKEN_LOSS", "0")
    assert len(of_torch(launched(both))) > 10


def test_second_backward_is_refused():
    """The first one gives the gradients away, of which there is one copy."""
    h, w, t = operands(*SHAPES[0])
    h, w = h.requires_grad_(), w.requires_grad_()
    t[5:9] = -100
    old, advantages, _ = batch(len(t))
    loss = linear_policy_loss(h, w, t, old, advantages, global_vocab_size=5003, backend="sm90")[0]
    first = torch.autograd.grad(loss, (h, w), retain_graph=True)
    kept = [x.clone() for x in first]
    with pytest.raises(ContractError, match="a second backward"):
        torch.autograd.grad(loss, (h, w))
    assert_same(first, kept)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_nothing_waits_for_the_gpu(normalizer, masked):
    h, w, t = operands(*SHAPES[3])
    h, w = h.requires_grad_(), w.requires_grad_()
    old, advantages, mask = batch(len(t))
    by = divided_by(normalizer)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = linear_policy_loss(h, w, t, old, advantages, mask=mask if masked else None, normalizer=by)[0]
        loss /= 2  # it has memory of its own
        torch.autograd.grad(loss, (h, w))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("tokens", [0, 2])
def test_policy_loss_of_few_tokens_and_without_gradients(tokens):
    h, w, t = operands(2, 128, 1000, 1000)
    arguments = (t[:tokens], -torch.ones(tokens, device="cuda"), torch.ones(tokens, device="cuda"))
    hidden, weight = h[:tokens].clone().requires_grad_(), w.clone().requires_grad_()
    loss, values, metrics = linear_policy_loss(hidden, weight, *arguments, normalizer=3.0)
    loss.backward()
    with torch.no_grad():
        alone, again, names = linear_policy_loss(hidden, weight, *arguments, normalizer=3.0)
    assert_same([loss, values], [alone, again])  # two values have one sum
    assert metrics.keys() == names.keys() and metrics["tokens"] == tokens and weight.grad.shape == w.shape
