// Kernels over rows of the vocabulary: merge of leaves, gradients in place, statistics of materialised logits.
#include "arith.cuh"
#include "launch.h"
#include "token_loss.h"

#include <algorithm>
#include <climits>
#include <stdexcept>
#include <string>

namespace rlk::sm90 {
namespace {

constexpr int kWarps = 8;

void check_launch(const char* what) {
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

__device__ __forceinline__ float temperature_of(const Rows& rows, int64_t row) {
  return rows.temperatures == nullptr ? 1.0f : rows.temperatures[row];
}

__device__ __forceinline__ float tree_of_lanes(float x) {  // adjacent pairs
#pragma unroll
  for (int lane = 1; lane < 32; lane *= 2) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, lane));
  return x;
}

// Tree over adjacent values that arrive in order, 32 leaves at a time: level i holds a finished subtree of 2^i values.
struct Carry {
  float level[16];
  __device__ __forceinline__ void push(float x, int index) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (((index >> i) & 1) == 0) {
        level[i] = x;
        return;
      }
      x = __fadd_rn(level[i], x);
    }
  }
  // Pads with +0.0 to a power of two.
  __device__ __forceinline__ float finish(int count) {
    int index = count;
    while ((index & (index - 1)) != 0) push(0.0f, index++);
    float root = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      // After 2^k pushes the carry chain ended in level k.
      if (index == 1 << i) root = level[i];
    }
    return root;
  }
};

// l and u of the leaves [begin, end) of one row, merged by a warp; every lane has the result.
__device__ __forceinline__ float2 subtree(const Rows& rows, int64_t row, float top, int begin, int end) {
  const int lane = threadIdx.x % 32;
  const int64_t base = row * rows.leaves;
  Carry sums, means;
  int count = 0;
  for (int first = begin; first < end; first += 32, ++count) {
    const int leaf = first + lane;
    float sum = 0.0f, mean = 0.0f;
    if (leaf < end) {
      const float leaf_sum = rows.leaf_sum[base + leaf], shift = __fsub_rn(rows.leaf_max[base + leaf], top);
      const float scale = exp_(shift);
      sum = __fmul_rn(leaf_sum, scale);  // no test for scale = 0: a NaN below the maximum must stay one
      if (scale != 0.0f) {
        mean = __fmul_rn(scale, __fadd_rn(rows.leaf_mean[base + leaf], __fmul_rn(shift, leaf_sum)));
      }
    }
    sums.push(tree_of_lanes(sum), count);
    means.push(tree_of_lanes(mean), count);
  }
  return make_float2(sums.finish(count), means.finish(count));
}

// (logp, lse, entropy, m, log l) of one row into out [5, T], or without m into [4, T].
template <bool WithMax>
__device__ __forceinline__ void results(float2 root, float m, float target_logit, float* out, int64_t tokens, int64_t row) {
  const float log_sum = log_(root.x);
  out[row] = __fsub_rn(__fsub_rn(target_logit, m), log_sum);
  out[row + tokens] = __fadd_rn(m, log_sum);
  out[row + 2 * tokens] = __fsub_rn(log_sum, __fdiv_rn(root.y, root.x));
  if constexpr (WithMax) out[row + 3 * tokens] = m;
  out[row + (WithMax ? 4 : 3) * tokens] = log_sum;
}

// Rows that take part, of those in front of `limit` of a part that starts at rows.skipped.
__device__ __forceinline__ int64_t active_of(const int* active, int skipped, int64_t limit) {
  if (active == nullptr) return limit;
  const int64_t left = static_cast<int64_t>(*active) - skipped;
  return left < limit ? left : limit;
}

__global__ void merge_kernel(Rows rows, int64_t tokens, const int64_t* order, float* out, int64_t total) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= active_of(rows.active, rows.skipped, tokens)) return;
  float top = -INFINITY;
  for (int leaf = lane; leaf < rows.leaves; leaf += 32) top = fmaxf(top, rows.leaf_max[row * rows.leaves + leaf]);
#pragma unroll
  for (int i = 1; i < 32; i *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
  const float2 root = subtree(rows, row, top, 0, rows.leaves);
  if (lane == 0) results<true>(root, top, rows.target_logit[row], out, total, order == nullptr ? row : order[row]);
}

