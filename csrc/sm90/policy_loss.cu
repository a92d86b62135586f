// The fused policy loss: losses of tokens with their gradients and metrics, and the scale of gradients that are made early.
#include "dependent.cuh"
#include "token_loss.h"

#include <cuda_bf16.h>

#include <algorithm>

namespace rlk::sm90 {
namespace {

__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(~0u, x, i);
  return x;
}

// The loss of a token and its gradients; what is to be added to the sums of the metrics.
__device__ __forceinline__ void token_loss(const TokenLosses& task, int64_t row, float (&metrics)[kTokenMetrics]) {
  TokenLoss loss = task.loss;
  if (task.normalizer != nullptr) loss.by = *task.normalizer;
  const bool ignored = task.targets[row] == task.ignore;  // what stands beside an ignored token may be NaN
  const float difference = ignored ? 0.0f : __fsub_rn(task.logp[row], task.old_logp[row]);
  const float weight = ignored ? 0.0f : task.mask == nullptr ? 1.0f : task.mask[row];
  const TokenTerms terms = token_terms(loss, difference, expf(difference), task.entropy[row],
                                       ignored ? 0.0f : task.advantages[row], weight, ignored);
  const float values[kTokenMetrics] = {terms.weight, terms.clipped, terms.ratio, terms.kl, terms.entropy};
#pragma unroll
  for (int i = 0; i < kTokenMetrics; ++i) metrics[i] = values[i];
  task.losses[row] = terms.loss;
  task.by_logp[row] = terms.by_logp;
  if (task.by_entropy != nullptr) task.by_entropy[row] = terms.by_entropy;
}

// The block that ends last adds the sums of the blocks, in an order that does not depend on which block that is.
__global__ void __launch_bounds__(kTokenThreads) token_losses_kernel(TokenLosses task) {
  constexpr int kTokenWarps = kTokenThreads / 32;
  __shared__ float sums[kTokenMetrics][kTokenWarps];
  __shared__ bool last;
  await_previous();
  let_next_start();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kTokenThreads + threadIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float metrics[kTokenMetrics] = {};
  if (row < task.tokens) token_loss(task, row, metrics);
#pragma unroll
  for (int i = 0; i < kTokenMetrics; ++i) {
    const float sum = sum_of_lanes(metrics[i]);
    if (lane == 0) sums[i][warp] = sum;
  }
  __syncthreads();
  float* parts = task.metrics + kTokenMetrics;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kTokenMetrics; ++i) {
      float sum = 0.0f;
      for (int k = 0; k < kTokenWarps; ++k) sum += sums[i][k];
      __stcg(parts + static_cast<int64_t>(blockIdx.x) * kTokenMetrics + i, sum);
    }
    __threadfence();
    last = atomicAdd(task.counter, 1) == static_cast<int>(gridDim.x) - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  for (int i = warp; i < kTokenMetrics; i += kTokenWarps) {
    float sum = 0.0f;
    for (unsigned block = lane; block < gridDim.x; block += 32) {
      sum += __ldcg(parts + static_cast<int64_t>(block) * kTokenMetrics + i);
    }
    sum = sum_of_lanes(sum);
    if (lane == 0) task.metrics[i] = sum;
  }
  if (threadIdx.x == 0) *task.counter = 0;
}

// x *= bf16(*factor), rounded to bf16; nothing is read where the factor is 1. 8 values a thread and step.
__global__ void __launch_bounds__(256) scale_kernel(__nv_bfloat16* x, const float* factor, int64_t count) {
  await_previous();
  let_next_start();
  const float by = __bfloat162float(__float2bfloat16_rn(*factor));
  if (by == 1.0f) return;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * 256, thread = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  for (int64_t i = thread; i < count / 8; i += threads) {
    uint4 packed = reinterpret_cast<uint4*>(x)[i];
    __nv_bfloat16* values = reinterpret_cast<__nv_bfloat16*>(&packed);
#pragma unroll
    for (int k = 0; k < 8; ++k) values[k] = __float2bfloat16_rn(__fmul_rn(__bfloat162float(values[k]), by));
    reinterpret_cast<uint4*>(x)[i] = packed;
  }
  for (int64_t i = count / 8 * 8 + thread; i < count; i += threads) {
    x[i] = __float2bfloat16_rn(__fmul_rn(__bfloat162float(x[i]), by));
  }
}

}  // namespace

void token_losses(TokenLosses task, cudaStream_t stream) {
  if (task.tokens == 0) return;
  launch_dependent("losses of tokens", token_losses_kernel, {blocks(task.tokens, kTokenThreads), kTokenThreads}, stream, task);
}

void scale(void* x, const float* factor, int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  launch_dependent("scale of gradients", scale_kernel, {std::min(blocks(count, 2048), 1056u), 256}, stream,
                   static_cast<__nv_bfloat16*>(x), factor, count);
}

}  // namespace rlk::sm90
