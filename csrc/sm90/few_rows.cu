// y[M, N] = x[M, K] w[N, K]^T for at most 64 rows of x: as fast as the weight can be read.
//
// Operands swapped: a block owns 32 rows of w (two tiles of 16, M of the matrix instruction) and all rows of x (N), and
// streams K through a deep ring of bulk copies; four warps multiply. K is one ascending chain a segment; finished
// segments wait in registers for their neighbours in the tree. Blocks of a cluster share the rows of x: each loads a
// part and sends it to all.
#include "launch.h"
#include "ptx.cuh"
#include "tensor_map.h"

#include <algorithm>
#include <mutex>

namespace rlk::sm90 {
namespace {

constexpr int kRowsW = 32, kDepth = 128, kMultipliers = 4, kFewThreads = (kMultipliers + 1) * 32;
constexpr int kMostShared = 227 * 1024 - 2048;

struct FewRows {
  CUtensorMap w, x;
  void* out;
  int rows, cols, steps;      // M, N, tiles of k
  int segments, segment_steps;
  int stages, wide;           // wide: fp32 output
};

template <int Tokens>
constexpr int stage_bytes() {
  return (kRowsW + Tokens) * kDepth * 2;
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Address of 16 bytes (chunk 0 .. 7) of a row in a tile of 64 k, 128-byte swizzle.
__device__ __forceinline__ uint32_t swizzled(uint32_t tile, int row, int chunk) {
  return tile + row * 128 + ((chunk ^ (row & 7)) << 4);
}

template <int Tokens, int Cluster>
__global__ void __launch_bounds__(kFewThreads) few_rows_kernel(const __grid_constant__ FewRows task) {
  constexpr int kParts = Tokens >= 16 ? 2 : 1;          // warps side by side over the rows of x
  constexpr int kTiles = Tokens / kParts / 8;           // tiles of 8 rows of x for each warp
  constexpr int kBytes = stage_bytes<Tokens>(), kBytesW = kRowsW * kDepth * 2, kBytesX = Tokens * 128;  // X: 64 k
  extern __shared__ uint8_t raw[];
  const uint32_t base = (smem_address(raw) + 1023) & ~1023u;
  const uint32_t full = base + task.stages * kBytes, empty = full + task.stages * 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = static_cast<int>(blockIdx.x) * kRowsW;
  const uint32_t rank = Cluster > 1 ? cluster_rank() : 0;

  if (threadIdx.x == 0) {
    for (int i = 0; i < task.stages; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(empty + i * 8, 2 * kParts * Cluster);
    }
    barrier_init_fence();
  }
  if constexpr (Cluster > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }

  if (warp == kMultipliers) {
    if (lane == 0) {
      int stage = 0;
      uint32_t phase = 0;
      for (int step = 0; step < task.steps; ++step) {
        barrier_wait(empty + stage * 8, phase ^ 1);
        const uint32_t barrier = full + stage * 8, w = base + stage * kBytes, x = w + kBytesW;
        barrier_expect(barrier, kBytes);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int k = step * kDepth + half * 64;
          load_tile(w + half * (kBytesW / 2), &task.w, barrier, k, first_row);
          if constexpr (Cluster > 1) {
            constexpr int kShare = Tokens / Cluster;
            load_tile_multicast(x + half * kBytesX + rank * kShare * 128, &task.x, barrier, k, rank * kShare,
                                static_cast<uint16_t>((1 << Cluster) - 1));
          } else {
            load_tile(x + half * kBytesX, &task.x, barrier, k, 0);
          }
        }
        if (++stage == task.stages) {
          stage = 0;
          phase ^= 1;
        }
      }
    }
  } else if (warp < 2 * kParts) {
    const int own_w = (warp % 2) * 16, own_x = (warp / 2) * (Tokens / kParts);
    const int row_w = own_w + lane % 16, high = lane / 16;  // as ldmatrix wants them: k 0..7 and 8..15
    float acc[kTiles][4] = {}, one[kTiles][4], two[kTiles][4], four[kTiles][4];
    int stage = 0, segment = 0, left = task.segment_steps;
    uint32_t phase = 0;
    for (int step = 0; step < task.steps; ++step) {
      barrier_wait(full + stage * 8, phase);
      const uint32_t w = base + stage * kBytes, x = w + kBytesW;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t tile_w = w + half * (kBytesW / 2), tile_x = x + half * kBytesX;
        uint32_t a[4][4], b[4][kTiles][2];
#pragma unroll
        for (int k = 0; k < 4; ++k) load_matrices(a[k], swizzled(tile_w, row_w, 2 * k + high));
        if constexpr (kTiles == 1) {
#pragma unroll
          for (int k = 0; k < 4; k += 2) {  // one tile, 32 k at a time
            uint32_t r[4];
            load_matrices(r, swizzled(tile_x, own_x + lane % 8, 2 * k + lane / 8));
            b[k][0][0] = r[0], b[k][0][1] = r[1], b[k + 1][0][0] = r[2], b[k + 1][0][1] = r[3];
          }
        } else {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
#pragma unroll
            for (int t = 0; t < kTiles; t += 2) {  // two tiles, 16 k at a time
              uint32_t r[4];
              load_matrices(r, swizzled(tile_x, own_x + t * 8 + lane % 8 + high * 8, 2 * k + lane / 8 % 2));
              b[k][t][0] = r[0], b[k][t][1] = r[1], b[k][t + 1][0] = r[2], b[k][t + 1][1] = r[3];
            }
          }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
          for (int t = 0; t < kTiles; ++t) multiply(acc[t], a[k], b[k][t][0], b[k][t][1]);
        }
      }
      __syncwarp();
      if constexpr (Cluster > 1) {
        if (lane < Cluster) barrier_arrive(empty + stage * 8, lane);
      } else if (lane == 0) {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty + stage * 8) : "memory");
      }
      if (++stage == task.stages) {
        stage = 0;
        phase ^= 1;
      }
      if (--left == 0 && task.segments > 1) {  // a binary counter holds the finished subtrees
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float total = acc[t][i];
            if (segment & 1) {
              total = __fadd_rn(one[t][i], total);
              if (segment & 2) {
                total = __fadd_rn(two[t][i], total);
                if (segment & 4) {
                  total = __fadd_rn(four[t][i], total);
                } else {
                  four[t][i] = total;
                }
              } else {
                two[t][i] = total;
              }
            } else {
              one[t][i] = total;
            }
            acc[t][i] = segment + 1 == task.segments ? total : 0.0f;
          }
        }
        ++segment;
        left = task.segment_steps;
      }
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = own_x + t * 8 + (lane % 4) * 2 + i % 2, column = first_row + own_w + lane / 4 + (i / 2) * 8;
        if (row >= task.rows || column >= task.cols) continue;
        const int64_t at = static_cast<int64_t>(row) * task.cols + column;
        if (task.wide) {
          static_cast<float*>(task.out)[at] = acc[t][i];
        } else {
          static_cast<__nv_bfloat16*>(task.out)[at] = __float2bfloat16_rn(acc[t][i]);
        }
      }
    }
  }
  if constexpr (Cluster > 1) {  // nobody leaves while others may still send to it or signal it
    __syncwarp();
    cluster_sync();
  }
}

