// out[M, N] = A[M, K] B[N, K]^T with K in segments that merge in a binary tree, in one launch, for many rows.
//
// Tiles of 128 x 256 a block, a cluster of two shares B: all registers of a consumer hold one segment. Of a finished even
// segment the left half waits in registers, the right half in shared memory; subtrees of two and of four wait in memory
// that stays in the L2, where the thread that wrote a value is the one that reads it. Each segment is one chain over
// ascending k from zero, so neither tiles nor scheduling change a bit.
#include "epilogue.cuh"
#include "tensor_map.h"

#include <algorithm>

namespace rlk::sm90 {
namespace {

constexpr int kDeep = 3, kGroupColumns = 8, kBytesWaiting = 2 * 64 * 128 * 4;  // group: tiles of 256 columns side by side
constexpr int kBytesAll = kDeep * kBytesStage + kBytesWaiting + 256 + 1024;

struct Wide {
  CUtensorMap a, b;
  void* out;
  float4* scratch;
  int rows, cols;
  int parts, part_depth, part_tiles;  // a segment is slice s of each part of K: tiles of k of a slice
  int wide;                           // fp32 output
  int zero;                           // 0, which the compiler does not know
};

struct Place {
  int m, n;
  bool shares;  // not the last 128 rows of an odd number: there the cluster computes 128 x 512
};

struct Raster {
  int pairs, odd, columns, count;

  __device__ Raster(int rows, int cols) {
    const int tiles_m = (rows + kTileM - 1) / kTileM;
    pairs = tiles_m / 2;
    odd = tiles_m % 2;
    columns = (cols + kTileN - 1) / kTileN;
    count = pairs * columns + odd * ((columns + 1) / 2);
  }
  __device__ __forceinline__ Place at(int id, int rank) const {
    const int per_group = pairs * kGroupColumns + odd * (kGroupColumns / 2);
    const int group = id / per_group, inside = id % per_group, first = group * kGroupColumns;
    const int own = min(kGroupColumns, columns - first), beyond = inside - pairs * own;
    if (beyond >= 0) return {pairs * 2 * kTileM, (first + beyond * 2 + rank) * kTileN, false};
    return {(inside / own * 2 + rank) * kTileM, (first + inside % own) * kTileN, true};
  }
};

struct Stage {
  int index = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++index == kDeep) {
      index = 0;
      phase ^= 1;
    }
  }
};

// Keeps the compiler from moving uses of the accumulators across the asynchronous products.
__device__ __forceinline__ void pin64(float (&acc)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// One segment of `count` > 0 tiles of k.
template <int TransposeB>
__device__ __forceinline__ void chain(float (&left)[64], float (&right)[64], int count, Stage& at, uint32_t base,
                                      uint32_t full, uint32_t empty, int own, int thread) {
  constexpr int kStepB = TransposeB ? 2048 : 32;
  const bool signals = thread % 32 == 0 && thread < kCluster * 32;
  const auto before = [&] { return (at.index == 0 ? kDeep : at.index) - 1; };
  pin64(left);
  pin64(right);
#pragma unroll 1
  for (int kt = 0;;) {
    barrier_wait(full + at.index * 8, at.phase);
    const uint32_t stage = base + at.index * kBytesStage;
    const uint64_t a = descriptor(stage + own * (kBytesA / 2), 8192, 1024), b = descriptor(stage + kBytesA, 8192, 1024);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) {
      wgmma_64x256x16<0, TransposeB>(left, right, a + (k * 32 >> 4), b + (k * kStepB >> 4), kt > 0 || k > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (kt > 0 && signals) barrier_arrive(empty + before() * 8, thread / 32);
    at.next();
    if (++kt == count) break;
  }
  wgmma_wait<0>();
  pin64(left);
  pin64(right);
  if (signals) barrier_arrive(empty + before() * 8, thread / 32);
}

// Values of one thread that wait in global memory, 256 threads side by side.
__device__ __forceinline__ void put(float4* at, const float (&x)[64]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) __stcg(at + i * 256, make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]));
}
__device__ __forceinline__ void add_waiting(const float4* at, float (&x)[64]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float4 v = __ldcg(at + i * 256);
    x[4 * i] = __fadd_rn(v.x, x[4 * i]);
    x[4 * i + 1] = __fadd_rn(v.y, x[4 * i + 1]);
    x[4 * i + 2] = __fadd_rn(v.z, x[4 * i + 2]);
    x[4 * i + 3] = __fadd_rn(v.w, x[4 * i + 3]);
  }
}

