// Kernels over rows of the vocabulary: merge of leaves, gradients in place, statistics of materialised logits.
#include "dependent.cuh"
#include "row_grad.cuh"

#include <algorithm>
#include <climits>
#include <stdexcept>
#include <string>

namespace rlk::sm90 {
namespace {

constexpr int kWarps = 8;

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

// What a leaf adds to l and u of its row.
__device__ __forceinline__ float2 leaf_value(float leaf_max, float leaf_sum, float leaf_mean, float top) {
  const float shift = __fsub_rn(leaf_max, top), scale = exp_(shift);
  const float sum = __fmul_rn(leaf_sum, scale);  // no test for scale = 0: a NaN below the maximum must stay one
  const float mean = scale != 0.0f ? __fmul_rn(scale, __fadd_rn(leaf_mean, __fmul_rn(shift, leaf_sum))) : 0.0f;
  return make_float2(sum, mean);
}

// l and u of the leaves [begin, end) of one row, merged by a warp; every lane has the result.
__device__ __forceinline__ float2 subtree(const Rows& rows, int64_t row, float top, int begin, int end) {
  const int lane = threadIdx.x % 32;
  const int64_t base = row * rows.leaves;
  Carry sums, means;
  int count = 0;
  for (int first = begin; first < end; first += 32, ++count) {
    const int leaf = first + lane;
    float2 value = make_float2(0.0f, 0.0f);
    if (leaf < end) {
      value = leaf_value(rows.leaf_max[base + leaf], rows.leaf_sum[base + leaf], rows.leaf_mean[base + leaf], top);
    }
    sums.push(tree_of_lanes(value.x), count);
    means.push(tree_of_lanes(value.y), count);
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

constexpr int kMergeWarps = 4, kMergeThreads = 32 * kMergeWarps;
constexpr int kMergeGroups = 5, kMergeLeaves = kMergeGroups * kMergeThreads;  // leaves at a time: of 32 each, five a warp
constexpr int kMostGroups = 1024;

// A block a row; the loads of its first 640 leaves are all in flight at once.
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(Rows rows, int64_t tokens, const int64_t* order, float* out, int64_t total) {
  __shared__ float2 groups[kMostGroups];  // subtrees of 32 leaves
  __shared__ float tops[kMergeWarps];
  await_previous();
  let_next_start();
  const int64_t row = blockIdx.x;
  if (row >= active_of(rows.active, rows.skipped, tokens)) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, leaves = rows.leaves, count = (leaves + 31) / 32;
  const float *maxima = rows.leaf_max + row * leaves, *sums = rows.leaf_sum + row * leaves;
  const float* means = rows.leaf_mean + row * leaves;
  float target_logit = 0.0f;
  int64_t to = row;
  if (threadIdx.x == 0) {
    target_logit = rows.target_logit[row];
    if (order != nullptr) to = order[row];
  }
  float leaf_max[kMergeGroups], leaf_sum[kMergeGroups], leaf_mean[kMergeGroups];
  auto load = [&](int first) {
#pragma unroll
    for (int g = 0; g < kMergeGroups; ++g) {
      const int leaf = first + g * kMergeThreads + static_cast<int>(threadIdx.x);
      leaf_max[g] = leaf < leaves ? maxima[leaf] : -INFINITY;
      leaf_sum[g] = leaf < leaves ? sums[leaf] : 0.0f;
      leaf_mean[g] = leaf < leaves ? means[leaf] : 0.0f;
    }
  };
  load(0);
  float top = -INFINITY;
#pragma unroll
  for (int g = 0; g < kMergeGroups; ++g) top = fmaxf(top, leaf_max[g]);
  for (int leaf = kMergeLeaves + static_cast<int>(threadIdx.x); leaf < leaves; leaf += kMergeThreads) {
    top = fmaxf(top, maxima[leaf]);
  }
#pragma unroll
  for (int i = 1; i < 32; i *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
  if (lane == 0) tops[warp] = top;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kMergeWarps; ++i) top = fmaxf(top, tops[i]);

  for (int first = 0;;) {
#pragma unroll
    for (int g = 0; g < kMergeGroups; ++g) {
      const int group = first / 32 + g * kMergeWarps + warp;
      if (group >= count) break;
      const float2 leaf = first + g * kMergeThreads + static_cast<int>(threadIdx.x) < leaves
                              ? leaf_value(leaf_max[g], leaf_sum[g], leaf_mean[g], top)
                              : make_float2(0.0f, 0.0f);
      const float2 subtree = make_float2(tree_of_lanes(leaf.x), tree_of_lanes(leaf.y));
      if (lane == 0) groups[group] = subtree;
    }
    first += kMergeLeaves;
    if (first >= leaves) break;
    load(first);
  }
  __syncthreads();
  if (warp > 0) return;
  int width = 1, filled = count;  // +0.0 up to a power of two
  while (width < count) width *= 2;
  auto at = [&](int i) { return i < filled ? groups[i] : make_float2(0.0f, 0.0f); };
  for (; width > 32; width /= 2, filled = width) {
    for (int i = lane; i < width / 2; i += 32) {
      const float2 left = at(2 * i), right = at(2 * i + 1);
      __syncwarp();
      groups[i] = make_float2(__fadd_rn(left.x, right.x), __fadd_rn(left.y, right.y));
      __syncwarp();
    }
  }
  float2 root = at(lane);
  for (int i = 1; i < width; i *= 2) {
    root.x = __fadd_rn(root.x, __shfl_xor_sync(~0u, root.x, i));
    root.y = __fadd_rn(root.y, __shfl_xor_sync(~0u, root.y, i));
  }
  if (lane == 0) results<true>(root, top, target_logit, out, total, to);
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

__global__ void __launch_bounds__(128) row_table_kernel(Rows rows, Upstream upstream, int64_t tokens, float* table) {
  await_previous();
  let_next_start();
  set_zeros(upstream, gridDim.x);
  set_rows_to_zero(upstream);
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (slot >= active_of(rows.active, rows.skipped, tokens)) return;
  write_row(table, slot, row_grad(rows, upstream, slot));
}

constexpr int kRowsPerThread = 4, kChunksPerThread = 2, kColumnsPerBlock = 2048 * kChunksPerThread;
static_assert(kColumnsPerBlock == 32 * kLeaf, "a lane for each leaf of a block");

// Rows from the last active one on become zero up to a whole tile of k of the product over tokens. From the last columns to
// the first: the product in front wrote the last ones last, they are still in the L2; the next one reads the first ones first.
__global__ void __launch_bounds__(256) gradient_kernel(Rows rows, Upstream upstream, __nv_bfloat16* data, int64_t tokens,
                                                       int stride, unsigned row_blocks, unsigned across) {
  __shared__ RowGrad grads[kRowsPerThread];
  __shared__ LeafGrad leaves[kRowsPerThread][32];
  __shared__ int targets[kRowsPerThread];
  await_previous();
  let_next_start();
  set_zeros(upstream, gridDim.x);
  set_rows_to_zero(upstream);
  const int64_t active = active_of(rows.active, rows.skipped, tokens);
  const int64_t first = static_cast<int64_t>(blockIdx.x % row_blocks) * kRowsPerThread, end = (active + 63) / 64 * 64;
  if (first >= end) return;
  const int block_begin = static_cast<int>(across - 1 - blockIdx.x / row_blocks) * kColumnsPerBlock;
  const int begin = block_begin + static_cast<int>(threadIdx.x) * 8;
  uint4 packed[kChunksPerThread][kRowsPerThread];
#pragma unroll
  for (int c = 0; c < kChunksPerThread; ++c) {
    const int column = begin + c * 2048;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      packed[c][r] = make_uint4(0, 0, 0, 0);
      if (first + r < active && column < stride) {
        packed[c][r] = *reinterpret_cast<const uint4*>(data + (first + r) * stride + column);
      }
    }
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (warp < kRowsPerThread && first + warp < active) {  // a warp a row, while those loads are under way
    const int leaf = block_begin / kLeaf + lane;
    const float leaf_max = leaf < rows.leaves ? rows.leaf_max[(first + warp) * rows.leaves + leaf] : 0.0f;
    const int64_t hit = rows.targets[first + warp] - rows.start;
    const RowGrad grad = row_grad(rows, upstream, first + warp);
    leaves[warp][lane] = LeafGrad::of(leaf_max, grad);
    if (lane == 0) {
      targets[warp] = hit >= 0 && hit < INT_MAX ? static_cast<int>(hit) : -1;
      grads[warp] = grad;
    }
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const int64_t row = first + r;
    if (row >= tokens || row >= end) break;
    RowGrad grad{};
    int target = -1;
    if (row < active) {
      grad = grads[r];
      target = targets[r];
    }
#pragma unroll
    for (int c = 0; c < kChunksPerThread; ++c) {
      const int column = begin + c * 2048;
      if (column >= stride) break;
      if (row < active) {
        gradients_of_chunk(packed[c][r], target - column, leaves[r][(column - block_begin) / kLeaf], grad);
      }
      *reinterpret_cast<uint4*>(data + row * stride + column) = packed[c][r];
    }
  }
}

constexpr int kPrepareLeast = 4, kPrepareMost = 32;                 // rows of a block
constexpr int kPrepareBlocks = 528, kCopies = 8, kTargetsAhead = 8;  // four blocks a processor; loads of a thread in flight

// Rows that take part move to the front, in order: their hidden states, targets, temperatures.
__global__ void __launch_bounds__(256) prepare_kernel(Prepare task, int each, unsigned chunks) {
  __shared__ int counts[2][kWarps];
  __shared__ int slots[kPrepareMost];
  await_previous();
  let_next_start();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * each;
  const int here = static_cast<int>(task.tokens - first < each ? task.tokens - first : each);
  const unsigned copies = here * chunks;
  const uint4* hidden = reinterpret_cast<const uint4*>(task.hidden.data) + first * (task.hidden.stride / 8);
  uint4 ahead[kCopies];
  // 16 bytes each. The first ones are on their way before it is known which of these rows take part.
  auto load = [&](unsigned from) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const unsigned at = from + i * 256 + threadIdx.x, row = at / chunks;
      if (at < copies && (from == 0 || slots[row] >= 0)) {
        ahead[i] = __ldcs(hidden + row * (task.hidden.stride / 8) + (at - row * chunks));
      }
    }
  };
  load(0);
  const int64_t row = first + lane;
  const bool inside = warp == 0 && lane < here;
  const int64_t target = inside ? task.targets[row] : task.ignore;
  int before = 0, total = 0;  // rows that take part, in front of this block's and in all
  for (int64_t from = threadIdx.x; from < task.tokens; from += 256 * kTargetsAhead) {
    int64_t targets[kTargetsAhead];
#pragma unroll
    for (int i = 0; i < kTargetsAhead; ++i) {
      targets[i] = from + i * 256 < task.tokens ? task.targets[from + i * 256] : task.ignore;
    }
#pragma unroll
    for (int i = 0; i < kTargetsAhead; ++i) {
      total += targets[i] != task.ignore;
      before += targets[i] != task.ignore && from + i * 256 < first;
    }
  }
  total = __reduce_add_sync(~0u, total);
  before = __reduce_add_sync(~0u, before);
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
    const bool takes_part = target != task.ignore;
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
  if (task.whole && total == task.tokens) return;
  uint4* picked = reinterpret_cast<uint4*>(task.picked);
  for (unsigned from = 0; from < copies; from += 256 * kCopies) {
    if (from > 0) load(from);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const unsigned at = from + i * 256 + threadIdx.x, row_here = at / chunks;
      if (at < copies && slots[row_here] >= 0) {
        picked[static_cast<int64_t>(slots[row_here]) * chunks + (at - row_here * chunks)] = ahead[i];
      }
    }
  }
  // Zeros after the last one, as far as a product over tokens reads.
  const int64_t end = (total + 63) / 64 * 64, zeros = ((end < task.tokens ? end : task.tokens) - total) * chunks;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * 256;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < zeros; i += threads) {
    picked[static_cast<int64_t>(total) * chunks + i] = make_uint4(0, 0, 0, 0);
  }
}

// out[row] = bf16(values[place[row]]), 0 where place is -1; 8 values a thread.
__global__ void __launch_bounds__(256)
    place_kernel(const float* values, const int* place, __nv_bfloat16* out, int64_t rows, int64_t chunks) {
  await_previous();
  let_next_start();
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

__global__ void __launch_bounds__(256) add_kernel(float4* left, const float4* right, int64_t count) {
  await_previous();
  let_next_start();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (at >= count) return;
  const float4 a = left[at], b = __ldcs(right + at);
  left[at] = make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
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
      z[i] = column < columns && column < rows.columns ? __fdiv_rn(logits[row * stride + column], temperature) : -INFINITY;
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

}  // namespace

void merge(Rows rows, int64_t tokens, const int64_t* order, float* out, int64_t total, cudaStream_t stream) {
  if (tokens == 0) return;
  if (rows.leaves > kMostGroups * 32) throw std::runtime_error("merge of leaves: at most 32768 leaves of 128 columns");
  launch_dependent("merge of leaves", merge_kernel, {blocks(tokens, 1), kMergeThreads}, stream, rows, tokens, order, out,
                   total);
}

void prepare(Prepare task, cudaStream_t stream) {
  if (task.tokens == 0) return;
  const int64_t each = std::clamp<int64_t>(blocks(task.tokens, kPrepareBlocks), kPrepareLeast, kPrepareMost);
  launch_dependent("rows that take part", prepare_kernel, {blocks(task.tokens, each), 256}, stream, task,
                   static_cast<int>(each), static_cast<unsigned>(task.hidden.cols / 8));
}

void row_table(Rows rows, Upstream upstream, int64_t tokens, float* table, cudaStream_t stream) {
  if (tokens == 0) return;
  launch_dependent("gradients of rows", row_table_kernel, {blocks(tokens, 128), 128}, stream, rows, upstream, tokens, table);
}

void place_rows(const float* values, const int* place, Matrix out, cudaStream_t stream) {
  if (out.rows == 0 || out.cols == 0) return;
  launch_dependent("rounding of rows", place_kernel, {blocks(out.rows * (out.cols / 8), 256), 256}, stream, values, place,
                   static_cast<__nv_bfloat16*>(out.data), out.rows, out.cols / 8);
}

void accumulate(float* left, const float* right, int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  launch_dependent("sum of segments", add_kernel, {blocks(count / 4, 256), 256}, stream, reinterpret_cast<float4*>(left),
                   reinterpret_cast<const float4*>(right), count / 4);
}

void tree_nodes(Rows rows, const float* m, const int* ranges, int count, float* nodes, int64_t tokens, cudaStream_t stream) {
  if (tokens == 0 || count == 0) return;
  const dim3 grid(blocks(tokens, kWarps), static_cast<unsigned>(count));
  nodes_kernel<<<grid, kWarps * 32, 0, stream>>>(rows, m, ranges, nodes, tokens);
  check(cudaGetLastError(), "subtrees of leaves");
}

void finish(float* nodes, int slots, const int* merges, int count, int root, const float* m, const float* target_logit,
            float* out, int64_t tokens, cudaStream_t stream) {
  if (tokens == 0) return;
  finish_kernel<<<blocks(tokens, 128), 128, 0, stream>>>(nodes, slots, merges, count, root, m, target_logit, out, tokens);
  check(cudaGetLastError(), "root of the vocabulary tree");
}

void gradient_in_place(Rows rows, Upstream upstream, Matrix kept, cudaStream_t stream) {
  if (kept.rows == 0 || kept.stride == 0) return;
  const unsigned across = blocks(kept.stride, kColumnsPerBlock), row_blocks = blocks(kept.rows, kRowsPerThread);
  launch_dependent("gradient of kept logits", gradient_kernel, {across * row_blocks, 256}, stream, rows, upstream,
                   static_cast<__nv_bfloat16*>(kept.data), kept.rows, static_cast<int>(kept.stride), row_blocks, across);
}

void logits_statistics(Rows rows, Matrix logits, cudaStream_t stream) {
  if (logits.rows == 0 || rows.leaves == 0) return;
  const dim3 grid(blocks(rows.leaves, kWarps), static_cast<unsigned>(logits.rows < 32768 ? logits.rows : 32768));
  logits_kernel<<<grid, kWarps * 32, 0, stream>>>(rows, static_cast<const float*>(logits.data), logits.rows, logits.cols,
                                                  logits.stride);
  check(cudaGetLastError(), "statistics of logits");
}

void elementwise(const float* x, float* y, int64_t count, bool logarithm, cudaStream_t stream) {
  if (count == 0) return;
  elementwise_kernel<<<blocks(count, 256), 256, 0, stream>>>(x, y, count, logarithm);
  check(cudaGetLastError(), "exp or log");
}

}  // namespace rlk::sm90
