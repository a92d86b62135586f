// What the gradients of a row of logits need, from the results of the forward pass and the upstream gradients.
#pragma once
#include "arith.cuh"
#include "launch.h"

namespace rlk::sm90 {

__device__ __forceinline__ float temperature_of(const Rows& rows, int64_t row) {
  return rows.temperatures == nullptr ? 1.0f : rows.temperatures[row];
}

// Rows that take part, of those in front of `limit` of a part that starts at rows.skipped.
__device__ __forceinline__ int64_t active_of(const int* active, int skipped, int64_t limit) {
  if (active == nullptr) return limit;
  const int64_t left = static_cast<int64_t>(*active) - skipped;
  return left < limit ? left : limit;
}

__device__ __forceinline__ RowGrad row_grad(const Rows& rows, const Upstream& upstream, int64_t slot) {
  const float temperature = temperature_of(rows, slot);
  const int64_t row = upstream.order[slot];
  float g[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) g[i] = upstream.grad[i] == nullptr ? 0.0f : upstream.grad[i][row * upstream.grad_stride[i]];
  const float logp = __fdiv_rn(g[0], temperature), lse = __fdiv_rn(g[1], temperature);
  return {upstream.max[row],    upstream.log_sum[row],       upstream.entropy[row], logp,
          __fsub_rn(lse, logp), __fdiv_rn(g[2], temperature)};
}

__device__ __forceinline__ void write_row(float* table, int64_t slot, const RowGrad& grad) {
  reinterpret_cast<float4*>(table)[slot * 2] = make_float4(grad.max, grad.log_sum, grad.entropy, grad.logp);
  reinterpret_cast<float4*>(table)[slot * 2 + 1] = make_float4(grad.weight, grad.ent, 0.0f, 0.0f);
}

// Rows of bf16 that take no part, by all warps of all blocks.
__device__ __forceinline__ void set_rows_to_zero(const Upstream& upstream) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / 32), chunks = upstream.zero_rows.cols / 8;
  uint4* rows = static_cast<uint4*>(upstream.zero_rows.data);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; row < upstream.zero_rows.rows;
       row += warps) {
    if (upstream.place[row] >= 0) continue;
    for (int64_t i = threadIdx.x % 32; i < chunks; i += 32) rows[row * chunks + i] = make_uint4(0, 0, 0, 0);
  }
}

// By the threads of `blocks` blocks.
__device__ __forceinline__ void set_zeros(const Upstream& upstream, unsigned blocks) {
  const int64_t threads = static_cast<int64_t>(blocks) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < upstream.zero_count; i += threads) {
    upstream.zeros[i] = 0;
  }
}

}  // namespace rlk::sm90