__global__ void nodes_kernel(Rows rows, const float* m, const int* ranges, float* nodes, int64_t tokens) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= tokens) return;
  const float2 node = subtree(rows, row, m[row], ranges[2 * blockIdx.y], ranges[2 * blockIdx.y + 1]);
  if (threadIdx.x % 32 == 0) {
    nodes[2 * blockIdx.y * tokens + row] = node.x;
    nodes[(2 * blockIdx.y + 1) * tokens + row] = node.y;
  }
}

__global__ void finish_kernel(float* nodes, int slots, const int* merges, int count, int root, const float* m,
                              const float* target_logit, float* out, int64_t tokens) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= tokens) return;
  auto node = [&](int slot) {
    return slot < 0 ? make_float2(0.0f, 0.0f)
                    : make_float2(nodes[2 * slot * tokens + row], nodes[(2 * slot + 1) * tokens + row]);
  };
  for (int i = 0; i < count; ++i) {
    const float2 left = node(merges[2 * i]), right = node(merges[2 * i + 1]);
    nodes[2 * (slots + i) * tokens + row] = __fadd_rn(left.x, right.x);
    nodes[(2 * (slots + i) + 1) * tokens + row] = __fadd_rn(left.y, right.y);
  }
  results<false>(node(count > 0 ? slots + count - 1 : root), m[row], target_logit[row], out, tokens, row);
}

__global__ void row_table_kernel(RowTable task) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t i = row; i < task.zero_count; i += static_cast<int64_t>(gridDim.x) * blockDim.x) task.zeros[i] = 0;
  if (row >= active_of(task.active, task.skipped, task.tokens)) return;
  const int64_t from = task.order == nullptr ? row : task.order[row];
  const float temperature = task.temperatures == nullptr ? 1.0f : task.temperatures[row];
  float g[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) g[i] = task.grad[i] == nullptr ? 0.0f : task.grad[i][from * task.grad_stride[i]];
  const float logp = __fdiv_rn(g[0], temperature), lse = __fdiv_rn(g[1], temperature);
  const int64_t hit = task.targets[row] - task.start;
  const int column = hit >= 0 && hit < INT_MAX ? static_cast<int>(hit) : -1;
  reinterpret_cast<float4*>(task.table)[row * 2] =
      make_float4(task.max[from], task.log_sum[from], task.entropy[from], logp);
  reinterpret_cast<float4*>(task.table)[row * 2 + 1] =
      make_float4(__fsub_rn(lse, logp), __fdiv_rn(g[2], temperature), __int_as_float(column), 0.0f);
}

constexpr int kRowsPerThread = 4, kChunksPerThread = 2;

