// y[M, N] = x[M, K] w[N, K]^T for at most 128 rows of x: as fast as the weight can be read.
//
// Rows of w are M of the warpgroup product (32 of its 64 rows live, or all of them), rows of x its N. Where these are more than
// 32 it is the other way round: a product then reads no dead rows, and the bandwidth of shared memory is the limit there. One
// thread streams K through a deep ring of bulk copies, a warpgroup multiplies, two where there are more than 64 rows of x;
// blocks walk over tiles of w, one or two blocks a processor. K is one ascending chain a segment; finished segments wait in
// registers for their neighbours in the tree.
#include "launch.h"
#include "ptx.cuh"
#include "tensor_map.h"
#include "wgmma_narrow.cuh"

#include <algorithm>

namespace rlk::sm90 {
namespace {

constexpr int kMostShared = 227 * 1024, kMostStages = 16, kAhead = 2;

struct FewRows {
  CUtensorMap w, x;
  void* out;
  int rows, cols, steps, tiles;  // M, N, tiles of k, tiles of w
  int segments, segment_steps, stages, wide, dependent;
};

// Weights are read once a call: they leave the L2 first.
__device__ __forceinline__ void load_once(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void prefetch_tile(const CUtensorMap* map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(x), "r"(y) : "memory");
}

// acc[4 j + 2 h + b] is row 8 h of those from `column` on, token 8 j + 2 (lane % 4) + b.
template <int Tokens>
__device__ __forceinline__ void store_tokens_as_columns(const float (&acc)[Tokens / 2], const FewRows& task, int column,
                                                        int lane) {
#pragma unroll
  for (int j = 0; j < Tokens / 8; ++j) {
    if (j * 8 >= task.rows) break;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = j * 8 + (lane % 4) * 2;
      if (task.wide) {
        float* out = static_cast<float*>(task.out) + static_cast<int64_t>(token) * task.cols + column + 8 * h;
        if (column + 8 * h < task.cols) {
          if (token < task.rows) out[0] = acc[4 * j + 2 * h];
          if (token + 1 < task.rows) out[task.cols] = acc[4 * j + 2 * h + 1];
        }
      } else {  // neighbours in a row of the output sit four lanes apart: pairs of bf16 leave together
        const bool odd = lane & 4;
        const float keep = odd ? acc[4 * j + 2 * h + 1] : acc[4 * j + 2 * h];
        const float give = odd ? acc[4 * j + 2 * h] : acc[4 * j + 2 * h + 1];
        const float got = __shfl_xor_sync(~0u, give, 4);
        const int row = token + (odd ? 1 : 0), at = column - (odd ? 1 : 0) + 8 * h;
        if (row < task.rows && at < task.cols) {
          *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(task.out) + static_cast<int64_t>(row) * task.cols +
                                             at) = odd ? __floats2bfloat162_rn(got, keep) : __floats2bfloat162_rn(keep, got);
        }
      }
    }
  }
}

// acc[4 j + 2 h + b] is token 16 warp + lane / 4 + 8 h, row 8 j + 2 (lane % 4) + b of the tile of w.
template <int RowsW>
__device__ __forceinline__ void store_tokens_as_rows(const float (&acc)[RowsW / 2], const FewRows& task, int tile, int warp,
                                                     int lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int token = warp * 16 + lane / 4 + 8 * h, column = tile * RowsW + lane % 4 * 2;
    if (token >= task.rows) break;
    const int64_t at = static_cast<int64_t>(token) * task.cols + column;
#pragma unroll
    for (int j = 0; j < RowsW / 8; ++j) {
      if (column + j * 8 >= task.cols) break;  // a multiple of 8
      const float x = acc[4 * j + 2 * h], y = acc[4 * j + 2 * h + 1];
      if (task.wide) {
        *reinterpret_cast<float2*>(static_cast<float*>(task.out) + at + j * 8) = make_float2(x, y);
      } else {
        *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(task.out) + at + j * 8) = __floats2bfloat162_rn(x, y);
      }
    }
  }
}

template <int Tokens, int RowsW, int Depth>
constexpr int kBytesOfStage = (RowsW + Tokens) * Depth * 2;
template <int Tokens>
constexpr int kGroups = (Tokens + 63) / 64;  // warpgroups that multiply; one warp more loads