template <int Count, int TransposeB>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1) wide_kernel(const __grid_constant__ Wide task) {
  extern __shared__ uint8_t raw[];
  const uint32_t base = (smem_address(raw) + 1023) & ~1023u;
  const uint32_t waiting = base + kDeep * kBytesStage, full = waiting + kBytesWaiting, empty = full + kDeep * 8;
  const int group = static_cast<int>(threadIdx.x) / 128, thread = threadIdx.x % 128;
  const int clusters = static_cast<int>(gridDim.x) / kCluster;
  const int tiles = Raster(task.rows, task.cols).count;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kDeep; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(empty + i * 8, 2 * kCluster);
    }
    barrier_init_fence();
  }
  cluster_sync();

  if (group == 0) {
    registers_down<40>();
    if (thread == 0) {
      const Raster raster(task.rows, task.cols);
      const int rank = static_cast<int>(cluster_rank());
      Stage at;
      for (int id = static_cast<int>(blockIdx.x) / kCluster; id < tiles; id += clusters) {
        const Place place = raster.at(id, rank);
        for (int slice = 0; slice < Count * task.parts; ++slice) {
          int k = slice % task.parts * task.part_depth + slice / task.parts * task.part_tiles * kTileK;
          for (int kt = 0; kt < task.part_tiles; ++kt, k += kTileK) {
            barrier_wait(empty + at.index * 8, at.phase ^ 1);
            const uint32_t barrier = full + at.index * 8, a = base + at.index * kBytesStage, b = a + kBytesA;
            barrier_expect(barrier, kBytesStage);
            load_tile(a, &task.a, barrier, k, place.m);
            if constexpr (TransposeB) {
              for (int chunk = place.shares ? rank * 2 : 0; chunk < (place.shares ? rank * 2 + 2 : 4); ++chunk) {
                if (place.shares) load_tile_multicast(b + chunk * 8192, &task.b, barrier, place.n + chunk * 64, k, 3);
                else load_tile(b + chunk * 8192, &task.b, barrier, place.n + chunk * 64, k);
              }
            } else if (place.shares) {
              load_tile_multicast(b + rank * 16384, &task.b, barrier, k, place.n + rank * 128, 3);
            } else {
              load_tile(b, &task.b, barrier, k, place.n);
              load_tile(b + 16384, &task.b, barrier, k, place.n + 128);
            }
            at.next();
          }
        }
      }
    }
  } else {
    registers_up<232>();
    const int own = group - 1, length = task.parts * task.part_tiles, lane = thread % 32, warp = own * 4 + thread / 32;
    const uint32_t mine = waiting + warp * 8192;
    Stage at;
    float left[64], right[64], even[64];
    for (int id = static_cast<int>(blockIdx.x) / kCluster; id < tiles; id += clusters) {
#pragma unroll 1
      for (int pair = 0; pair < Count / 2; ++pair) {
        chain<TransposeB>(left, right, length, at, base, full, empty, own, thread);
#pragma unroll
        for (int i = 0; i < 64; ++i) even[i] = __int_as_float(__float_as_int(left[i]) ^ task.zero);  // a copy that stays one
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(mine + i * 512 + lane * 16), "f"(right[4 * i]),
                       "f"(right[4 * i + 1]), "f"(right[4 * i + 2]), "f"(right[4 * i + 3]) : "memory");
        }
        chain<TransposeB>(left, right, length, at, base, full, empty, own, thread);
#pragma unroll
        for (int i = 0; i < 64; ++i) left[i] = __fadd_rn(even[i], left[i]);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          float4 v;
          asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                       : "r"(mine + i * 512 + lane * 16) : "memory");
          right[4 * i] = __fadd_rn(v.x, right[4 * i]);
          right[4 * i + 1] = __fadd_rn(v.y, right[4 * i + 1]);
          right[4 * i + 2] = __fadd_rn(v.z, right[4 * i + 2]);
          right[4 * i + 3] = __fadd_rn(v.w, right[4 * i + 3]);
        }
        if constexpr (Count > 2) {
          float4* two = task.scratch + static_cast<int64_t>(blockIdx.x) * (Count / 4) * 8192 + own * 128 + thread;
          float4* four = two + 8192;
          if (pair % 2 == 0) {
            put(two, left);
            put(two + 4096, right);
          } else {
            add_waiting(two, left);
            add_waiting(two + 4096, right);
            if constexpr (Count == 8) {
              if (pair == 1) {
                put(four, left);
                put(four + 4096, right);
              } else {
                add_waiting(four, left);
                add_waiting(four + 4096, right);
              }
            }
          }
        }
      }
      const Place place = Raster(task.rows, task.cols).at(id, static_cast<int>(cluster_rank()));
      const int first = place.m + own * 64 + (thread / 32) * 16;
      if (task.wide) {
        const int row = first + lane / 4, column = place.n + (lane % 4) * 2;
        float* out = static_cast<float*>(task.out) + static_cast<int64_t>(row) * task.cols + column;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (row + 8 * h >= task.rows) continue;
#pragma unroll
          for (int j = 0; j < 16; ++j) {
            float* to = out + static_cast<int64_t>(8 * h) * task.cols + 8 * j;
            if (column + 8 * j < task.cols) *reinterpret_cast<float2*>(to) = make_float2(left[4 * j + 2 * h], left[4 * j + 2 * h + 1]);
            if (column + 128 + 8 * j < task.cols) *reinterpret_cast<float2*>(to + 128) = make_float2(right[4 * j + 2 * h], right[4 * j + 2 * h + 1]);
          }
        }
      } else {
        const Stager stager{mine, lane};
        stager.send(left, static_cast<__nv_bfloat16*>(task.out), task.cols, task.rows, task.cols, first, place.n);
        stager.send(right, static_cast<__nv_bfloat16*>(task.out), task.cols, task.rows, task.cols, first, place.n + 128);
        __syncwarp();
      }
    }
  }
  __syncwarp();
  cluster_sync();
}

