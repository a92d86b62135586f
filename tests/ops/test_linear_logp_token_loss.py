"""The token loss of csrc/sm90/token_loss.h, built for this machine, against torch and its autograd: the same bits."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

SOURCES = Path(__file__).parents[2] / "csrc" / "sm90"
SHIM = """
#include "token_loss.h"
using namespace rlk::sm90;
extern "C" void run(int n, float low, float high, float entropy_weight, float by,
                    const float* difference, const float* ratio, const float* entropy,
                    const float* advantage, const float* weight, const unsigned char* ignored, float* out) {
  TokenLoss loss;
  loss.low = low, loss.high = high, loss.entropy_weight = entropy_weight, loss.with_entropy = entropy_weight != 0.0f;
  loss.by = by;
  for (int i = 0; i < n; ++i) {
    const TokenTerms t = token_terms(loss, difference[i], ratio[i], entropy[i], advantage[i], weight[i], ignored[i]);
    const float all[8] = {t.loss, t.weight, t.clipped, t.ratio, t.kl, t.entropy, t.by_logp, t.by_entropy};
    for (int k = 0; k < 8; ++k) out[k * n + i] = all[k];
  }
}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("token_loss")
    (folder / "shim.cpp").write_text(SHIM, encoding="utf-8")
    library = folder / "shim.so"
    flags = ["-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC", f"-I{SOURCES}"]
    subprocess.run([compiler, *flags, "-o", str(library), str(folder / "shim.cpp")], check=True, timeout=120)
    return ctypes.CDLL(str(library)).run


def inputs(tokens: int = 4096):
    g = torch.Generator().manual_seed(0)
    normal = lambda: torch.randn(tokens, generator=g)  # noqa: E731
    logp, old, advantages, entropy, weights = normal() - 2, normal() - 2, normal(), normal().abs(), normal().abs()
    old[:1500] = logp[:1500] + 0.1 * normal()[:1500]  # many ratios inside the clip
    old[:64] = logp[:64]  # ratio 1
    advantages[::7] = 0.0
    weights[::5], weights[1::5] = 0.0, 1.0
    old[100], advantages[101], old[102], old[103] = torch.nan, torch.nan, -200.0, 200.0
    ignored = torch.rand(tokens, generator=g) < 0.2
    ignored[98:104] = torch.tensor([False, True] * 3)
    old[ignored], entropy[ignored], logp[ignored] = torch.nan, 0.0, 0.0
    return logp, old, advantages, entropy, weights, ignored


@pytest.mark.parametrize("entropy_weight", [0.0, 0.013])
@pytest.mark.parametrize("scale", [37.7, 64.0])
@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.2, 0.28), (1.5, 3.0)])
def test_bits_of_torch(run, clip, scale, entropy_weight):
    logp, old, a, entropy, weights, ignored = inputs()
    low, high = 1.0 - clip[0], 1.0 + clip[1]
    # the torch code of policy.py; weights and advantages of ignored tokens are zero
    w, leaves = weights.masked_fill(ignored, 0.0), (logp.requires_grad_(), entropy.requires_grad_())
    a = a.masked_fill(ignored, 0.0)
    difference = (logp - old).masked_fill(ignored, 0.0)
    ratio = torch.exp(difference)
    plain, clipped = ratio * a, ratio.clamp(low, high) * a
    objective = torch.minimum(plain, clipped)
    if entropy_weight:
        objective = objective + entropy_weight * entropy
    term = (w * -objective / scale).masked_fill(ignored, 0.0)
    by_logp, by_entropy = torch.autograd.grad(term.sum(), leaves, allow_unused=True)
    expected = [term, w, w * (clipped < plain), w * ratio, -(w * difference), w * entropy, by_logp]
    expected += [by_entropy] if entropy_weight else []

    def found(ratio: torch.Tensor) -> torch.Tensor:
        arguments = [x.detach().contiguous() for x in (difference, ratio, entropy, a, w, ignored)]
        out = torch.empty(8, len(a))
        f = ctypes.c_float
        run(
            len(a), f(low), f(high), f(entropy_weight), f(scale),
            *(ctypes.c_void_p(x.data_ptr()) for x in (*arguments, out)),
        )  # fmt: skip
        return out

    def wrong(out: torch.Tensor) -> int:
        pairs = zip(out, expected, strict=False)
        return sum(
            int(((x.view(torch.int32) != y.detach().view(torch.int32)) & ~(x.isnan() & y.isnan())).sum())
            for x, y in pairs
        )

    assert wrong(found(ratio)) == 0
    assert wrong(found(torch.nextafter(ratio, ratio + 1))) > 0