template <int Tokens, int RowsW, int Depth, bool Tree>
__global__ void __launch_bounds__(kGroups<Tokens> * 128 + 32) few_rows_kernel(const __grid_constant__ FewRows task) {
  constexpr int kChunks = Depth / 64, kBytesW = RowsW * Depth * 2, kStage = kBytesOfStage<Tokens, RowsW, Depth>;
  constexpr bool kTokensAsRows = Tokens >= 64;
  constexpr int kAcc = (kTokensAsRows ? RowsW : Tokens) / 2;
  extern __shared__ uint8_t raw[];
  const uint32_t base = (smem_address(raw) + 1023) & ~1023u;
  const uint32_t full = base + task.stages * kStage, empty = full + task.stages * 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = static_cast<int>(blockIdx.x);

  if (threadIdx.x == kGroups<Tokens> * 128) {
    prefetch_map(&task.w);
    prefetch_map(&task.x);
    for (int i = 0; i < task.stages; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(empty + i * 8, kGroups<Tokens>);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (warp == kGroups<Tokens> * 4) {
    if (lane == 0) {
      uint64_t policy;
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      if (task.dependent) {
        // The kernel in front may still run. Until it has finished, only prefetch: it may be the one that writes w.
        for (int i = 0; i < min(kAhead, task.steps); ++i) {
          for (int c = 0; c < kChunks; ++c) prefetch_tile(&task.w, i * Depth + c * 64, first * RowsW);
        }
        asm volatile("griddepcontrol.wait;" ::: "memory");
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
      }
      int stage = 0;
      uint32_t phase = 0;
      for (int tile = first; tile < task.tiles; tile += static_cast<int>(gridDim.x)) {
        for (int step = 0; step < task.steps; ++step) {
          barrier_wait(empty + stage * 8, phase ^ 1);
          const uint32_t barrier = full + stage * 8, w = base + stage * kStage, x = w + kBytesW;
          barrier_expect(barrier, kBytesW + task.rows * Depth * 2);
#pragma unroll
          for (int c = 0; c < kChunks; ++c) {
            load_once(w + c * RowsW * 128, &task.w, barrier, step * Depth + c * 64, tile * RowsW, policy);
          }
#pragma unroll
          for (int c = 0; c < kChunks; ++c) load_tile(x + c * Tokens * 128, &task.x, barrier, step * Depth + c * 64, 0);
          if (++stage == task.stages) {
            stage = 0;
            phase ^= 1;
          }
        }
      }
    }
  } else {
    int stage = 0;
    uint32_t phase = 0;
    const uint32_t rows_before = kGroups<Tokens> == 1 ? 0 : warp / 4 * 64 * 128;  // bytes of those of the other warpgroup
    const auto release = [&] {  // the stage in front of the current one
      if (threadIdx.x % 128 == 0) {
        const int before = (stage == 0 ? task.stages : stage) - 1;
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty + before * 8) : "memory");
      }
    };
    for (int tile = first; tile < task.tiles; tile += static_cast<int>(gridDim.x)) {
      float acc[kAcc], one[Tree ? kAcc : 1], two[Tree ? kAcc : 1], four[Tree ? kAcc : 1];
      int segment = 0;
      do {
        const int count = Tree ? task.segment_steps : task.steps;
        pin(acc);
#pragma unroll 1
        for (int step = 0;;) {
          barrier_wait(full + stage * 8, phase);
          const uint64_t w = descriptor(base + stage * kStage, 8192, 1024);
          const uint64_t x = descriptor(base + stage * kStage + kBytesW + rows_before, 8192, 1024);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < Depth / 16; ++k) {
            const uint64_t w16 = w + (((k / 4) * RowsW * 128 + (k % 4) * 32) >> 4);
            const uint64_t x16 = x + (((k / 4) * Tokens * 128 + (k % 4) * 32) >> 4);
            wgmma_narrow(acc, kTokensAsRows ? x16 : w16, kTokensAsRows ? w16 : x16, step > 0 || k > 0);
          }
          wgmma_commit();
          wgmma_wait<1>();
          if (step > 0) release();
          if (++stage == task.stages) {
            stage = 0;
            phase ^= 1;
          }
          if (++step == count) break;
        }
        wgmma_wait<0>();
        pin(acc);
        release();
        if constexpr (Tree) {  // a binary counter holds the finished subtrees
#pragma unroll
          for (int i = 0; i < kAcc; ++i) {
            float total = acc[i];
            if (segment & 1) {
              total = __fadd_rn(one[i], total);
              if (segment & 2) {
                total = __fadd_rn(two[i], total);
                if (segment & 4) {
                  total = __fadd_rn(four[i], total);
                } else {
                  four[i] = total;
                }
              } else {
                two[i] = total;
              }
            } else {
              one[i] = total;
            }
            acc[i] = total;
          }
          ++segment;
        }
      } while (Tree && segment < task.segments);
      if constexpr (kTokensAsRows) {
        store_tokens_as_rows<RowsW>(acc, task, tile, warp, lane);
      } else if (RowsW == 64 || warp < 2) {  // the other rows of the product are none of w
        store_tokens_as_columns<Tokens>(acc, task, tile * RowsW + warp * 16 + lane / 4, lane);
      }
    }
  }
}

