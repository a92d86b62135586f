// Matrix products C[m, n] = reduction over r of A(m, r) * B(r, n) in a fixed order: linear forward and backward.
//
// The order is a list of leaves; a leaf is one accumulator that takes its runs of r ascending with fma from +0.0, and
// the leaves of an output merge in the balanced tree. dot16 is the case of 16 leaves a segment with step 16; the axpy
// form is one leaf with step 1. Tiles, threads and the shape of the rest of the call cannot change the order.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/primitives.h"

namespace rlk {

struct Run {
  int64_t start, step, count;
};

// Leaves in tree order. runs[first[l] .. first[l + 1]) belong to leaf l.
struct Order {
  std::vector<Run> runs;
  std::vector<int> first{0};
  std::vector<char> plus_zero;  // the leaf ends with fma(+0, +0, acc): its last step lies in the padding of dot16
  int64_t steps = 0;            // over all leaves: rows of a packed panel

  void run(int64_t start, int64_t step, int64_t count) {
    runs.push_back({start, step, count});
    steps += count;
  }
  void end_leaf(bool padded = false) {
    first.push_back(int(runs.size()));
    plus_zero.push_back(padded);
  }
  int leaves() const { return int(plus_zero.size()); }
};

// K in `segments` equal parts, dot16 in each.
inline Order dot16_order(int64_t k, int64_t segments) {
  Order order;
  int64_t length = k / segments;
  for (int64_t s = 0; s < segments; ++s) {
    for (int64_t lane = 0; lane < 16; ++lane) {
      order.run(s * length + lane, 16, (length - lane + 15) / 16);
      order.end_leaf(length % 16 > 0 && lane >= length % 16);
    }
  }
  return order;
}

// n rows; leaf s takes slice s of each of `parts` equal parts, in order.
inline Order ascending_order(int64_t n, int64_t segments, int64_t parts) {
  Order order;
  int64_t part = n / parts, slice = part / segments;
  for (int64_t s = 0; s < segments; ++s) {
    for (int64_t p = 0; p < parts; ++p) order.run(p * part + s * slice, 1, slice);
    order.end_leaf();
  }
  return order;
}

constexpr int kTileM = 6, kTileN = 16;
constexpr int kMaxLevels = 8;  // 16 lanes x 8 segments = 128 leaves

// One tile of MR x 16 outputs. `a` points at A(m0, 0); `panel` is packed in the order of traversal, 16 columns a row.
template <int MR>
inline void tile(const float* a, int64_t stride_m, int64_t stride_r, const float* panel, const Order& order, float* out) {
  alignas(32) float stack[kMaxLevels][MR * kTileN];
  const int leaves = order.leaves();
  int run = 0;
  for (int leaf = 0; leaf < leaves; ++leaf) {
    V8 acc[MR][2];
#pragma GCC unroll 6
    for (int i = 0; i < MR; ++i) acc[i][0] = acc[i][1] = zero8();
    for (; run < order.first[leaf + 1]; ++run) {
      const Run& r = order.runs[run];
      const float* p = a + r.start * stride_r;
      const int64_t step = r.step * stride_r;
      for (int64_t k = 0; k < r.count; ++k, p += step, panel += kTileN) {
        V8 b0 = load8(panel), b1 = load8(panel + 8);
#pragma GCC unroll 6
        for (int i = 0; i < MR; ++i) {
          V8 x = splat(p[i * stride_m]);
          acc[i][0] = fma(x, b0, acc[i][0]);
          acc[i][1] = fma(x, b1, acc[i][1]);
        }
      }
    }
    if (order.plus_zero[leaf]) {
      for (int i = 0; i < MR; ++i) acc[i][0] = acc[i][0] + zero8(), acc[i][1] = acc[i][1] + zero8();
    }
    // Binary counter: equal subtrees merge as soon as both exist.
    int level = 0;
    for (int bits = leaf; bits & 1; bits >>= 1, ++level) {
      const float* left = stack[level];
#pragma GCC unroll 6
      for (int i = 0; i < MR; ++i) {
        acc[i][0] = load8(left + i * kTileN) + acc[i][0];
        acc[i][1] = load8(left + i * kTileN + 8) + acc[i][1];
      }
    }
    float* to = leaf + 1 == leaves ? out : stack[level];
#pragma GCC unroll 6
    for (int i = 0; i < MR; ++i) {
      store8(to + i * kTileN, acc[i][0]);
      store8(to + i * kTileN + 8, acc[i][1]);
    }
  }
}

inline void any_tile(int rows, const float* a, int64_t stride_m, int64_t stride_r, const float* panel, const Order& order,
                     float* out) {
  switch (rows) {
    case 6: return tile<6>(a, stride_m, stride_r, panel, order, out);
    case 5: return tile<5>(a, stride_m, stride_r, panel, order, out);
    case 4: return tile<4>(a, stride_m, stride_r, panel, order, out);
    case 3: return tile<3>(a, stride_m, stride_r, panel, order, out);
    case 2: return tile<2>(a, stride_m, stride_r, panel, order, out);
    default: return tile<1>(a, stride_m, stride_r, panel, order, out);
  }
}

// C [M, N] = A B with pack(n0, columns, panel) writing the panel of columns n0.. in the order of traversal. Tile i of A
// (kTileM rows) starts at a + i * stride_tile, by default at its rows' own place in a plain matrix.
template <class Out, class Pack>
void gemm(const float* a, int64_t stride_m, int64_t stride_r, int64_t m, int64_t n, const Order& order, Out* c,
          const Pack& pack, int64_t stride_tile = 0) {
  if (stride_tile == 0) stride_tile = kTileM * stride_m;
  if (m == 0 || n == 0) return;
  const int64_t panels = (n + kTileN - 1) / kTileN;
  const int64_t chunk = 192;  // rows of A that stay in the cache while a panel is used; a multiple of kTileM
  const int64_t chunks = (m + chunk - 1) / chunk;
  const double cost = 2.0 * double(order.steps + 16) * double(std::min(m, chunk)) * kTileN / 16.0;
  parallel_for(panels * chunks, cost, [&](int64_t begin, int64_t end) {
    std::vector<float> panel(size_t(order.steps) * kTileN);
    alignas(32) float out[kTileM * kTileN];
    int64_t packed = -1;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t n0 = item / chunks * kTileN, first = item % chunks * chunk, last = std::min(m, first + chunk);
      const int columns = int(std::min<int64_t>(kTileN, n - n0));
      if (packed != n0) pack(n0, columns, panel.data());
      packed = n0;
      for (int64_t m0 = first; m0 < last; m0 += kTileM) {
        const int rows = int(std::min<int64_t>(kTileM, last - m0));
        any_tile(rows, a + m0 / kTileM * stride_tile, stride_m, stride_r, panel.data(), order, out);
        for (int i = 0; i < rows; ++i) {
          Out* to = c + (m0 + i) * n + n0;
          if (columns == kTileN) {
            store8(to, load8(out + i * kTileN));
            store8(to + 8, load8(out + i * kTileN + 8));
          } else {
            for (int j = 0; j < columns; ++j) to[j] = from_float<Out>(out[i * kTileN + j]);
          }
        }
      }
    }
  });
}

// fp32 view of a matrix: the tensor itself, or a converted copy that `keep` owns.
inline const float* as_fp32(const Tensor& t, Tensor* keep) {
  if (t.scalar_type() == ScalarType::Float) return data<float>(t);
  *keep = torch::stable::new_empty(t, t.sizes(), ScalarType::Float);
  const bf16* in = data<bf16>(t);
  float* out = data<float>(*keep);
  parallel_for(t.numel(), 1, [=](int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + 8 <= end; i += 8) store8(out + i, load8(in + i));
    for (; i < end; ++i) out[i] = to_float(in[i]);
  });
  return out;
}

}  // namespace rlk