// Rows from the last active one on become zero up to a whole tile of k of the product over tokens.
__global__ void __launch_bounds__(256) gradient_kernel(
    Rows rows, __nv_bfloat16* data, int64_t tokens, int64_t stride, unsigned across) {
  const int64_t active = active_of(rows.active, rows.skipped, tokens);
  const int64_t first = static_cast<int64_t>(blockIdx.x / across) * kRowsPerThread, end = (active + 63) / 64 * 64;
  if (first >= end) return;
  int64_t column[kChunksPerThread];
  uint4 packed[kChunksPerThread][kRowsPerThread];
#pragma unroll
  for (int c = 0; c < kChunksPerThread; ++c) {
    column[c] = ((static_cast<int64_t>(blockIdx.x % across) * kChunksPerThread + c) * 256 + threadIdx.x) * 8;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      packed[c][r] = make_uint4(0, 0, 0, 0);
      if (first + r < active && column[c] < stride) {
        packed[c][r] = __ldcs(reinterpret_cast<const uint4*>(data + (first + r) * stride + column[c]));
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const int64_t row = first + r;
    if (row >= tokens || row >= end) break;
    RowGrad grad{};
    int target = -1;
    if (row < active) {
      grad = load_row_grad(rows.table, row);
      target = __float_as_int(__ldg(rows.table + row * 8 + 6));
    }
#pragma unroll
    for (int c = 0; c < kChunksPerThread; ++c) {
      if (column[c] >= stride) break;
      if (row < active) {
        const int leaf = static_cast<int>(column[c] / kLeaf);
        const LeafGrad gradient = LeafGrad::of(__ldg(rows.leaf_max + row * rows.leaves + leaf), grad);
        gradients_of_chunk(packed[c][r], target - column[c], gradient, grad);
      }
      *reinterpret_cast<uint4*>(data + row * stride + column[c]) = packed[c][r];
    }
  }
}

constexpr int kPrepareRows = 32;

// Rows that take part move to the front, in order: their hidden states, targets, temperatures.
__global__ void __launch_bounds__(256) prepare_kernel(Prepare task, int64_t chunks) {
  __shared__ int counts[2][kWarps];
  __shared__ int slots[kPrepareRows];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kPrepareRows;
  int before = 0, total = 0;  // rows that take part, in front of this block's and in all
  for (int64_t i = threadIdx.x; i < task.tokens; i += 256) {
    const int takes_part = task.targets[i] != task.ignore;
    total += takes_part;
    before += i < first ? takes_part : 0;
  }
#pragma unroll
  for (int i = 16; i > 0; i /= 2) {
    total += __shfl_xor_sync(~0u, total, i);
    before += __shfl_xor_sync(~0u, before, i);
  }
  if (lane == 0) {
    counts[0][warp] = before;
    counts[1][warp] = total;
  }
  __syncthreads();
  before = total = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    before += counts[0][i];
    total += counts[1][i];
  }
  if (warp == 0) {
    const int64_t row = first + lane;
    const bool inside = row < task.tokens;
    const int64_t target = inside ? task.targets[row] : task.ignore;
    const bool takes_part = inside && target != task.ignore;
    const unsigned mask = __ballot_sync(~0u, takes_part);
    const int rank = before + __popc(mask & ((1u << lane) - 1));
    const int64_t slot = takes_part ? rank : total + (row - rank);  // the others follow, in order
    slots[lane] = takes_part ? rank : -1;
    if (inside) {
      task.order[slot] = row;
      task.picked_targets[slot] = target;
      task.place[row] = slots[lane];
      if (task.temperatures != nullptr) task.picked_temperatures[slot] = task.temperatures[row];
      task.target_logit[slot] = task.absent;
      if (!takes_part) {
#pragma unroll
        for (int i = 0; i < 5; ++i) task.out[i * task.tokens + row] = 0.0f;
      }
    }
  }
  if (blockIdx.x == 0 && threadIdx.x < task.counters) task.active[threadIdx.x] = threadIdx.x == 0 ? total : 0;
  __syncthreads();
  const uint4* hidden = reinterpret_cast<const uint4*>(task.hidden.data);
  uint4* picked = reinterpret_cast<uint4*>(task.picked);
  for (int i = warp; i < kPrepareRows; i += kWarps) {
    const int slot = slots[i];
    if (slot < 0) continue;
    for (int64_t c = lane; c < chunks; c += 32) {
      picked[slot * chunks + c] = __ldcs(hidden + (first + i) * (task.hidden.stride / 8) + c);
    }
  }
  if (blockIdx.x == gridDim.x - 1) {  // zeros after the last one, as far as a product over tokens reads
    const int64_t end = (total + 63) / 64 * 64;
    for (int64_t c = total * chunks + threadIdx.x; c < (end < task.tokens ? end : task.tokens) * chunks; c += 256) {
      picked[c] = make_uint4(0, 0, 0, 0);
    }
  }
}

