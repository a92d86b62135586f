// The fused policy loss: losses of tokens with their gradients and metrics, and the scale of gradients that are made early.
#include "dependent.cuh"
#include "ptx.cuh"
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

constexpr int kSums = 1 + kTokenMetrics;  // the loss, then the metrics
constexpr int kTokenBlocks = 8, kTokenThreads = 512;            // one cluster
constexpr int kTokenWarps = kTokenBlocks * kTokenThreads / 32;  // of all its blocks

// What is read of a token. All of it is under way before any is looked at: what stands beside an ignored one may be NaN.
struct Token {
  int64_t target;
  float logp, old_logp, entropy, advantage, weight;

  static __device__ __forceinline__ Token of(const TokenLosses& task, int64_t row) {
    return {task.targets[row], task.logp[row],       task.old_logp[row],
            task.entropy[row], task.advantages[row], task.mask == nullptr ? 1.0f : task.mask[row]};
  }
};

// The loss of a token and its gradients; what is to be summed is added to `sums`.
__device__ __forceinline__ void token_loss(const TokenLosses& task, const TokenLoss& loss, const Token& token, int64_t row,
                                           float (&sums)[kSums]) {
  const bool ignored = token.target == task.ignore;
  const float difference = ignored ? 0.0f : __fsub_rn(token.logp, token.old_logp);
  const TokenTerms terms = token_terms(loss, difference, expf(difference), token.entropy, ignored ? 0.0f : token.advantage,
                                       ignored ? 0.0f : token.weight, ignored);
  const float values[kSums] = {terms.loss, terms.weight, terms.clipped, terms.ratio, terms.kl, terms.entropy};
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = __fadd_rn(sums[i], values[i]);
  task.by_logp[row] = terms.by_logp;
  if (task.by_entropy != nullptr) task.by_entropy[row] = terms.by_entropy;
}

// One cluster: sums go to its first block without a trip through global memory, and are made in an order that depends on the
// number of tokens alone. A lane adds its tokens in order, 4096 apart; lanes of a warp are added in a tree, then four warps,
// 32 apart, in order, and those sums in a tree. Warps take 32 tokens each in turn from all blocks: few tokens use all of them.
__global__ void __cluster_dims__(kTokenBlocks, 1, 1) __launch_bounds__(kTokenThreads) token_losses_kernel(TokenLosses task) {
  __shared__ float parts[kSums][kTokenWarps];
  __shared__ uint64_t barrier;  // of the first block: all parts are there
  const int rank = static_cast<int>(cluster_rank()), lane = threadIdx.x % 32, own = threadIdx.x / 32;
  const bool opens = rank == 0 && threadIdx.x == 0;
  if (opens) {
    barrier_init(smem_address(&barrier), 1);
    barrier_init_fence();
  }
  cluster_sync();
  if (opens) barrier_expect(smem_address(&barrier), sizeof(parts));
  await_previous();
  let_next_start();
  const int warp = own * kTokenBlocks + rank;
  constexpr int64_t kStep = kTokenWarps * 32;
  int64_t row = warp * 32 + lane;
  const int* on_gpu = task.normalizer != nullptr ? reinterpret_cast<const int*>(task.normalizer) : task.active;
  const int by = on_gpu == nullptr ? 0 : *on_gpu;
  Token next{};
  if (row < task.tokens) next = Token::of(task, row);
  TokenLoss loss = task.loss;
  if (on_gpu != nullptr) loss.by = task.normalizer != nullptr ? __int_as_float(by) : static_cast<float>(max(by, 1));
  float sums[kSums] = {};
#pragma unroll 1
  for (; row < task.tokens; row += kStep) {
    const Token token = next;
    if (row + kStep < task.tokens) next = Token::of(task, row + kStep);
    token_loss(task, loss, token, row, sums);
  }
  __syncwarp();
  float mine = 0.0f;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    const float sum = sum_of_lanes(sums[i]);
    if (lane == i) mine = sum;
  }
  if (lane < kSums) store_remote(smem_address(&parts[lane][warp]), __float_as_uint(mine), smem_address(&barrier), 0);
  if (rank > 0 || own >= kSums) return;
  barrier_wait(smem_address(&barrier), 0);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kTokenWarps; i += 32) sum = __fadd_rn(sum, parts[own][i + lane]);
  sum = sum_of_lanes(sum);
  if (lane == 0) *(own == 0 ? task.total : task.metrics + (own - 1)) = sum;
}

