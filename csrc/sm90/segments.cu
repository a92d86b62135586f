// out[M, N] = A[M, K] B[N, K]^T with K in segments that merge in a binary tree, in one launch.
//
// A cluster of 2 x 2 blocks computes 256 x 256 outputs, each block 128 x 128 and each of its two consumer warpgroups
// 64 x 128: small enough that the accumulators of two segments and a finished subtree of two fit in registers; of eight
// segments the subtree of four waits in shared memory. Blocks side by side share rows of A, blocks one above the other
// rows of B: each loads half and sends it to both. While one warpgroup adds, the other's products run.
// Each segment is one chain over ascending k from zero, so neither tiles nor scheduling change a bit.
#include "segments.cuh"

namespace rlk::sm90 {
namespace {

constexpr int kSide = 128, kBlocksOfCluster = 4;
constexpr int kBytesHalf = 64 * kTileK * 2, kBytesOperand = 2 * kBytesHalf, kBytesPair = 2 * kBytesOperand;
constexpr int kBytesWaiting = 2 * 64 * kSide * 4, kBytesStagers = 8 * 4096;

template <int Count>
constexpr int kDeep = Count == 8 ? 4 : 6;  // stages
template <int Count>
constexpr int kBytesSegments = kDeep<Count> * kBytesPair + (Count == 8 ? kBytesWaiting : 0) + kBytesStagers + 256 + 1024;

// One segment of `count` > 0 tiles of k.
template <int Deep, int TransposeB>
__device__ __forceinline__ void chain(
    float (&acc)[64], int count, RingStage<Deep>& at, uint32_t base, uint32_t full, uint32_t empty, int own, int thread) {
  constexpr int kStepB = TransposeB ? 2048 : 32;  // bytes from one k16 to the next
  const bool signals = thread % 32 == 0;          // one thread for each block of the cluster
  pin_values(acc);
#pragma unroll 1
  for (int kt = 0;;) {
    barrier_wait(full + at.index * 8, at.phase);
    const uint32_t stage = base + at.index * kBytesPair;
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
  pin_values(acc);
  if (signals) barrier_arrive(empty + at.before() * 8, thread / 32);
}

__device__ __forceinline__ void add(const float (&left)[64], float (&right)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) right[i] = __fadd_rn(left[i], right[i]);
}

template <int Count, int TransposeB>
__global__ void __cluster_dims__(kBlocksOfCluster, 1, 1) __launch_bounds__(kThreads, 1)
    segments_kernel(const __grid_constant__ Segments task) {
  constexpr int kDepth = kDeep<Count>;
  extern __shared__ uint8_t raw[];
  const uint32_t base = (smem_address(raw) + 1023) & ~1023u;
  const uint32_t stagers = base + kDepth * kBytesPair, waiting = stagers + kBytesStagers;
  const uint32_t full = waiting + (Count == 8 ? kBytesWaiting : 0), empty = full + kDepth * 8;
  const int group = static_cast<int>(threadIdx.x) / 128, thread = threadIdx.x % 128;
  const int clusters = static_cast<int>(gridDim.x) / kBlocksOfCluster;
  const int tiles = SegmentsRaster(task.rows, task.cols).count;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kDepth; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(empty + i * 8, 2 * kBlocksOfCluster);
    }
    barrier_init_fence();
  }
  cluster_sync();

