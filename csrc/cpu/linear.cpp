// y = x W^T, dX = dY W and dW = dY^T X in the orders of the contract (see rl_kernel/ops/linear/reference.py).
#include "cpu/gemm.h"

namespace rlk {
namespace {

RLK_INLINE void transpose8(V8 r[8]) {
  __m256 t[8], u[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i].v, r[2 * i + 1].v);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i].v, r[2 * i + 1].v);
  }
  for (int i = 0; i < 2; ++i) {
    u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i].v = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    r[i + 4].v = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

// Rows n0.. of W [N, K] as a panel: step i of lane j of segment s holds W[n0 .. n0+15, s*length + 16 i + j].
template <class T>
void pack_rows(const T* w, int64_t k, int64_t segments, int64_t n0, int columns, float* panel) {
  const int64_t length = k / segments;
  for (int64_t s = 0; s < segments; ++s, panel += length * kTileN) {
    const T* base = w + n0 * k + s * length;
    auto row_of = [&](int64_t lane, int64_t i) {  // lanes below length % 16 have one step more
      const int64_t full = length / 16, extra = length % 16;
      return panel + (lane * full + std::min(lane, extra) + i) * kTileN;
    };
    int64_t k0 = 0;
    if (columns == kTileN) {
      for (; k0 + 16 <= length; k0 += 16) {
        for (int half = 0; half < 4; ++half) {
          const int kk = (half >> 1) * 8, nn = (half & 1) * 8;  // both halves of a cache line in turn
          V8 r[8];
          for (int i = 0; i < 8; ++i) r[i] = load8(base + (nn + i) * k + k0 + kk);
          transpose8(r);
          for (int i = 0; i < 8; ++i) store8(row_of(kk + i, k0 / 16) + nn, r[i]);
        }
      }
    }
    for (; k0 < length; ++k0) {
      float* to = row_of(k0 % 16, k0 / 16);
      for (int i = 0; i < kTileN; ++i) to[i] = i < columns ? to_float(base[i * k + k0]) : 0.0f;
    }
  }
}

// Few rows of x: no packing, dots along W's own rows, four at a time. The same bits as the tile: dot16 in each segment,
// tree over the segments.
template <class X, class T, class Out>
void few_rows(const X* x, const T* w, int64_t m, int64_t n, int64_t k, int64_t segments, Out* y) {
  const int64_t length = k / segments;
  parallel_for((n + 3) / 4, double(k) * double(m), [=](int64_t begin, int64_t end) {
    for (int64_t j = begin * 4; j < std::min(n, end * 4); j += 4) {
      const int64_t count = std::min<int64_t>(4, n - j);
      for (int64_t i = 0; i < m; ++i) {
        __m128 part[8];
        for (int64_t s = 0; s < segments; ++s) {
          const T* rows[4];
          for (int64_t r = 0; r < 4; ++r) rows[r] = w + (j + std::min(r, count - 1)) * k + s * length;
          part[s] = dots4(x + i * k + s * length, rows, length);
        }
        for (int64_t width = segments; width > 1; width /= 2) {
          for (int64_t s = 0; s < width / 2; ++s) part[s] = _mm_add_ps(part[2 * s], part[2 * s + 1]);
        }
        float out[4];
        _mm_storeu_ps(out, part[0]);
        for (int64_t r = 0; r < count; ++r) y[i * n + j + r] = from_float<Out>(out[r]);
      }
    }
  });
}

ScalarType output_type(std::optional<ScalarType> asked, const Tensor& like) { return asked.value_or(like.scalar_type()); }

// x [M, K], weight [N, K] -> [M, N]
Tensor linear_forward(const Tensor& x_, const Tensor& weight_, int64_t segments, std::optional<ScalarType> out_dtype) {
  Tensor x = dense(x_), weight = dense(weight_);
  const int64_t m = x.size(0), k = x.size(1), n = weight.size(0);
  STD_TORCH_CHECK(weight.size(1) == k, "linear: x has K=", k, " and weight has K=", weight.size(1));
  STD_TORCH_CHECK(segments >= 1 && segments <= 8 && (segments & (segments - 1)) == 0 && k % segments == 0,
                  "linear: segments=", segments, " must be 1, 2, 4 or 8 and divide K=", k);
  Tensor y = torch::stable::new_empty(x, {m, n}, output_type(out_dtype, x));
  dispatch(weight.scalar_type(), "linear weight", [&](auto wt) {
    using W = decltype(wt);
    dispatch(y.scalar_type(), "linear output", [&](auto ot) {
      using Out = decltype(ot);
      const W* w = data<W>(weight);
      if (m <= (sizeof(W) == 4 ? 8 : 6)) {  // speed only: both paths give the same bits
        dispatch(x.scalar_type(), "linear x", [&](auto xt) {
          using X = decltype(xt);
          few_rows(data<X>(x), w, m, n, k, segments, data<Out>(y));
        });
        return;
      }
      Tensor keep;
      gemm(as_fp32(x, &keep), k, 1, m, n, dot16_order(k, segments), data<Out>(y),
           [=](int64_t n0, int columns, float* panel) { pack_rows(w, k, segments, n0, columns, panel); });
    });
  });
  return y;
}