template <int Tokens, int RowsW, int Depth, bool Tree>
void launch_few(FewRows task, Matrix x, Matrix w, int per_processor, cudaStream_t stream) {
  constexpr int kStage = kBytesOfStage<Tokens, RowsW, Depth>;
  const auto kernel = few_rows_kernel<Tokens, RowsW, Depth, Tree>;
  const int processors = once_a_device([kernel](int device) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostShared - 1024), "shared memory");
    return processors_of(device);
  });
  task.w = tensor_map(w, 64, RowsW);
  // Rows that do not exist would cost a copy more than rows that do (4.5 cycles each). What their place in shared memory holds
  // meets no output that is stored.
  task.x = tensor_map(x, 64, task.rows);
  task.steps = static_cast<int>((x.cols + Depth - 1) / Depth);
  task.segment_steps = std::max(task.steps / task.segments, 1);
  task.stages = std::min((kMostShared / per_processor - 3 * 1024) / (kStage + 16), kMostStages);
  task.tiles = static_cast<int>((w.rows + RowsW - 1) / RowsW);
  const int most = std::min(processors * per_processor, task.tiles), rounds = (task.tiles + most - 1) / most;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((task.tiles + rounds - 1) / rounds));
  config.blockDim = dim3(kGroups<Tokens> * 128 + 32);
  config.dynamicSmemBytes = static_cast<size_t>(task.stages * (kStage + 16) + 1024);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = task.dependent ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, task), "few rows launch");
}

template <int Tokens, int Depth>
void choose(const FewRows& task, Matrix x, Matrix w, int rows_w, int per_processor, cudaStream_t stream) {
  if (task.segments > 1) {
    launch_few<Tokens, 32, Depth, true>(task, x, w, per_processor, stream);
  } else if (rows_w == 32) {
    launch_few<Tokens, 32, Depth, false>(task, x, w, per_processor, stream);
  } else {
    launch_few<Tokens, 64, Depth, false>(task, x, w, per_processor, stream);
  }
}

}  // namespace

void few_rows(Matrix x, Matrix w, int segments, void* out, bool wide, FewRowsLaunch how, cudaStream_t stream) {
  if (x.rows == 0 || w.rows == 0) return;
  FewRows task{};
  task.out = out;
  task.rows = static_cast<int>(x.rows);
  task.cols = static_cast<int>(w.rows);
  task.segments = segments;
  task.wide = wide;
  task.dependent = how.dependent;
  if (x.rows <= 8) {
    choose<8, 256>(task, x, w, how.rows, how.per_processor, stream);
  } else if (x.rows <= 16) {
    choose<16, 256>(task, x, w, how.rows, how.per_processor, stream);
  } else if (x.rows <= 32) {
    choose<32, 256>(task, x, w, how.rows, how.per_processor, stream);
  } else if (x.rows <= 64) {
    choose<64, 128>(task, x, w, how.rows, how.per_processor, stream);
  } else {
    choose<128, 128>(task, x, w, how.rows, how.per_processor, stream);
  }
}

}  // namespace rlk::sm90
