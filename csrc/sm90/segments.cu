// out[M, N] = A[M, K] B[N, K]^T with K in segments that merge in a binary tree, in one launch.
//
// A cluster of two blocks side by side computes 128 x 256 outputs, each block 128 x 128 and each of its two consumer
// warpgroups 64 x 128: small enough that the accumulators of two segments and a finished subtree of two fit in registers;
// of eight segments the subtree of four waits in shared memory. The blocks share A: each loads half of its rows and sends
// them to both. While one warpgroup adds, the other's products run. Clusters of four share B as well and move a third fewer
// bytes from the L2, but only 30 of them run on 132 processors, and the slowest wave decides.
// Each segment is one chain over ascending k from zero, so neither tiles nor scheduling change a bit.
#include "epilogue.cuh"
#include "tensor_map.h"

#include <algorithm>
#include <type_traits>

namespace rlk::sm90 {
namespace {

constexpr int kSide = 128;  // rows and columns of a block
constexpr int kBytesHalf = 64 * kTileK * 2, kBytesOperand = 2 * kBytesHalf, kBytesPair = 2 * kBytesOperand;

// Stages, and the memory behind them, of which each consumer warp has an eighth: its stager, and of eight segments, at
// other times, the subtree of four.
template <int Count>
constexpr int kDeep = Count == 8 ? 5 : 6;
template <int Count>
constexpr int kBytesOwn = Count == 8 ? 16 * kSide * 4 : 4096;
template <int Count>
constexpr int kBytesSegments = kDeep<Count> * kBytesPair + 8 * kBytesOwn<Count> + 256 + 1024;

struct Segments {
  CUtensorMap a, b;
  void* out;
  int rows, cols;
  int parts, part_depth, part_tiles;  // a segment is slice s of each part of K: tiles of k of a slice
  int wide;                           // fp32 output
};

// Tiles of a cluster. Groups of columns come one after the other, so that B stays in the L2.
struct Raster {
  static constexpr int kGroup = 8;
  int rows, columns, count;

  __host__ __device__ Raster(int m, int n) : rows((m + kSide - 1) / kSide), columns((n + 2 * kSide - 1) / (2 * kSide)),
                                             count(rows * columns) {}
  // First row and column of the block `rank` of the cluster.
  __device__ __forceinline__ int2 at(int id, int rank) const {
    const int group = id / (rows * kGroup), inside = id % (rows * kGroup), width = min(kGroup, columns - group * kGroup);
    return {inside / width * kSide, ((group * kGroup + inside % width) * 2 + rank) * kSide};
  }
};

__device__ __forceinline__ void put_shared(uint32_t at, const float* x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

// x = what waits there + x
__device__ __forceinline__ void add_shared(uint32_t at, float* x) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
  x[0] = __fadd_rn(v.x, x[0]);
  x[1] = __fadd_rn(v.y, x[1]);
  x[2] = __fadd_rn(v.z, x[2]);
  x[3] = __fadd_rn(v.w, x[3]);
}

__device__ __forceinline__ void add(const float (&left)[64], float (&right)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) right[i] = __fadd_rn(left[i], right[i]);
}

// fp32 of one thread's 64 x 128 accumulators: row and column of its first value.
__device__ __forceinline__ void store_floats(const float (&acc)[64], const Segments& task, int row, int column) {
  float* out = static_cast<float*>(task.out) + static_cast<int64_t>(row) * task.cols + column;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if (row + 8 * h < task.rows && column + 8 * j < task.cols) {
        *reinterpret_cast<float2*>(out + static_cast<int64_t>(8 * h) * task.cols + 8 * j) =
            make_float2(acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]);
      }
    }
  }
}

