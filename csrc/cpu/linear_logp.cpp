// logp of hidden @ weight^T without the logits: forward statistics leaf by leaf, backward with the logits computed again.
// Specification: rl_kernel/ops/linear_logp/reference.py.
//
// Workspace: forward T*H floats (hidden in the order of dot16) and 128*H floats a thread; backward 2*T*H for two orders
// of hidden, T*H for each pending level of the segment tree (at most 1 + log2 of the segments), 2*C*H for a chunk of the
// weight and T*C for its dlogits, where C is 256 columns, or 128 when T*C would exceed 64 MiB. Nothing has T*V elements.
#include <algorithm>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/logp.h"

namespace rlk {
namespace {

constexpr int64_t kGroup = 384;        // tokens that share one packed leaf of the weight in forward
constexpr int64_t kBlock = 48;         // tokens of one backward work item
constexpr int64_t kSteps = 256;        // tokens of one pass of the weight gradient: its panel stays in the L1 cache
constexpr int64_t kColumns = 2 * kLeaf;
constexpr int64_t kDlogitsBytes = int64_t(64) << 20;

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

Tensor floats(const Tensor& like, int64_t count) { return torch::stable::new_empty(like, {count}, ScalarType::Float); }

// dot16 over H as the tile sees it: lane j of 16 is one leaf of round_up(H, 16) / 16 steps, padded with real zeros.
struct Lanes {
  int64_t width, steps;
  Order order;
  explicit Lanes(int64_t hidden) : width(hidden), steps((hidden + 15) / 16) {
    for (int64_t lane = 0; lane < 16; ++lane) {
      order.run(lane * steps, 1, steps);
      order.end_leaf();
    }
  }
  int64_t padded() const { return 16 * steps; }
};

// `rows` (at most N) rows of x [., H] as to[lane][step][N]; missing rows and columns are +0.0.
template <int N, class T>
void pack_lanes(const T* x, int64_t rows, const Lanes& lanes, float* to) {
  for (int64_t step = 0; step < lanes.steps; ++step) {
    for (int64_t lane = 0; lane < 16; ++lane) {
      float* out = to + (lane * lanes.steps + step) * N;
      const int64_t k = 16 * step + lane;
      for (int i = 0; i < N; ++i) out[i] = i < rows && k < lanes.width ? to_float(x[i * lanes.width + k]) : 0.0f;
    }
  }
}

// All of x [T, H] in tiles of kTileM rows.
template <class T>
Tensor pack_hidden(const Tensor& x, const Lanes& lanes) {
  const int64_t rows = x.size(0), tiles = (rows + kTileM - 1) / kTileM;
  Tensor out = floats(x, tiles * kTileM * lanes.padded());
  const T* from = data<T>(x);
  float* to = data<float>(out);
  parallel_for(tiles, double(kTileM * lanes.padded()), [&, from, to](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      pack_lanes<kTileM>(from + i * kTileM * lanes.width, std::min<int64_t>(kTileM, rows - i * kTileM), lanes,
                         to + i * kTileM * lanes.padded());
    }
  });
  return out;
}

// Logits of one tile of tokens: `panels` panels of 16 columns -> x [kTileM, stride].
void logits_tile(const float* hidden, int rows, const float* panels, int64_t count, const Lanes& lanes, float* x,
                 int64_t stride) {
  alignas(32) float out[kTileM * kTileN];
  for (int64_t p = 0; p < count; ++p) {
    any_tile(rows, hidden, 1, kTileM, panels + p * kTileN * lanes.padded(), lanes.order, out);
    for (int i = 0; i < rows; ++i) {
      store8(x + i * stride + p * kTileN, load8(out + i * kTileN));
      store8(x + i * stride + p * kTileN + 8, load8(out + i * kTileN + 8));
    }
  }
}

// ---- forward --------------------------------------------------------------------------------------------------------
template <class T>
void leaf_stats_of(const Tensor& hidden, const Tensor& weight, const float* temperature, const int64_t* target, int64_t columns,
                   float* stats, float* z_target) {
  const int64_t tokens = hidden.size(0), leaves = (columns + kLeaf - 1) / kLeaf, plane = tokens * leaves;
  const int64_t groups = (tokens + kGroup - 1) / kGroup;
  const Lanes lanes(hidden.size(1));
  const Tensor packed = pack_hidden<T>(hidden, lanes);
  const float* a = data<float>(packed);
  const T* w = data<T>(weight);
  std::fill(z_target, z_target + tokens, 0.0f);
  const double cost = double(std::min(tokens, kGroup)) * kLeaf * double(lanes.padded() + 64) / 8.0;
  parallel_for(leaves * groups, cost, [&, a, w](int64_t begin, int64_t end) {
    std::vector<float> panels(kLeaf * lanes.padded());
    alignas(32) float x[kTileM * kLeaf], z[kLeaf];
    int64_t present = -1;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t leaf = item / groups, first = leaf * kLeaf, count = std::min<int64_t>(kLeaf, columns - first);
      const int64_t used = (count + kTileN - 1) / kTileN;
      if (present != leaf) {
        for (int64_t p = 0; p < used; ++p) {
          pack_lanes<kTileN>(w + (first + p * kTileN) * lanes.width, std::min<int64_t>(kTileN, count - p * kTileN), lanes,
                             panels.data() + p * kTileN * lanes.padded());
        }
        present = leaf;
      }
      const int64_t last = std::min(tokens, (item % groups + 1) * kGroup);
      for (int64_t t0 = item % groups * kGroup; t0 < last; t0 += kTileM) {
        const int rows = int(std::min<int64_t>(kTileM, last - t0));
        logits_tile(a + t0 * lanes.padded(), rows, panels.data(), used, lanes, x, kLeaf);
        for (int64_t t = t0; t < t0 + rows; ++t) {
          divide_leaf(x + (t - t0) * kLeaf, int(count), temperature[t], z);
          if (target[t] >= first && target[t] < first + count) z_target[t] = z[target[t] - first];
          float* s = stats + t * leaves + leaf;
          leaf_stats(z, s, s + plane, s + 2 * plane);
        }
      }
    }
  });
}

