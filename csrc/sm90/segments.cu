// out[M, N] = A[M, K] B[N, K]^T with K in segments that merge in a binary tree, in one launch.
//
// A cluster of two blocks side by side computes 128 x 256 outputs, each block 128 x 128 and each of its two consumer
// warpgroups 64 x 128: small enough for three sets of accumulators in registers. Of four segments the chains use sets x, y,
// z, x, and what is to be done with those that are finished is done under the next chain's products: the sum of the first
// two under the third, the rest and the store under the next tile's first. Only after the fourth (of two:
// after the second) must the products wait, for one sum. Of eight segments the sum of the first four waits, half in registers
// and half in shared memory. The blocks share A: each loads half of its rows and sends them to both. Clusters of four share B
// as well and move a third fewer bytes from the L2, but only 30 of them run on 132 processors, and the slowest wave decides.
// Each segment is one chain over ascending k from zero, so neither tiles nor scheduling change a bit.
#include "epilogue.cuh"
#include "tensor_map.h"

#include <algorithm>
#include <type_traits>

namespace rlk::sm90 {
namespace {

constexpr int kSide = 128;  // rows and columns of a block
constexpr int kBytesHalf = 64 * kTileK * 2, kBytesOperand = 2 * kBytesHalf, kBytesPair = 2 * kBytesOperand;

// Stages, and memory of each consumer warp behind them: 16 x 128 of the output, and of eight segments half of the subtree of
// four, which is read before the output is written; registers hold the other half, so that all six stages fit.
constexpr int kDepth = 6, kBytesOwn = 16 * kSide * 2, kHeld = 32;
constexpr int kBytesSegments = kDepth * kBytesPair + 8 * kBytesOwn + 256 + 1024;

struct Segments {
  CUtensorMap a, b, to;  // to: bf16 output
  void* out;
  int rows, cols;
  int parts, part_depth, part_tiles;  // a segment is slice s of each part of K: tiles of k of a slice
  int wide;                           // fp32 output
};

// Tiles of a cluster. Groups of columns come one after the other, so that B stays in the L2.
struct Raster {
  static constexpr int kGroup = 8;
  int rows, columns, count;

  __host__ __device__ Raster(int m, int n)
      : rows((m + kSide - 1) / kSide), columns((n + 2 * kSide - 1) / (2 * kSide)), count(rows * columns) {}
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

// to = left + right; `to` may be either.
__device__ __forceinline__ void add(const float (&left)[64], const float (&right)[64], float (&to)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) to[i] = __fadd_rn(left[i], right[i]);
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

struct Nothing {
  __device__ __forceinline__ void operator()() const {}
};

// What a consumer knows of the stages.
template <int TransposeB>
struct Consumer {
  uint32_t base, full, empty;
  int own, thread;
  RingOf<kDepth> at;