// out[row] = bf16(values[place[row]]), 0 where place is -1; 8 values a thread.
__global__ void __launch_bounds__(256) place_kernel(
    const float* values, const int* place, __nv_bfloat16* out, int64_t rows, int64_t chunks) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (at >= rows * chunks) return;
  const int64_t row = at / chunks, from = place[row];
  uint4 packed = make_uint4(0, 0, 0, 0);
  if (from >= 0) {
    const float4* source = reinterpret_cast<const float4*>(values) + (from * chunks + at % chunks) * 2;
    const float4 a = __ldcs(source), b = __ldcs(source + 1);
    const __nv_bfloat162 pairs[4] = {__floats2bfloat162_rn(a.x, a.y), __floats2bfloat162_rn(a.z, a.w),
                                     __floats2bfloat162_rn(b.x, b.y), __floats2bfloat162_rn(b.z, b.w)};
    packed = make_uint4(reinterpret_cast<const uint32_t&>(pairs[0]), reinterpret_cast<const uint32_t&>(pairs[1]),
                        reinterpret_cast<const uint32_t&>(pairs[2]), reinterpret_cast<const uint32_t&>(pairs[3]));
  }
  reinterpret_cast<uint4*>(out)[at] = packed;
}

// One warp a leaf; lane holds columns 4 lane .. 4 lane + 3.
__global__ void logits_kernel(Rows rows, const float* logits, int64_t tokens, int64_t columns, int64_t stride) {
  const int leaf = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (leaf >= rows.leaves) return;
  for (int64_t row = blockIdx.y; row < tokens; row += gridDim.y) {
    const float temperature = temperature_of(rows, row);
    const int64_t target = rows.targets == nullptr ? -1 : rows.targets[row] - rows.start;
    float z[4], u[4], leaf_max = -INFINITY;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t column = static_cast<int64_t>(leaf) * kLeaf + lane * 4 + i;
      z[i] = column < columns && column < rows.columns ? __fdiv_rn(logits[row * stride + column], temperature)
                                                       : -INFINITY;
      if (column < rows.columns && target == column) rows.target_logit[row] = z[i];
      leaf_max = fmaxf(leaf_max, z[i]);
    }
#pragma unroll
    for (int i = 1; i < 32; i *= 2) leaf_max = fmaxf(leaf_max, __shfl_xor_sync(~0u, leaf_max, i));
    leaf_max = __fadd_rn(leaf_max, 0.0f);
    const float shift = shift_of(leaf_max);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float d = __fsub_rn(z[i], shift);
      z[i] = exp_(d);
      u[i] = __fmul_rn(z[i], fmaxf(d, -200.0f));  // e is 0 long before; keeps 0 * -inf out
    }
    const float sum = tree_of_lanes(__fadd_rn(__fadd_rn(z[0], z[1]), __fadd_rn(z[2], z[3])));
    const float mean = tree_of_lanes(__fadd_rn(__fadd_rn(u[0], u[1]), __fadd_rn(u[2], u[3])));
    if (lane == 0) {
      const int64_t at = row * rows.leaves + leaf;
      rows.leaf_max[at] = leaf_max;
      rows.leaf_sum[at] = sum;
      rows.leaf_mean[at] = mean;
    }
  }
}

__global__ void elementwise_kernel(const float* x, float* y, int64_t count, bool logarithm) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at < count) y[at] = logarithm ? log_(x[at]) : exp_(x[at]);
}

// x *= bf16(*factor), rounded to bf16; nothing is read where the factor is 1. 8 values a thread and step.
__global__ void __launch_bounds__(256) scale_kernel(__nv_bfloat16* x, const float* factor, int64_t count) {
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

__global__ void __launch_bounds__(128) token_losses_kernel(TokenLosses task) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 128 + threadIdx.x;
  if (row >= task.tokens) return;
  TokenLoss loss = task.loss;
  if (task.normalizer != nullptr) loss.by = *task.normalizer;
  const bool ignored = task.targets[row] == task.ignore;  // what stands beside an ignored token may be NaN
  const float difference = ignored ? 0.0f : __fsub_rn(task.logp[row], task.old_logp[row]);
  const float weight = ignored ? 0.0f : task.mask == nullptr ? 1.0f : task.mask[row];
  const TokenTerms terms = token_terms(loss, difference, expf(difference), task.entropy[row],
                                       ignored ? 0.0f : task.advantages[row], weight, ignored);
  const float values[6] = {terms.loss, terms.weight, terms.clipped, terms.ratio, terms.kl, terms.entropy};
#pragma unroll
  for (int i = 0; i < 6; ++i) task.terms[i * task.tokens + row] = values[i];
  task.by_logp[row] = terms.by_logp;
  if (task.by_entropy != nullptr) task.by_entropy[row] = terms.by_entropy;
}

