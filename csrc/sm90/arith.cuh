// Scalar arithmetic of the sm90 family. Every product and sum is rounded on its own: the intrinsics are never contracted.
#pragma once
#include <cuda_bf16.h>
#include <cstdint>

namespace rlk::sm90 {

constexpr int kLeaf = 128;  // columns of the global vocabulary in one leaf

// exp(x) = 2^(x * log2 e), the product rounded to fp32, subnormal results flushed to zero.
__device__ __forceinline__ float exp_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(__fmul_rn(x, 0x1.715476p+0f)));
  return y;
}

__device__ __forceinline__ float log_(float x) { return logf(x); }

// A leaf whose columns are all -inf subtracts 0, so that it adds exp(-inf) = 0 instead of NaN.
__device__ __forceinline__ float shift_of(float leaf_max) { return leaf_max == -INFINITY ? 0.0f : leaf_max; }

// What the gradient of one row needs: merged statistics, and upstream gradients divided by the temperature.
struct RowGrad {
  float max, log_sum, entropy;
  float logp, weight, ent;  // weight = g_lse - g_logp
};

// From a table [T, 8], in this order.
__device__ __forceinline__ RowGrad load_row_grad(const float* table, int64_t row) {
  const float4 a = __ldg(reinterpret_cast<const float4*>(table) + row * 2);
  const float2 b = __ldg(reinterpret_cast<const float2*>(table) + row * 4 + 2);
  return {a.x, a.y, a.z, a.w, b.x, b.y};
}

// Gradients of the columns of one leaf: e = bf16(exp(z - leaf_max)) becomes a probability by one factor.
struct LeafGrad {
  float shift, factor;  // leaf_max - m, exp(shift - log l)

  __device__ __forceinline__ static LeafGrad of(float leaf_max, const RowGrad& row) {
    const float shift = __fsub_rn(leaf_max, row.max);
    return {shift, exp_(__fsub_rn(shift, row.log_sum))};
  }

  // Gradient of one logit before rounding to bf16, without the target's own term.
  template <bool Entropy>
  __device__ __forceinline__ float operator()(float e, const RowGrad& row) const {
    const float p = __fmul_rn(e, factor);
    float c = row.weight;
    if constexpr (Entropy) {
      const float y = __fsub_rn(__fadd_rn(log_(e), shift), row.log_sum);
      c = __fsub_rn(c, p == 0.0f ? 0.0f : __fmul_rn(row.ent, __fadd_rn(y, row.entropy)));
    }
    return __fmul_rn(p, c);
  }
};

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// 8 kept bf16 values of one leaf become gradients; hit is the target's place among them, if it is.
__device__ __forceinline__ void gradients_of_chunk(uint4& packed, int64_t hit, const LeafGrad& leaf, const RowGrad& row) {
  uint32_t* words = reinterpret_cast<uint32_t*>(&packed);
  float value[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    value[i] = __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
  }
  if (row.ent != 0.0f) {
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = leaf.template operator()<true>(value[i], row);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = leaf.template operator()<false>(value[i], row);
  }
  if (hit >= 0 && hit < 8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (hit == i) value[i] = __fadd_rn(value[i], row.logp);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(value[2 * i], value[2 * i + 1]);
    words[i] = reinterpret_cast<const uint32_t&>(pair);
  }
}

}  // namespace rlk::sm90