// ---- backward -------------------------------------------------------------------------------------------------------
// c [MR, 16] += sum over r ascending of a(i, r) * panel[r]; the accumulators continue from c.
template <int MR>
void accumulate_tile(const float* a, int64_t stride_m, int64_t stride_r, const float* panel, int64_t count, float* c,
                     int64_t ldc) {
  V8 acc[MR][2];
#pragma GCC unroll 6
  for (int i = 0; i < MR; ++i) acc[i][0] = load8(c + i * ldc), acc[i][1] = load8(c + i * ldc + 8);
  for (int64_t r = 0; r < count; ++r, a += stride_r, panel += kTileN) {
    V8 b0 = load8(panel), b1 = load8(panel + 8);
#pragma GCC unroll 6
    for (int i = 0; i < MR; ++i) {
      V8 x = splat(a[i * stride_m]);
      acc[i][0] = fma(x, b0, acc[i][0]);
      acc[i][1] = fma(x, b1, acc[i][1]);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < MR; ++i) store8(c + i * ldc, acc[i][0]), store8(c + i * ldc + 8, acc[i][1]);
}

void accumulate(int rows, const float* a, int64_t stride_m, int64_t stride_r, const float* panel, int64_t count, float* c,
                int64_t ldc) {
  switch (rows) {
    case 6: return accumulate_tile<6>(a, stride_m, stride_r, panel, count, c, ldc);
    case 5: return accumulate_tile<5>(a, stride_m, stride_r, panel, count, c, ldc);
    case 4: return accumulate_tile<4>(a, stride_m, stride_r, panel, count, c, ldc);
    case 3: return accumulate_tile<3>(a, stride_m, stride_r, panel, count, c, ldc);
    case 2: return accumulate_tile<2>(a, stride_m, stride_r, panel, count, c, ldc);
    default: return accumulate_tile<1>(a, stride_m, stride_r, panel, count, c, ldc);
  }
}

// Rows of x [., H] as panels of 16 columns: to[panel][stride rows][16], +0.0 beyond H.
template <class T>
void pack_panels(const T* x, int64_t rows, int64_t width, int64_t stride, float* to) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < width; k += kTileN) {
      float* out = to + (k * stride) + r * kTileN;
      const int64_t n = std::min<int64_t>(kTileN, width - k);
      write(out, read(x + r * width + k, int(std::min<int64_t>(8, n))), 8);
      write(out + 8, n > 8 ? read(x + r * width + k + 8, int(n - 8)) : zero8(), 8);
    }
  }
}