// Columns n0.. of B [R, N] in the order of traversal.
template <class T>
void pack_columns(const T* b, int64_t n, const Order& order, int64_t n0, int columns, float* panel) {
  for (const Run& run : order.runs) {
    for (int64_t i = 0; i < run.count; ++i, panel += kTileN) {
      const T* row = b + (run.start + i * run.step) * n + n0;
      if (columns == kTileN) {
        store8(panel, load8(row));
        store8(panel + 8, load8(row + 8));
      } else {
        for (int j = 0; j < kTileN; ++j) panel[j] = j < columns ? to_float(row[j]) : 0.0f;
      }
    }
  }
}

void gemm_columns(const float* a, int64_t stride_m, int64_t stride_r, int64_t stride_tile, int64_t m, const Tensor& b,
                  const Order& order, const Tensor& out) {
  const int64_t n = b.size(1);
  dispatch(b.scalar_type(), "linear", [&](auto bt) {
    using B = decltype(bt);
    dispatch(out.scalar_type(), "linear gradient", [&](auto ot) {
      using Out = decltype(ot);
      const B* pb = data<B>(b);
      gemm(
          a, stride_m, stride_r, m, n, order, data<Out>(out),
          [&order, pb, n](int64_t n0, int columns, float* panel) { pack_columns(pb, n, order, n0, columns, panel); },
          stride_tile);
    });
  });
}

// dy [M, N], weight [N, K] -> dx [M, K]; N in `segments` leaves, each the same slice of every one of `parts` parts
Tensor linear_dgrad(const Tensor& dy_, const Tensor& weight_, int64_t segments, int64_t parts,
                    std::optional<ScalarType> out_dtype) {
  Tensor dy = dense(dy_), weight = dense(weight_);
  const int64_t m = dy.size(0), n = dy.size(1), k = weight.size(1);
  STD_TORCH_CHECK(weight.size(0) == n, "linear: dY has N=", n, " and weight has N=", weight.size(0));
  STD_TORCH_CHECK(
      segments >= 1 && segments <= 8 && (segments & (segments - 1)) == 0 && parts >= 1 && n % (segments * parts) == 0,
      "linear: grad_segments=", segments, " must be 1, 2, 4 or 8, and times parts=", parts, " divide N=", n);
  Tensor dx = torch::stable::new_empty(dy, {m, k}, output_type(out_dtype, dy));
  Tensor keep;
  gemm_columns(as_fp32(dy, &keep), n, 1, 0, m, weight, ascending_order(n, segments, parts), dx);
  return dx;
}

// dy [T, N] as [tile][T][kTileM] fp32: a tile of the transposed matrix is then read from one place to the next.
Tensor pack_tiles(const Tensor& dy) {
  const int64_t t = dy.size(0), n = dy.size(1), tiles = (n + kTileM - 1) / kTileM;
  Tensor out = torch::stable::new_empty(dy, {tiles * t * kTileM}, ScalarType::Float);
  float* to = data<float>(out);
  dispatch(dy.scalar_type(), "linear gradient", [&](auto dt) {
    using T = decltype(dt);
    const T* from = data<T>(dy);
    parallel_for(t, double(n) / 2, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        int64_t tile = 0;
        for (; tile * kTileM + 8 <= n; ++tile) {
          const V8 x = load8(from + i * n + tile * kTileM);
          float* row = to + (tile * t + i) * kTileM;
          _mm_storeu_ps(row, _mm256_castps256_ps128(x.v));
          _mm_storel_pi(reinterpret_cast<__m64*>(row + 4), _mm256_extractf128_ps(x.v, 1));
        }
        for (; tile < tiles; ++tile) {
          for (int64_t j = 0; j < kTileM; ++j) {
            const int64_t column = tile * kTileM + j;
            to[(tile * t + i) * kTileM + j] = column < n ? to_float(from[i * n + column]) : 0.0f;
          }
        }
      }
    });
  });
  return out;
}

// dy [T, N], x [T, K] -> dw [N, K]
Tensor linear_wgrad(const Tensor& dy_, const Tensor& x_, std::optional<ScalarType> out_dtype) {
  Tensor dy = dense(dy_), x = dense(x_);
  const int64_t t = dy.size(0), n = dy.size(1), k = x.size(1);
  STD_TORCH_CHECK(x.size(0) == t, "linear: dY has ", t, " tokens and x has ", x.size(0));
  Tensor dw = torch::stable::new_empty(x, {n, k}, output_type(out_dtype, x));
  Tensor tiles = pack_tiles(dy);
  gemm_columns(data<float>(tiles), 1, kTileM, t * kTileM, n, x, ascending_order(t, 1, 1), dw);
  return dw;
}

}  // namespace
}  // namespace rlk

STABLE_TORCH_LIBRARY_IMPL(rlk, CPU, m) {
  m.impl("linear_forward", TORCH_BOX(&rlk::linear_forward));
  m.impl("linear_dgrad", TORCH_BOX(&rlk::linear_dgrad));
  m.impl("linear_wgrad", TORCH_BOX(&rlk::linear_wgrad));
}