  if (group == 0) {
    registers_down<40>();
    if (thread == 0) {
      const SegmentsRaster raster(task.rows, task.cols);
      const int rank = static_cast<int>(cluster_rank()), row = rank / 2, column = rank % 2;
      const uint16_t of_row = static_cast<uint16_t>(3 << (row * 2)), of_column = static_cast<uint16_t>(5 << column);
      RingStage<kDepth> at;
      for (int id = static_cast<int>(blockIdx.x) / kBlocksOfCluster; id < tiles; id += clusters) {
        const SegmentsPlace place = raster.at<2>(id, rank);
        auto load_b = [&](uint32_t to, uint32_t barrier, int half, int k, bool shared) {
          const int n = place.n + half * 64, x = TransposeB ? n : k, y = TransposeB ? k : n;
          if (shared) {
            load_tile_multicast(to + half * kBytesHalf, &task.b, barrier, x, y, of_column);
          } else {
            load_tile(to + half * kBytesHalf, &task.b, barrier, x, y);
          }
        };
        for (int slice = 0; slice < Count * task.parts; ++slice) {
          int k = slice % task.parts * task.part_depth + slice / task.parts * task.part_tiles * kTileK;
          for (int kt = 0; kt < task.part_tiles; ++kt, k += kTileK) {
            barrier_wait(empty + at.index * 8, at.phase ^ 1);
            const uint32_t barrier = full + at.index * 8, a = base + at.index * kBytesPair, b = a + kBytesOperand;
            barrier_expect(barrier, kBytesPair);
            if (place.odd) {
              if (rank < 2) load_tile_multicast(a + rank * kBytesHalf, &task.a, barrier, k, place.m + rank * 64, 15);
              load_b(b, barrier, 0, k, false);
              load_b(b, barrier, 1, k, false);
            } else {
              load_tile_multicast(a + column * kBytesHalf, &task.a, barrier, k, place.m + column * 64, of_row);
              load_b(b, barrier, row, k, true);
            }
            at.next();
          }
        }
      }
    }
  } else {
    registers_up<232>();
    const int own = group - 1, length = task.parts * task.part_tiles;
    const Stager stager{stagers + (own * 4 + thread / 32) * 4096, thread % 32};
    RingStage<kDepth> at;
    float even[64], odd[64];
    for (int id = static_cast<int>(blockIdx.x) / kBlocksOfCluster; id < tiles; id += clusters) {
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
          const uint32_t mine = waiting + threadIdx.x * 16 - 2048;  // the consumers' 256 threads side by side
          if (half == 0) {
#pragma unroll
            for (int i = 0; i < 16; ++i) put_shared(mine + i * 4096, odd + 4 * i);
          } else {
#pragma unroll
            for (int i = 0; i < 16; ++i) add_shared(mine + i * 4096, odd + 4 * i);
          }
        }
      }
      // Only now: nothing but accumulators has room in the registers before.
      const SegmentsPlace place = SegmentsRaster(task.rows, task.cols).at<2>(id, static_cast<int>(cluster_rank()));
      const int first = place.m + own * 64 + (thread / 32) * 16;
      if (task.wide) {
        store_floats(odd, task, first + (thread % 32) / 4, place.n + (thread % 4) * 2);
      } else {
        stager.send(odd, static_cast<__nv_bfloat16*>(task.out), task.cols, task.rows, task.cols, first, place.n);
      }
    }
  }
  __syncwarp();
  cluster_sync();
}

template <int Count, int TransposeB>
void launch_segments(const Segments& task, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytesSegments<Count>;
  config.stream = stream;
  const int most = once_a_device([&](int) {  // clusters that run at the same time
    int found = 0;
    check(cudaFuncSetAttribute(segments_kernel<Count, TransposeB>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kBytesSegments<Count>),
          "shared memory");
    cudaLaunchConfig_t query = config;
    query.gridDim = dim3(kBlocksOfCluster);
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = kBlocksOfCluster;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    query.attrs = &cluster;
    query.numAttrs = 1;
    check(cudaOccupancyMaxActiveClusters(&found, segments_kernel<Count, TransposeB>, &query), "clusters at a time");
    if (found < 1) throw std::runtime_error("segments: this GPU has no room for a cluster of 4 blocks");
    return found;
  });
  const unsigned blocks = static_cast<unsigned>(std::min(most, SegmentsRaster(task.rows, task.cols).count) * kBlocksOfCluster);
  segments_kernel<Count, TransposeB><<<blocks, kThreads, kBytesSegments<Count>, stream>>>(task);
  check(cudaGetLastError(), "segments launch");
}

}  // namespace

void segments(Matrix a, Matrix b, bool transposed, int count, int parts, void* out, bool wide, cudaStream_t stream) {
  const int64_t cols = transposed ? b.cols : b.rows;
  if (a.rows == 0 || cols == 0) return;
  auto task = segments_task<Segments>(a, b, transposed, count, parts, out, wide);
  task.a = tensor_map(a, kTileK, 64);
  task.b = tensor_map(b, 64, 64);
  by_segments(count, transposed, [&](auto number, auto mn) { launch_segments<number(), mn()>(task, stream); });
}

}  // namespace rlk::sm90