template <class T>
struct Backward {
  int64_t tokens, width, padded_width, chunk, stride_d;
  Lanes lanes;
  const T *hidden, *weight;
  const float *temperature, *state, *grads;
  const int64_t* target;
  const float *hidden_lanes, *hidden_panels;  // the two orders of hidden
  float *weight_lanes, *weight_panels;        // the two orders of a chunk of the weight
  float* dlogits;                             // [T, stride_d]

  void pack_weight(int64_t first, int64_t count) const {
    const int64_t panels = (count + kTileN - 1) / kTileN;
    parallel_for(panels, 4.0 * kTileN * double(width), [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        const T* rows = weight + (first + p * kTileN) * width;
        const int64_t n = std::min<int64_t>(kTileN, count - p * kTileN);
        pack_lanes<kTileN>(rows, n, lanes, weight_lanes + p * kTileN * lanes.padded());
        pack_panels(rows, n, width, chunk, weight_panels + p * kTileN * kTileN);
      }
    });
  }

  // Logits and dlogits of `count` columns from `first` on, and dH += dlogits W where dh [T, padded_width] is wanted.
  void tokens_pass(int64_t first, int64_t count, float* dh) const {
    const int64_t panels = (count + kTileN - 1) / kTileN, blocks = (tokens + kBlock - 1) / kBlock;
    const double cost = double(std::min(tokens, kBlock)) * double(count) * double(2 * width + 64) / 8.0;
    parallel_for(blocks, cost, [&](int64_t begin, int64_t end) {
      alignas(32) float x[kTileM * kColumns];
      for (int64_t block = begin; block < end; ++block) {
        const int64_t t_begin = block * kBlock, t_end = std::min(tokens, t_begin + kBlock);
        for (int64_t t0 = t_begin; t0 < t_end; t0 += kTileM) {
          const int rows = int(std::min<int64_t>(kTileM, t_end - t0));
          logits_tile(hidden_lanes + t0 * lanes.padded(), rows, weight_lanes, panels, lanes, x, kColumns);
          for (int64_t t = t0; t < t0 + rows; ++t) {
            grad_row<T>(x + (t - t0) * kColumns, count, row_grad(temperature, state, grads, tokens, t), target[t] - first,
                        dlogits + t * stride_d);
          }
        }
        if (!dh) continue;
        for (int64_t k = 0; k < padded_width; k += kTileN) {
          for (int64_t t0 = t_begin; t0 < t_end; t0 += kTileM) {
            accumulate(int(std::min<int64_t>(kTileM, t_end - t0)), dlogits + t0 * stride_d, stride_d, 1,
                       weight_panels + k * chunk, count, dh + t0 * padded_width + k, padded_width);
          }
        }
      }
    });
  }

  // dW rows [first, first + count), complete: all tokens ascending.
  void weight_pass(int64_t first, int64_t count, T* dw) const {
    const int64_t panels = padded_width / kTileN, rows_each = 10 * kTileM;
    const int64_t parts = (count + rows_each - 1) / rows_each;
    parallel_for(panels * parts, double(tokens) * double(rows_each) * 2.0, [&](int64_t begin, int64_t end) {
      alignas(32) float c[10 * kTileM * kTileN];
      for (int64_t item = begin; item < end; ++item) {
        const int64_t k = item / parts * kTileN, v_begin = item % parts * rows_each;
        const int64_t v_end = std::min(count, v_begin + rows_each);
        std::fill(std::begin(c), std::end(c), 0.0f);
        for (int64_t t0 = 0; t0 < tokens; t0 += kSteps) {
          for (int64_t v = v_begin; v < v_end; v += kTileM) {
            accumulate(int(std::min<int64_t>(kTileM, v_end - v)), dlogits + t0 * stride_d + v, 1, stride_d,
                       hidden_panels + k * tokens + t0 * kTileN, std::min(kSteps, tokens - t0), c + (v - v_begin) * kTileN,
                       kTileN);
          }
        }
        const int64_t n = std::min<int64_t>(kTileN, width - k);
        for (int64_t v = v_begin; v < v_end; ++v) {
          const float* row = c + (v - v_begin) * kTileN;
          T* to = dw + (first + v) * width + k;
          write(to, load8(row), int(std::min<int64_t>(8, n)));
          if (n > 8) write(to + 8, load8(row + 8), int(n - 8));
        }
      }
    });
  }
};