template <int Count, int TransposeB>
void launch_wide(const Wide& task, int64_t scratch, cudaStream_t stream) {
  const int processors = once_a_device([](int device) {
    check(cudaFuncSetAttribute(wide_kernel<Count, TransposeB>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytesAll),
          "shared memory");
    return processors_of(device);
  });
  const int tiles_m = (task.rows + kTileM - 1) / kTileM, columns = (task.cols + kTileN - 1) / kTileN;
  const int count = tiles_m / 2 * columns + tiles_m % 2 * ((columns + 1) / 2);
  const int blocks = std::min(processors / kCluster, count) * kCluster;
  if (scratch < int64_t{blocks} * (Count / 4) * kTileM * kTileN) {
    throw std::runtime_error("segments: scratch must hold 128 x 256 values for each processor and 4 segments");
  }
  wide_kernel<Count, TransposeB><<<static_cast<unsigned>(blocks), kThreads, kBytesAll, stream>>>(task);
  check(cudaGetLastError(), "segments launch");
}

template <int TransposeB>
void choose(const Wide& task, int count, int64_t scratch, cudaStream_t stream) {
  if (count == 2) {
    launch_wide<2, TransposeB>(task, scratch, stream);
  } else if (count == 4) {
    launch_wide<4, TransposeB>(task, scratch, stream);
  } else {
    launch_wide<8, TransposeB>(task, scratch, stream);
  }
}

}  // namespace

void segments_wide(Matrix a, Matrix b, bool transposed, int count, int parts, float* scratch, int64_t scratch_size, void* out,
                   bool wide, cudaStream_t stream) {
  const int64_t cols = transposed ? b.cols : b.rows;
  if (a.rows == 0 || cols == 0) return;
  Wide task{};
  task.a = tensor_map(a, kTileK, kTileM);
  task.b = transposed ? tensor_map(b, 64, kTileK) : tensor_map(b, kTileK, 128);
  task.out = out;
  task.scratch = reinterpret_cast<float4*>(scratch);
  task.rows = static_cast<int>(a.rows);
  task.cols = static_cast<int>(cols);
  task.parts = parts;
  task.part_depth = static_cast<int>(a.cols / parts);
  task.part_tiles = task.part_depth / count / kTileK;
  task.wide = wide;
  transposed ? choose<1>(task, count, scratch_size, stream) : choose<0>(task, count, scratch_size, stream);
}

}  // namespace rlk::sm90