unsigned blocks(int64_t count, int64_t each) { return static_cast<unsigned>((count + each - 1) / each); }

}  // namespace

void merge(Rows rows, int64_t tokens, const int64_t* order, float* out, int64_t total, cudaStream_t stream) {
  if (tokens == 0) return;
  merge_kernel<<<blocks(tokens, kWarps), kWarps * 32, 0, stream>>>(rows, tokens, order, out, total);
  check_launch("merge of leaves");
}

void prepare(Prepare task, cudaStream_t stream) {
  if (task.tokens == 0) return;
  prepare_kernel<<<blocks(task.tokens, kPrepareRows), 256, 0, stream>>>(task, task.hidden.cols / 8);
  check_launch("rows that take part");
}

void row_table(RowTable task, cudaStream_t stream) {
  if (task.tokens == 0) return;
  row_table_kernel<<<blocks(task.tokens, 128), 128, 0, stream>>>(task);
  check_launch("gradients of rows");
}

void place_rows(const float* values, const int* place, Matrix out, cudaStream_t stream) {
  if (out.rows == 0 || out.cols == 0) return;
  place_kernel<<<blocks(out.rows * (out.cols / 8), 256), 256, 0, stream>>>(
      values, place, static_cast<__nv_bfloat16*>(out.data), out.rows, out.cols / 8);
  check_launch("rounding of rows");
}

void tree_nodes(Rows rows, const float* m, const int* ranges, int count, float* nodes, int64_t tokens,
                cudaStream_t stream) {
  if (tokens == 0 || count == 0) return;
  const dim3 grid(blocks(tokens, kWarps), static_cast<unsigned>(count));
  nodes_kernel<<<grid, kWarps * 32, 0, stream>>>(rows, m, ranges, nodes, tokens);
  check_launch("subtrees of leaves");
}

void finish(float* nodes, int slots, const int* merges, int count, int root, const float* m, const float* target_logit,
            float* out, int64_t tokens, cudaStream_t stream) {
  if (tokens == 0) return;
  finish_kernel<<<blocks(tokens, 128), 128, 0, stream>>>(
      nodes, slots, merges, count, root, m, target_logit, out, tokens);
  check_launch("root of the vocabulary tree");
}

void gradient_in_place(Rows rows, Matrix kept, cudaStream_t stream) {
  if (kept.rows == 0 || kept.stride == 0) return;
  const unsigned across = blocks(kept.stride, 2048 * kChunksPerThread);
  gradient_kernel<<<across * blocks(kept.rows, kRowsPerThread), 256, 0, stream>>>(
      rows, static_cast<__nv_bfloat16*>(kept.data), kept.rows, kept.stride, across);
  check_launch("gradient of kept logits");
}

void logits_statistics(Rows rows, Matrix logits, cudaStream_t stream) {
  if (logits.rows == 0 || rows.leaves == 0) return;
  const dim3 grid(blocks(rows.leaves, kWarps), static_cast<unsigned>(logits.rows < 32768 ? logits.rows : 32768));
  logits_kernel<<<grid, kWarps * 32, 0, stream>>>(
      rows, static_cast<const float*>(logits.data), logits.rows, logits.cols, logits.stride);
  check_launch("statistics of logits");
}

void scale(void* x, const float* factor, int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  scale_kernel<<<std::min(blocks(count, 2048), 1056u), 256, 0, stream>>>(static_cast<__nv_bfloat16*>(x), factor, count);
  check_launch("scale of gradients");
}

void token_losses(TokenLosses task, cudaStream_t stream) {
  if (task.tokens == 0) return;
  token_losses_kernel<<<blocks(task.tokens, 128), 128, 0, stream>>>(task);
  check_launch("losses of tokens");
}

void elementwise(const float* x, float* y, int64_t count, bool logarithm, cudaStream_t stream) {
  if (count == 0) return;
  elementwise_kernel<<<blocks(count, 256), 256, 0, stream>>>(x, y, count, logarithm);
  check_launch("exp or log");
}

}  // namespace rlk::sm90