  // The stage before the present one has been read.
  __device__ __forceinline__ void release() const {
    if (thread % 32 == 0 && thread < kCluster * 32) barrier_arrive(empty + at.before() * 8, thread / 32);  // one for each block
  }
  __device__ __forceinline__ void products(float (&acc)[64], bool first) const {
    constexpr int kStepB = TransposeB ? 2048 : 32;  // bytes from one k16 to the next
    // Shuffles: known to be the same for the whole warp, so that descriptors are made once and by the uniform unit.
    const int now = __shfl_sync(~0u, at.stage, 0);
    barrier_wait(full + now * 8, at.phase);
    const uint32_t stage = base + now * kBytesPair;
    const uint64_t a = descriptor(stage + own * kBytesHalf, 8192, 1024);
    const uint64_t b = descriptor(stage + kBytesOperand, 8192, 1024);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) {
      wgmma_64x128x16<0, TransposeB>(acc, a + (k * 32 >> 4), b + (k * kStepB >> 4), !first || k > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();  // for those of the tile before; also where there are none: the compiler would wait for these
  }
  // One segment of `count` > 0 tiles of k, whose last products stay in flight: for the next chain (Follows) or drain.
  // `meanwhile` runs when the first products are in flight and those of the chain before are done.
  template <bool Follows, typename Meanwhile>
  __device__ __forceinline__ void chain(float (&acc)[64], int count, Meanwhile meanwhile) {
    pin(acc);
    products(acc, true);
    if constexpr (Follows) release();
    meanwhile();
    at.next();
#pragma unroll 1
    for (int kt = 1; kt < count; ++kt) {
      products(acc, false);
      release();
      at.next();
    }
  }
  __device__ __forceinline__ void drain(float (&acc)[64]) const {
    wgmma_wait<0>();
    pin(acc);
    release();
  }
};

template <int Count, int TransposeB>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    segments_kernel(const __grid_constant__ Segments task) {
  extern __shared__ uint8_t raw[];
  const uint32_t base = (smem_address(raw) + 1023) & ~1023u;
  const uint32_t waiting = base + kDepth * kBytesPair;
  const uint32_t full = waiting + 8 * kBytesOwn, empty = full + kDepth * 8;
  const int group = static_cast<int>(threadIdx.x) / 128, thread = threadIdx.x % 128;
  const int clusters = static_cast<int>(gridDim.x) / kCluster;
  const int tiles = Raster(task.rows, task.cols).count;

  if (threadIdx.x == 0) {
    prefetch_map(&task.a);
    prefetch_map(&task.b);
    for (int i = 0; i < kDepth; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(empty + i * 8, 2 * kCluster);
    }
    barrier_init_fence();
  }
  cluster_sync();

  if (group == 0) {
    registers_down<24>();
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
    registers_up<240>();
    const int own = __shfl_sync(~0u, group - 1, 0), length = task.parts * task.part_tiles;
    const uint32_t mine = waiting + (own * 4 + thread / 32) * kBytesOwn;
    Consumer<TransposeB> consumer{base, full, empty, own, thread};
    float x[64], y[64];
    int row = -1, column = 0;  // where the finished tile of this warp goes; negative: there is none
    const auto locate = [&](int id) {
      const int2 tile = Raster(task.rows, task.cols).at(id, static_cast<int>(cluster_rank()));
      row = tile.x + own * 64 + thread / 32 * 16;
      column = tile.y;
    };
    const auto store = [&](const float (&acc)[64]) {
      stores_have_read();
      __syncwarp();  // the memory is free
      const BulkStager<16> stager{mine, &task.to};
      const int lane = lane_now();
      stage_row(acc, 0, stager, lane);
      stage_row(acc + 2, 1, stager, lane);
      stager.flush(row, column, lane_now());
    };
    const auto store_wide = [&](const float (&acc)[64]) {  // takes its time
      store_floats(acc, task, row + lane_now() / 4, column + lane_now() % 4 * 2);
      row = -1;
    };
    if constexpr (Count == 2) {
      for (int id = static_cast<int>(blockIdx.x) / kCluster; id < tiles; id += clusters) {
        consumer.template chain<false>(x, length, [&] {
          pin(y);
          if (row >= 0) store(y);
        });
        consumer.template chain<true>(y, length, [&] { locate(id); });
        consumer.drain(y);
        add(x, y, y);
        if (task.wide) store_wide(y);
      }
      if (row >= 0) store(y);
    } else {
      float z[64];
      [[maybe_unused]] float held[kHeld];
      const auto finish = [&] {
        add(y, z, z);
        if constexpr (Count == 8) {
#pragma unroll
          for (int i = 0; i < kHeld; ++i) z[i] = __fadd_rn(held[i], z[i]);
          const uint32_t from = mine + lane_now() * 16;
#pragma unroll
          for (int i = 0; i < (64 - kHeld) / 4; ++i) add_shared(from + i * 512, z + kHeld + 4 * i);
        }
      };
      for (int id = static_cast<int>(blockIdx.x) / kCluster; id < tiles; id += clusters) {
#pragma unroll 1
        for (int half = 0; half < Count / 4; ++half) {
          consumer.template chain<false>(x, length, [&] {
            pin(y);
            pin(z);
            if (half > 0) {
              add(y, z, z);
              stores_have_read();
              __syncwarp();
              const uint32_t to = mine + lane_now() * 16;
#pragma unroll
              for (int i = 0; i < kHeld; ++i) held[i] = z[i];
#pragma unroll
              for (int i = 0; i < (64 - kHeld) / 4; ++i) put_shared(to + i * 512, z + kHeld + 4 * i);
            } else if (row >= 0) {
              finish();
              store(z);
            }
          });
          consumer.template chain<true>(y, length, [&] { locate(id); });
          consumer.template chain<true>(z, length, [&] {
            pin(y);
            add(x, y, y);
          });
          consumer.template chain<true>(x, length, Nothing{});
          consumer.drain(x);
          add(z, x, z);
        }
        if (task.wide) {
          finish();
          store_wide(z);
        }
      }
      if (row >= 0) {
        finish();
        store(z);
      }
    }
    stores_have_read();  // the memory must last until then
  }
  __syncwarp();
  cluster_sync();
}

template <int Count, int TransposeB>
void launch_segments(const Segments& task, cudaStream_t stream) {
  const int processors = once_a_device([](int device) {
    check(cudaFuncSetAttribute(segments_kernel<Count, TransposeB>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytesSegments),
          "shared memory");
    return processors_of(device);
  });
  const int blocks = std::min(processors / kCluster, Raster(task.rows, task.cols).count) * kCluster;
  segments_kernel<Count, TransposeB><<<static_cast<unsigned>(blocks), kThreads, kBytesSegments, stream>>>(task);
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
  if (!wide) task.to = tensor_map({out, task.rows, task.cols, task.cols}, 64, 16);
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