void add_to(float* x, const float* left, int64_t count) {  // x = left + x
  parallel_for(count, 1.0, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) x[i] = left[i] + x[i];
  });
}

void clear(float* x, int64_t count) {
  parallel_for(count, 0.5, [=](int64_t begin, int64_t end) { std::fill(x + begin, x + end, 0.0f); });
}

template <class T>
void backward_of(const Tensor& hidden, const Tensor& weight, Backward<T> work, const int64_t* segments, int64_t count,
                 float* dh, T* dw) {
  const int64_t tokens = work.tokens, width = work.width, size = tokens * work.padded_width;
  work.chunk = tokens * kColumns * int64_t(sizeof(float)) > kDlogitsBytes ? kLeaf : kColumns;
  work.stride_d = work.chunk + 16;  // not a power of two: the rows of a tile fall into different cache sets
  const Tensor lanes = pack_hidden<T>(hidden, work.lanes);
  const Tensor weight_lanes = floats(hidden, work.chunk * work.lanes.padded());
  const Tensor weight_panels = floats(hidden, work.chunk * work.padded_width);
  const Tensor dlogits = floats(hidden, tokens * work.stride_d);
  const Tensor panels = floats(hidden, dw ? size : 0);
  work.hidden_lanes = data<float>(lanes);
  work.hidden_panels = data<float>(panels);
  work.weight_lanes = data<float>(weight_lanes);
  work.weight_panels = data<float>(weight_panels);
  work.dlogits = data<float>(dlogits);
  if (dw) {
    float* to = data<float>(panels);
    parallel_for(tokens, double(width), [&, to](int64_t begin, int64_t end) {
      pack_panels(work.hidden + begin * width, end - begin, width, tokens, to + begin * kTileN);
    });
  }
  std::vector<Tensor> pending;  // pending[level]: left subtree that waits for its sibling
  std::vector<Tensor> spare;
  for (int64_t s = 0; s < count; ++s) {
    Tensor sum = floats(hidden, 0);
    if (dh) {
      if (spare.empty()) {
        sum = floats(hidden, size);
      } else {
        sum = spare.back();
        spare.pop_back();
      }
      clear(data<float>(sum), size);
    }
    for (int64_t first = segments[2 * s]; first < segments[2 * s + 1]; first += work.chunk) {
      const int64_t columns = std::min(work.chunk, segments[2 * s + 1] - first);
      work.pack_weight(first, columns);
      work.tokens_pass(first, columns, dh ? data<float>(sum) : nullptr);
      if (dw) work.weight_pass(first, columns, dw);
    }
    if (!dh) continue;
    for (int64_t bits = s; bits & 1; bits >>= 1) {
      add_to(data<float>(sum), data<float>(pending.back()), size);
      spare.push_back(pending.back());
      pending.pop_back();
    }
    pending.push_back(sum);
  }
  if (dh) {
    const float* root = data<float>(pending.back());
    const int64_t padded = work.padded_width;
    parallel_for(tokens, double(width), [=](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) std::copy(root + t * padded, root + t * padded + width, dh + t * width);
    });
  }
}

void check(const Tensor& hidden, const Tensor& weight) {
  STD_TORCH_CHECK(hidden.dim() == 2 && weight.dim() == 2 && hidden.size(1) == weight.size(1),
                  "linear_logp: hidden must be [T, H] and weight [V, H]");
  STD_TORCH_CHECK(hidden.scalar_type() == weight.scalar_type(), "linear_logp: hidden and weight differ in dtype");
  STD_TORCH_CHECK(hidden.is_contiguous() && weight.is_contiguous(), "linear_logp: hidden, weight must be contiguous");
}

