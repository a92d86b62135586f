// logp, lse, entropy and their gradient on rows of fp32 logits. Specification: rl_kernel/ops/logp/reference.py.
#include "cpu/logp.h"

#include <algorithm>
#include <vector>

namespace rlk {
namespace {

void check_rows(const char* what, const Tensor& t, int64_t numel) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.numel() == numel, what,
                  ": a float32 argument is not contiguous or has the wrong size");
}

// logits [T, V], temperature [T] -> stats [3, T, L]
void logp_leaf_stats(const Tensor& logits, const Tensor& temperature, int64_t columns, Tensor stats) {
  const int64_t rows = logits.size(0), width = logits.size(1), leaves = (columns + kLeaf - 1) / kLeaf;
  STD_TORCH_CHECK(columns >= 0 && columns <= width, "logp_leaf_stats: columns=", columns, " of ", width);
  check_rows("logp_leaf_stats", logits, rows * width);
  check_rows("logp_leaf_stats", temperature, rows);
  check_rows("logp_leaf_stats", stats, 3 * rows * leaves);
  const float *x = data<float>(logits), *t = data<float>(temperature);
  float* out = data<float>(stats);
  parallel_for(rows * leaves, 8.0 * kLeaf, [=](int64_t begin, int64_t end) {
    alignas(32) float z[kLeaf];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / leaves, first = i % leaves * kLeaf;
      divide_leaf(x + row * width + first, int(std::min<int64_t>(kLeaf, columns - first)), t[row], z);
      leaf_stats(z, out + i, out + rows * leaves + i, out + 2 * rows * leaves + i);
    }
  });
}

// The two products of step 3 for one row of leaves: planes m, s, u of stats are `plane` apart.
void leaf_terms(const float* leaf, int64_t plane, int64_t leaves, float m, float* l, float* u) {
  int64_t i = 0;
  for (; i + 8 <= leaves; i += 8) {
    const V8 s = load8(leaf + plane + i), d = load8(leaf + i) - splat(m), w = exp(d);
    store8(l + i, where_nonzero(w, s * w));
    store8(u + i, where_nonzero(w, w * (load8(leaf + 2 * plane + i) + d * s)));
  }
  for (; i < leaves; ++i) {
    const float s = leaf[plane + i], d = leaf[i] - m, w = exp(d);
    l[i] = where_nonzero(w, s * w);
    u[i] = where_nonzero(w, w * (leaf[2 * plane + i] + d * s));
  }
}

// Step 4 of one row; out is (logp, lse, entropy, log l), `rows` apart.
void results(float z, float m, float l, float u, float* out, int64_t rows) {
  const float log_l = log(l);
  out[0] = (z - m) - log_l;
  out[rows] = m + log_l;
  out[2 * rows] = log_l - u / l;
  out[3 * rows] = log_l;
}

// stats [3, T, L] of all leaves of the vocabulary -> out (logp, lse, entropy, log l, m) [5, T]
void logp_whole_rows(const Tensor& stats, const Tensor& z_target, Tensor out) {
  const int64_t rows = stats.size(1), leaves = stats.size(2);
  STD_TORCH_CHECK(leaves > 0, "logp_whole_rows: no leaves");
  check_rows("logp_whole_rows", stats, 3 * rows * leaves);
  check_rows("logp_whole_rows", z_target, rows);
  check_rows("logp_whole_rows", out, 5 * rows);
  const float *s = data<float>(stats), *z = data<float>(z_target);
  float* to = data<float>(out);
  parallel_for(rows, 60.0 + 30.0 * double(leaves), [=](int64_t begin, int64_t end) {
    std::vector<float> l(leaves), u(leaves);
    for (int64_t row = begin; row < end; ++row) {
      const float* leaf = s + row * leaves;
      float m = leaf[0];
      for (int64_t i = 1; i < leaves; ++i) m = leaf[i] > m || leaf[i] != leaf[i] ? leaf[i] : m;  // NaN stays: no x > NaN
      leaf_terms(leaf, rows * leaves, leaves, m, l.data(), u.data());
      results(z[row], m, tree(l.data(), leaves), tree(u.data(), leaves), to + row, rows);
      to[4 * rows + row] = m;
    }
  });
}

// stats [3, T, L], m [T], ranges [N, 2] -> nodes [slots >= N, 2, T]
void logp_tree_nodes(const Tensor& stats, const Tensor& m, const Tensor& ranges, Tensor nodes) {
  const int64_t rows = stats.size(1), leaves = stats.size(2), count = ranges.size(0);
  check_rows("logp_tree_nodes", stats, 3 * rows * leaves);
  check_rows("logp_tree_nodes", m, rows);
  STD_TORCH_CHECK(nodes.size(0) >= count && nodes.is_contiguous(), "logp_tree_nodes: ", nodes.size(0), " slots for ", count,
                  " subtrees");
  const float *s = data<float>(stats), *maximum = data<float>(m);
  const int64_t* range = data<int64_t>(ranges);
  for (int64_t n = 0; n < count; ++n) {
    STD_TORCH_CHECK(range[2 * n] >= 0 && range[2 * n] < range[2 * n + 1] && range[2 * n + 1] <= leaves,
                    "logp_tree_nodes: a subtree lies outside the local leaves");
  }
  float* out = data<float>(nodes);
  parallel_for(rows, 30.0 * double(leaves), [=](int64_t begin, int64_t end) {
    std::vector<float> l(leaves), u(leaves);
    for (int64_t row = begin; row < end; ++row) {
      leaf_terms(s + row * leaves, rows * leaves, leaves, maximum[row], l.data(), u.data());
      for (int64_t n = 0; n < count; ++n) {
        const int64_t first = range[2 * n], size = range[2 * n + 1] - first;
        out[2 * n * rows + row] = tree(l.data() + first, size);
        out[(2 * n + 1) * rows + row] = tree(u.data() + first, size);
      }
    }
  });
}

