// Rows of logits: statistics of one vocabulary leaf and the gradient of one logit, shared by logp and linear_logp.
// Specification: rl_kernel/ops/logp/reference.py (the numbers of the steps are its).
#pragma once

#include "cpu/primitives.h"

namespace rlk {

constexpr int kLeaf = 128;  // columns of the global vocabulary in one leaf

RLK_INLINE V8 where_nonzero(V8 test, V8 x) {  // x where test is not zero (NaN is not), else +0.0
  return {_mm256_and_ps(x.v, _mm256_cmp_ps(test.v, _mm256_setzero_ps(), _CMP_NEQ_UQ))};
}
RLK_INLINE float where_nonzero(float test, float x) { return test == 0.0f ? 0.0f : x; }

// z[0..128) = x[0..count) / temperature, then -inf up to the end of the leaf: exp makes them the +0.0 of an absent column.
RLK_INLINE void divide_leaf(const float* x, int count, float temperature, float* z) {
  const V8 t = splat(temperature);
  int i = 0;
  for (; i + 8 <= count; i += 8) store8(z + i, temperature == 1.0f ? load8(x + i) : load8(x + i) / t);
  for (; i < count; ++i) z[i] = temperature == 1.0f ? x[i] : x[i] / temperature;
  for (; i < kLeaf; ++i) z[i] = -std::numeric_limits<float>::infinity();
}

// Step 1 on z[0..128); z is overwritten.
RLK_INLINE void leaf_stats(float* z, float* m_out, float* s_out, float* u_out) {
  V8 best = splat(-std::numeric_limits<float>::infinity());
  __m256 nan = _mm256_setzero_ps();
  for (int i = 0; i < kLeaf; i += 8) {
    V8 x = load8(z + i);
    best = max(x, best);
    nan = _mm256_or_ps(nan, _mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  }
  alignas(32) float lanes[8], product[kLeaf];
  store8(lanes, best);
  float m = lanes[0];
  for (int i = 1; i < 8; ++i) m = max(lanes[i], m);
  m = _mm256_movemask_ps(nan) ? std::numeric_limits<float>::quiet_NaN() : m + 0.0f;
  for (int i = 0; i < kLeaf; i += 8) {
    V8 d = load8(z + i) - splat(m), e = exp(d);
    store8(z + i, e);
    store8(product + i, where_nonzero(e, e * d));
  }
  *m_out = m;
  *s_out = tree128(z);
  *u_out = tree128(product);
}

// What step 5 needs of one row.
struct RowGrad {
  float temperature, m, log_l, entropy, g_logp, g_lse, g_ent;
};

// p_j * c_j of step 5; V is float or V8.
template <class V>
RLK_INLINE V grad_value(V x, const RowGrad& row) {
  V z = row.temperature == 1.0f ? x : x / like(x, row.temperature);
  V y = (z - like(x, row.m)) - like(x, row.log_l);
  V p = exp(y);
  V c = like(x, row.g_lse - row.g_logp);
  if (row.g_ent != 0.0f) c = c - where_nonzero(p, like(x, row.g_ent) * (y + like(x, row.entropy)));
  return p * c;
}

// dz[0..count) of step 5, rounded to T and kept as fp32; target is the column of the row's target, or negative.
template <class T>
RLK_INLINE void grad_row(const float* x, int64_t count, const RowGrad& row, int64_t target, float* dz) {
  const V8 t = splat(row.temperature);
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    V8 v = grad_value(load8(x + i), row);
    store8(dz + i, round_to<T>(row.temperature == 1.0f ? v : v / t));
  }
  for (; i < count; ++i) {
    float v = grad_value(x[i], row);
    dz[i] = round_to<T>(row.temperature == 1.0f ? v : v / row.temperature);
  }
  if (target >= 0 && target < count) {
    float v = grad_value(x[target], row) + row.g_logp;
    dz[target] = round_to<T>(row.temperature == 1.0f ? v : v / row.temperature);
  }
}

// Row of `state` (m, log l, entropy) and `grads` (g_logp, g_lse, g_ent), both [3, rows].
RLK_INLINE RowGrad row_grad(const float* temperature, const float* state, const float* grads, int64_t rows, int64_t r) {
  return {temperature[r], state[r], state[rows + r], state[2 * rows + r], grads[r], grads[rows + r], grads[2 * rows + r]};
}

}  // namespace rlk