__global__ void __launch_bounds__(256)
    token_weights_kernel(const int64_t* targets, int64_t ignore, const float* mask, float* weights, int64_t tokens) {
  await_previous();
  let_next_start();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (row < tokens) weights[row] = targets[row] == ignore ? 0.0f : mask == nullptr ? 1.0f : mask[row];
}

constexpr int kScaleThreads = 512, kScaleBlocks = 264;  // two blocks a processor: most calls end at the first `if`
constexpr int kScaleAhead = 4;                          // loads of a thread in flight

__device__ __forceinline__ __nv_bfloat16 scaled(__nv_bfloat16 x, float by) {
  return __float2bfloat16_rn(__fmul_rn(__bfloat162float(x), by));
}

__device__ __forceinline__ void scale_values(__nv_bfloat16* x, int64_t count, float by) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kScaleThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kScaleThreads + threadIdx.x, groups = count / 8;
  uint4* packed = reinterpret_cast<uint4*>(x);
  for (int64_t first = thread; first < groups; first += threads * kScaleAhead) {
    uint4 ahead[kScaleAhead];
#pragma unroll
    for (int i = 0; i < kScaleAhead; ++i) {
      if (first + i * threads < groups) ahead[i] = packed[first + i * threads];
    }
#pragma unroll
    for (int i = 0; i < kScaleAhead; ++i) {
      if (first + i * threads >= groups) break;
      __nv_bfloat16* values = reinterpret_cast<__nv_bfloat16*>(&ahead[i]);
#pragma unroll
      for (int k = 0; k < 8; ++k) values[k] = scaled(values[k], by);
      packed[first + i * threads] = ahead[i];
    }
  }
  if (thread < count % 8) x[groups * 8 + thread] = scaled(x[groups * 8 + thread], by);
}

// x and y *= bf16(*factor), rounded to bf16; nothing is read where the factor is 1.
__global__ void __launch_bounds__(kScaleThreads)
    scale_kernel(__nv_bfloat16* x, int64_t x_count, __nv_bfloat16* y, int64_t y_count, const float* factor) {
  await_previous();
  let_next_start();
  const float by = __bfloat162float(__float2bfloat16_rn(*factor));
  if (by == 1.0f) return;
  scale_values(x, x_count, by);
  scale_values(y, y_count, by);
}

}  // namespace

void token_losses(TokenLosses task, cudaStream_t stream) {
  launch_dependent("losses of tokens", token_losses_kernel, {kTokenBlocks, kTokenThreads}, stream, task);
}

void token_weights(const int64_t* targets, int64_t ignore, const float* mask, float* weights, int64_t tokens,
                   cudaStream_t stream) {
  if (tokens == 0) return;
  launch_dependent("weights of tokens", token_weights_kernel, {blocks(tokens, 256), 256}, stream, targets, ignore, mask,
                   weights, tokens);
}

void scale(void* x, int64_t x_count, void* y, int64_t y_count, const float* factor, cudaStream_t stream) {
  if (x_count + y_count == 0) return;
  const unsigned count = std::min(blocks(std::max(x_count, y_count), 8 * kScaleThreads), static_cast<unsigned>(kScaleBlocks));
  launch_dependent("scale of gradients", scale_kernel, {count, kScaleThreads}, stream, static_cast<__nv_bfloat16*>(x), x_count,
                   static_cast<__nv_bfloat16*>(y), y_count, factor);
}

}  // namespace rlk::sm90