// nodes [N, 2, T], merges [M, 2] -> out (logp, lse, entropy, log l) [4, T]
void logp_finish(const Tensor& nodes, const Tensor& merges, int64_t first_slot, const Tensor& m, const Tensor& z_target,
                 Tensor out) {
  const int64_t slots = nodes.size(0), rows = nodes.size(2), count = merges.size(0);
  check_rows("logp_finish", nodes, 2 * slots * rows);
  check_rows("logp_finish", m, rows);
  check_rows("logp_finish", z_target, rows);
  check_rows("logp_finish", out, 4 * rows);
  const int64_t* merge = data<int64_t>(merges);
  for (int64_t i = 0; i < 2 * count; ++i) {
    STD_TORCH_CHECK(merge[i] >= -1 && merge[i] < slots + i / 2, "logp_finish: a merge names a slot that is not there");
  }
  STD_TORCH_CHECK(first_slot >= 0 && first_slot < slots, "logp_finish: first_slot=", first_slot);
  const float *in = data<float>(nodes), *maximum = data<float>(m), *z = data<float>(z_target);
  float* to = data<float>(out);
  parallel_for(rows, 60.0 + 4.0 * double(count), [=](int64_t begin, int64_t end) {
    std::vector<float> value(slots + count);
    for (int64_t row = begin; row < end; ++row) {
      float root[2];
      for (int k = 0; k < 2; ++k) {
        for (int64_t i = 0; i < slots; ++i) value[i] = in[(2 * i + k) * rows + row];
        for (int64_t i = 0; i < count; ++i) {
          const int64_t left = merge[2 * i], right = merge[2 * i + 1];
          value[slots + i] = (left < 0 ? 0.0f : value[left]) + (right < 0 ? 0.0f : value[right]);
        }
        root[k] = value[count ? slots + count - 1 : first_slot];
      }
      results(z[row], maximum[row], root[0], root[1], to + row, rows);
    }
  });
}

// -> out [T, V]
void logp_dlogits(const Tensor& logits, const Tensor& temperature, const Tensor& targets, const Tensor& state,
                  const Tensor& grads, int64_t columns, Tensor out) {
  const int64_t rows = logits.size(0), width = logits.size(1);
  STD_TORCH_CHECK(columns >= 0 && columns <= width, "logp_dlogits: columns=", columns, " of ", width);
  check_rows("logp_dlogits", logits, rows * width);
  check_rows("logp_dlogits", temperature, rows);
  check_rows("logp_dlogits", state, 3 * rows);
  check_rows("logp_dlogits", grads, 3 * rows);
  check_rows("logp_dlogits", out, rows * width);
  const float *x = data<float>(logits), *t = data<float>(temperature), *s = data<float>(state), *g = data<float>(grads);
  const int64_t* target = data<int64_t>(targets);
  float* to = data<float>(out);
  parallel_for(rows, 6.0 * double(width), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      grad_row<float>(x + row * width, columns, row_grad(t, s, g, rows, row), target[row], to + row * width);
      std::fill(to + row * width + columns, to + (row + 1) * width, 0.0f);
    }
  });
}

// state (m, log l) [2, T] -> out [T, V]
void logp_log_softmax(const Tensor& logits, const Tensor& temperature, const Tensor& state, int64_t columns, Tensor out) {
  const int64_t rows = logits.size(0), width = logits.size(1);
  STD_TORCH_CHECK(columns >= 0 && columns <= width, "logp_log_softmax: columns=", columns, " of ", width);
  check_rows("logp_log_softmax", logits, rows * width);
  check_rows("logp_log_softmax", temperature, rows);
  check_rows("logp_log_softmax", state, 2 * rows);
  check_rows("logp_log_softmax", out, rows * width);
  const float *x = data<float>(logits), *t = data<float>(temperature), *s = data<float>(state);
  float* to = data<float>(out);
  parallel_for(rows, double(width), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float *from = x + row * width, m = s[row], log_l = s[rows + row], temp = t[row];
      float* y = to + row * width;
      for (int64_t i = 0; i < columns; ++i) y[i] = ((temp == 1.0f ? from[i] : from[i] / temp) - m) - log_l;
      std::fill(y + columns, y + width, -std::numeric_limits<float>::infinity());
    }
  });
}

}  // namespace
}  // namespace rlk

STABLE_TORCH_LIBRARY_IMPL(rlk, CPU, m) {
  m.impl("logp_leaf_stats", TORCH_BOX(&rlk::logp_leaf_stats));
  m.impl("logp_whole_rows", TORCH_BOX(&rlk::logp_whole_rows));
  m.impl("logp_tree_nodes", TORCH_BOX(&rlk::logp_tree_nodes));
  m.impl("logp_finish", TORCH_BOX(&rlk::logp_finish));
  m.impl("logp_dlogits", TORCH_BOX(&rlk::logp_dlogits));
  m.impl("logp_log_softmax", TORCH_BOX(&rlk::logp_log_softmax));
}