// hidden [T, H], weight [V, H], temperature [T], targets [T] -> stats [3, T, L], z_target [T]
void linear_logp_leaf_stats(const Tensor& hidden, const Tensor& weight, const Tensor& temperature, const Tensor& targets,
                            int64_t columns, Tensor stats, Tensor z_target) {
  check(hidden, weight);
  STD_TORCH_CHECK(columns >= 0 && columns <= weight.size(0), "linear_logp: columns=", columns, " of ", weight.size(0));
  STD_TORCH_CHECK(stats.numel() == 3 * hidden.size(0) * ((columns + kLeaf - 1) / kLeaf) && z_target.numel() == hidden.size(0) &&
                      temperature.numel() == hidden.size(0) && targets.numel() == hidden.size(0) &&
                      temperature.is_contiguous() && targets.is_contiguous(),
                  "linear_logp: an argument has the wrong size");
  dispatch(hidden.scalar_type(), "linear_logp", [&](auto type) {
    leaf_stats_of<decltype(type)>(hidden, weight, data<float>(temperature), data<int64_t>(targets), columns, data<float>(stats),
                                  data<float>(z_target));
  });
}

// -> dh [T, H] f32 (or empty), dw [V, H] (or empty); segments [S, 2] ranges of columns, S a power of two
void linear_logp_backward(const Tensor& hidden, const Tensor& weight, const Tensor& temperature, const Tensor& targets,
                          const Tensor& state, const Tensor& grads, const Tensor& segments, Tensor dh, Tensor dw) {
  check(hidden, weight);
  const int64_t tokens = hidden.size(0), width = hidden.size(1), count = segments.size(0);
  const int64_t* range = data<int64_t>(segments);
  STD_TORCH_CHECK(count >= 1 && (count & (count - 1)) == 0, "linear_logp: ", count, " segments, not a power of two");
  for (int64_t s = 0; s < count; ++s) {
    STD_TORCH_CHECK(range[2 * s] >= 0 && range[2 * s] <= range[2 * s + 1] && range[2 * s + 1] <= weight.size(0) &&
                        (s == 0 || range[2 * s] == range[2 * s - 1]),
                    "linear_logp: segments must be adjacent ranges of the local columns");
  }
  STD_TORCH_CHECK(state.numel() == 3 * tokens && grads.numel() == 3 * tokens && temperature.numel() == tokens &&
                      targets.numel() == tokens && state.is_contiguous() && grads.is_contiguous() &&
                      temperature.is_contiguous() && targets.is_contiguous(),
                  "linear_logp: an argument has the wrong size");
  STD_TORCH_CHECK((dh.numel() == 0 || dh.numel() == tokens * width) && (dw.numel() == 0 || dw.numel() == weight.numel()),
                  "linear_logp: a gradient has the wrong size");
  if (tokens == 0 || width == 0) return;
  dispatch(hidden.scalar_type(), "linear_logp", [&](auto type) {
    using T = decltype(type);
    Backward<T> work{tokens,
                     width,
                     round_up(width, kTileN),
                     0,
                     0,
                     Lanes(width),
                     data<T>(hidden),
                     data<T>(weight),
                     data<float>(temperature),
                     data<float>(state),
                     data<float>(grads),
                     data<int64_t>(targets),
                     nullptr,
                     nullptr,
                     nullptr,
                     nullptr,
                     nullptr};
    T* to = dw.numel() ? data<T>(dw) : nullptr;
    backward_of<T>(hidden, weight, work, range, count, dh.numel() ? data<float>(dh) : nullptr, to);
    if (to) {
      const int64_t used = range[2 * count - 1] * width;
      std::memset(static_cast<void*>(to + used), 0, size_t(weight.numel() - used) * sizeof(T));
    }
  });
}

}  // namespace
}  // namespace rlk

STABLE_TORCH_LIBRARY_IMPL(rlk, CPU, m) {
  m.impl("linear_logp_leaf_stats", TORCH_BOX(&rlk::linear_logp_leaf_stats));
  m.impl("linear_logp_backward", TORCH_BOX(&rlk::linear_logp_backward));
}
