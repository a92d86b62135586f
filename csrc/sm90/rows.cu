// Kernels over rows of the vocabulary: merge of leaves, gradients in place, statistics of materialised logits.
#include "arith.cuh"
#include "launch.h"

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

// (logp, lse, entropy, log l) of one row into out [4, T].
__device__ __forceinline__ void results(float2 root, float m, float target_logit, float* out, int64_t tokens, int64_t row) {
  const float log_sum = log_(root.x);
  out[row] = __fsub_rn(__fsub_rn(target_logit, m), log_sum);
  out[row + tokens] = __fadd_rn(m, log_sum);
  out[row + 2 * tokens] = __fsub_rn(log_sum, __fdiv_rn(root.y, root.x));
  out[row + 3 * tokens] = log_sum;
}

__global__ void merge_kernel(Rows rows, int64_t tokens, float* m, float* out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= tokens) return;
  float top = -INFINITY;
  for (int leaf = lane; leaf < rows.leaves; leaf += 32) top = fmaxf(top, rows.leaf_max[row * rows.leaves + leaf]);
#pragma unroll
  for (int i = 1; i < 32; i *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
  const float2 root = subtree(rows, row, top, 0, rows.leaves);
  if (lane != 0) return;
  m[row] = top;
  results(root, top, rows.target_logit[row], out, tokens, row);
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
  results(node(count > 0 ? slots + count - 1 : root), m[row], target_logit[row], out, tokens, row);
}

__global__ void row_grad_kernel(Rows rows, float* table, int64_t tokens) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= tokens) return;
  const RowGrad g = row_grad(rows.state, rows.grads, tokens, row, temperature_of(rows, row));
  reinterpret_cast<float4*>(table)[row * 2] = make_float4(g.max, g.log_sum, g.entropy, g.logp);
  reinterpret_cast<float4*>(table)[row * 2 + 1] = make_float4(g.weight, g.ent, 0.0f, 0.0f);
}

constexpr int kRowsPerThread = 4;

__global__ void __launch_bounds__(256) gradient_kernel(
    Rows rows, const float* table, __nv_bfloat16* data, int64_t tokens, int64_t stride) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x) * 8;
  if (column >= stride) return;
  const int leaf = static_cast<int>(column / kLeaf);
  for (int64_t first = static_cast<int64_t>(blockIdx.y) * kRowsPerThread; first < tokens;
       first += static_cast<int64_t>(gridDim.y) * kRowsPerThread) {
    uint4 packed[kRowsPerThread];
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      if (first + r < tokens) packed[r] = __ldcs(reinterpret_cast<const uint4*>(data + (first + r) * stride + column));
    }
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const int64_t row = first + r;
      if (row >= tokens) break;
      const RowGrad grad = load_row_grad(table, row);
      const LeafGrad gradient = LeafGrad::of(__ldg(rows.leaf_max + row * rows.leaves + leaf), grad);
      gradients_of_chunk(packed[r], __ldg(rows.targets + row) - rows.start - column, gradient, grad);
      *reinterpret_cast<uint4*>(data + row * stride + column) = packed[r];
    }
  }
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

unsigned blocks(int64_t count, int64_t each) { return static_cast<unsigned>((count + each - 1) / each); }

}  // namespace

void merge(Rows rows, int64_t tokens, float* m, float* out, cudaStream_t stream) {
  if (tokens == 0) return;
  merge_kernel<<<blocks(tokens, kWarps), kWarps * 32, 0, stream>>>(rows, tokens, m, out);
  check_launch("merge of leaves");
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

void gradient_in_place(Rows rows, Matrix kept, float* table, cudaStream_t stream) {
  if (kept.rows == 0 || kept.stride == 0) return;
  row_grad_kernel<<<blocks(kept.rows, 128), 128, 0, stream>>>(rows, table, kept.rows);
  check_launch("gradients of rows");
  const int64_t groups = (kept.rows + kRowsPerThread - 1) / kRowsPerThread;
  const dim3 grid(blocks(kept.stride, 2048), static_cast<unsigned>(groups < 65535 ? groups : 65535));
  gradient_kernel<<<grid, 256, 0, stream>>>(
      rows, table, static_cast<__nv_bfloat16*>(kept.data), kept.rows, kept.stride);
  check_launch("gradient of kept logits");
}

void logits_statistics(Rows rows, Matrix logits, cudaStream_t stream) {
  if (logits.rows == 0 || rows.leaves == 0) return;
  const dim3 grid(blocks(rows.leaves, kWarps), static_cast<unsigned>(logits.rows < 32768 ? logits.rows : 32768));
  logits_kernel<<<grid, kWarps * 32, 0, stream>>>(
      rows, static_cast<const float*>(logits.data), logits.rows, logits.cols, logits.stride);
  check_launch("statistics of logits");
}

void elementwise(const float* x, float* y, int64_t count, bool logarithm, cudaStream_t stream) {
  if (count == 0) return;
  elementwise_kernel<<<blocks(count, 256), 256, 0, stream>>>(x, y, count, logarithm);
  check_launch("exp or log");
}

}  // namespace rlk::sm90