template <int Tokens, int Cluster>
void launch_few(FewRows task, Matrix x, Matrix w, cudaStream_t stream) {
  static std::once_flag once;
  static int processors = 0;
  std::call_once(once, [] {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "multiprocessor count");
    check(cudaFuncSetAttribute(few_rows_kernel<Tokens, Cluster>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kMostShared),
          "shared memory");
  });
  task.w = tensor_map(w, 64, kRowsW);
  task.x = tensor_map(x, 64, Tokens / Cluster);
  const int blocks = static_cast<int>((w.rows + kRowsW * Cluster - 1) / (kRowsW * Cluster)) * Cluster;
  const int shared = blocks <= processors ? kMostShared : kMostShared / 2 - 1024;  // one block a processor, or two
  task.stages = std::min((shared - 1024) / (stage_bytes<Tokens>() + 16), std::max(task.steps, 2));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kFewThreads);
  config.dynamicSmemBytes = static_cast<size_t>(task.stages * (stage_bytes<Tokens>() + 16) + 1024);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = Cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, few_rows_kernel<Tokens, Cluster>, task), "few rows launch");
}

}  // namespace

void few_rows(Matrix x, Matrix w, int segments, void* out, bool wide, cudaStream_t stream) {
  if (x.rows == 0 || w.rows == 0) return;
  FewRows task{};
  task.out = out;
  task.rows = static_cast<int>(x.rows);
  task.cols = static_cast<int>(w.rows);
  task.steps = static_cast<int>((x.cols + kDepth - 1) / kDepth);
  task.segments = segments;
  task.segment_steps = std::max(task.steps / segments, 1);
  task.wide = wide;
  if (x.rows <= 8) {
    launch_few<8, 1>(task, x, w, stream);
  } else if (x.rows <= 16) {
    launch_few<16, 1>(task, x, w, stream);
  } else if (x.rows <= 32) {
    launch_few<32, 4>(task, x, w, stream);
  } else {
    launch_few<64, 4>(task, x, w, stream);
  }
}

}  // namespace rlk::sm90