// One segment of `count` > 0 tiles of k.
template <int Deep, int TransposeB>
__device__ __forceinline__ void chain(
    float (&acc)[64], int count, RingOf<Deep>& at, uint32_t base, uint32_t full, uint32_t empty, int own, int thread) {
  constexpr int kStepB = TransposeB ? 2048 : 32;  // bytes from one k16 to the next
  const bool signals = thread % 32 == 0 && thread < kCluster * 32;  // one thread for each block of the cluster
  pin(acc);
#pragma unroll 1
  for (int kt = 0;;) {
    barrier_wait(full + at.stage * 8, at.phase);
    const uint32_t stage = base + at.stage * kBytesPair;
    const uint64_t a = descriptor(stage + own * kBytesHalf, 8192, 1024);
    const uint64_t b = descriptor(stage + kBytesOperand, 8192, 1024);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) {
      wgmma_64x128x16<0, TransposeB>(acc, a + (k * 32 >> 4), b + (k * kStepB >> 4), kt > 0 || k > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (kt > 0 && signals) barrier_arrive(empty + at.before() * 8, thread / 32);
    at.next();
    if (++kt == count) break;
  }
  wgmma_wait<0>();
  pin(acc);
  if (signals) barrier_arrive(empty + at.before() * 8, thread / 32);
}

template <int Count, int TransposeB>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    segments_kernel(const __grid_constant__ Segments task) {
  constexpr int kDepth = kDeep<Count>;
  extern __shared__ uint8_t raw[];
  const uint32_t base = (smem_address(raw) + 1023) & ~1023u;
  const uint32_t waiting = base + kDepth * kBytesPair;
  const uint32_t full = waiting + 8 * kBytesOwn<Count>, empty = full + kDepth * 8;
  const int group = static_cast<int>(threadIdx.x) / 128, thread = threadIdx.x % 128;
  const int clusters = static_cast<int>(gridDim.x) / kCluster;
  const int tiles = Raster(task.rows, task.cols).count;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kDepth; ++i) {
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
      RingOf<kDepth> at;
      for (int id = static_cast<int>(blockIdx.x) / kCluster; id < tiles; id += clusters) {
        const auto [m, n] = raster.at(id, rank);
        for (int slice = 0; slice < Count * task.parts; ++slice) {
          int k = slice % task.parts * task.part_depth + slice / task.parts * task.part_tiles * kTileK;
          for (int kt = 0; kt < task.part_tiles; ++kt, k += kTileK) {
            barrier_wait(empty + at.stage * 8, at.phase ^ 1);
            const uint32_t barrier = full + at.stage * 8, a = base + at.stage * kBytesPair, b = a + kBytesOperand;
            barrier_expect(barrier, kBytesPair);
            load_tile_multicast(a + rank * kBytesHalf, &task.a, barrier, k, m + rank * 64, 3);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int from = n + half * 64;
              load_tile(b + half * kBytesHalf, &task.b, barrier, TransposeB ? from : k, TransposeB ? k : from);
            }
            at.next();
          }
        }
      }
    }
  } else {
    registers_up<232>();
    const int own = group - 1, warp = own * 4 + thread / 32, lane = thread % 32, length = task.parts * task.part_tiles;
    const Stager stager{waiting + warp * kBytesOwn<Count>, lane};
    RingOf<kDepth> at;
    float even[64], odd[64];
    for (int id = static_cast<int>(blockIdx.x) / kCluster; id < tiles; id += clusters) {
      float two[Count > 2 ? 64 : 1];
#pragma unroll 1
      for (int half = 0; half < (Count == 8 ? 2 : 1); ++half) {
        chain<kDepth, TransposeB>(even, length, at, base, full, empty, own, thread);
        chain<kDepth, TransposeB>(odd, length, at, base, full, empty, own, thread);
        add(even, odd);
        if constexpr (Count > 2) {
#pragma unroll
          for (int i = 0; i < 64; ++i) two[i] = odd[i];
          chain<kDepth, TransposeB>(even, length, at, base, full, empty, own, thread);
          chain<kDepth, TransposeB>(odd, length, at, base, full, empty, own, thread);
          add(even, odd);
          add(two, odd);
        }
        if constexpr (Count == 8) {
          const uint32_t mine = stager.address + lane * 16;
          if (half == 0) {
#pragma unroll
            for (int i = 0; i < 16; ++i) put_shared(mine + i * 512, odd + 4 * i);
          } else {
#pragma unroll
            for (int i = 0; i < 16; ++i) add_shared(mine + i * 512, odd + 4 * i);
          }
        }
      }
      // Only now: nothing but accumulators has room in the registers before.
      const auto [m, n] = Raster(task.rows, task.cols).at(id, static_cast<int>(cluster_rank()));
      const int first = m + own * 64 + (thread / 32) * 16;
      if (task.wide) {
        store_floats(odd, task, first + lane / 4, n + (lane % 4) * 2);
      } else {
        stager.send(odd, static_cast<__nv_bfloat16*>(task.out), task.cols, task.rows, task.cols, first, n);
        __syncwarp();  // the memory is free again
      }
    }
  }
  __syncwarp();
  cluster_sync();
}

template <int Count, int TransposeB>
void launch_segments(const Segments& task, cudaStream_t stream) {
  const int processors = once_a_device([](int device) {
    check(cudaFuncSetAttribute(segments_kernel<Count, TransposeB>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kBytesSegments<Count>),
          "shared memory");
    return processors_of(device);
  });
  const int blocks = std::min(processors / kCluster, Raster(task.rows, task.cols).count) * kCluster;
  segments_kernel<Count, TransposeB><<<static_cast<unsigned>(blocks), kThreads, kBytesSegments<Count>, stream>>>(task);
  check(cudaGetLastError(), "segments launch");
}

}  // namespace

void segments(Matrix a, Matrix b, bool transposed, int count, int parts, void* out, bool wide, cudaStream_t stream) {
  Segments task{};
  task.out = out;
  task.rows = static_cast<int>(a.rows);
  task.cols = static_cast<int>(transposed ? b.cols : b.rows);
  if (task.rows == 0 || task.cols == 0) return;
  task.a = tensor_map(a, kTileK, 64);
  task.b = tensor_map(b, 64, 64);
  task.parts = parts;
  task.part_depth = static_cast<int>(a.cols / parts);
  task.part_tiles = task.part_depth / count / kTileK;
  task.wide = wide;
  const auto launch = [&](auto number) {
    transposed ? launch_segments<number(), 1>(task, stream) : launch_segments<number(), 0>(task, stream);
  };
  if (count == 2) {
    launch(std::integral_constant<int, 2>{});
  } else if (count == 4) {
    launch(std::integral_constant<int, 4>{});
  } else {
    launch(std::integral_constant<int, 8>{});
  }
}

}  // namespace rlk::sm90
