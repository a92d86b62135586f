// out[M, N] = A[M, K] B[N, K]^T with K in segments that merge in a binary tree, in one launch, for many rows.
//
// Tiles of 128 x 256 a block, a cluster of two shares B: all registers of a consumer hold one segment. What waits for its
// neighbour in the tree waits with its left half in registers and its right half in shared memory, one segment or one
// subtree at a time. A subtree that must make room goes to memory that stays in the L2, under the products of the next
// segment, and comes back through the ring of stages behind the last tile of k of the segment that it is added to.
// Each segment is one chain over ascending k from zero, so neither tiles nor scheduling change a bit.
#include "segments.cuh"

namespace rlk::sm90 {
namespace {

constexpr int kDeep = 3, kBytesWaiting = 2 * 64 * 128 * 4;
constexpr int kWaiting = kDeep * kBytesStage, kFull = kWaiting + kBytesWaiting, kEmpty = kFull + kDeep * 8;
constexpr int kOutside = kEmpty + kDeep * 8;  // [2]: subtrees of two, of four have been written
constexpr int kBytesAll = kFull + 256 + 1024;
constexpr int kLeastTiles = 4;  // of k in a segment: a subtree goes out in quarters under as many of them

// A subtree of one block outside: 3 parts that fit into a stage each, [warp][row][lane] of 16 bytes, by columns of the
// accumulators: rows 0 to 11 of the left half; 12 to 15 of it and 0 to 7 of the right one; 8 to 15 of the right one.
constexpr int kRow = 32 * 16, kBytesPart = 8 * 12 * kRow, kBytesTail = 8 * 8 * kRow;
constexpr int kBytesSubtree = 2 * kBytesPart + kBytesTail;
static_assert(kBytesSubtree == kTileM * kTileN * 4 && kBytesPart <= kBytesStage);

struct Wide : Segments {
  uint8_t* scratch;
  int length;  // tiles of k of a segment
  int spread;  // log2 of the tiles of k from one quarter of a subtree that goes out to the next
  int zero;    // 0, which the compiler does not know
};

using Stage = RingStage<kDeep>;

__device__ __forceinline__ void store_bulk(void* to, uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void load_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}

// What one consumer thread does with the ring.
template <int TransposeB>
struct Ring {
  static constexpr int kStepB = TransposeB ? 2048 : 32;  // bytes from one k16 to the next
  uint32_t base;
  int own, thread;
  Stage at;

  __device__ __forceinline__ uint32_t stage() const { return base + at.index * kBytesStage; }
  __device__ __forceinline__ void wait() const { barrier_wait(base + kFull + at.index * 8, at.phase); }
  __device__ __forceinline__ void release(int index) const {  // one thread for each block of the cluster
    if (thread % 32 == 0 && thread < kCluster * 32) barrier_arrive(base + kEmpty + index * 8, thread / 32);
  }
  // The stage that all threads of the warpgroup have read.
  __device__ __forceinline__ void give_back() {
    fence_async_shared();  // what comes next is a bulk copy
    named_barrier(1 + own, 128);
    release(at.index);
    at.next();
  }

  // One segment of `count` > 0 tiles of k. meanwhile(kt): under the products of tile kt.
  template <typename Meanwhile>
  __device__ __forceinline__ void chain(float (&left)[64], float (&right)[64], int count, Meanwhile meanwhile) {
    pin_values(left);
    pin_values(right);
#pragma unroll 1
    for (int kt = 0;;) {
      wait();
      const uint64_t a = descriptor(stage() + own * (kBytesA / 2), 8192, 1024);
      const uint64_t b = descriptor(stage() + kBytesA, 8192, 1024);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kTileK / 16; ++k) {
        wgmma_64x256x16<0, TransposeB>(left, right, a + (k * 32 >> 4), b + (k * kStepB >> 4), kt > 0 || k > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (kt > 0) release(at.before());
      meanwhile(kt);
      at.next();
      if (++kt == count) break;
    }
    wgmma_wait<0>();
    pin_values(left);
    pin_values(right);
    release(at.before());
  }
};

template <int Count, int TransposeB>
__device__ __forceinline__ void produce(const Wide& task, uint32_t base, const uint8_t* subtrees) {
  const uint32_t full = base + kFull, empty = base + kEmpty;
  const SegmentsRaster raster(task.rows, task.cols);
  const int rank = static_cast<int>(cluster_rank()), clusters = static_cast<int>(gridDim.x) / kCluster;
  Stage at;
  uint32_t phases = 0;
  const auto load_subtree = [&](int which) {
    barrier_wait(base + kOutside + which * 8, phases >> which & 1);
    phases ^= 1u << which;
    fence_async();
    const uint8_t* from = subtrees + which * kBytesSubtree;
#pragma unroll 1
    for (int part = 0; part < 3; ++part) {
      const int bytes = part < 2 ? kBytesPart : kBytesTail;
      barrier_wait(empty + at.index * 8, at.phase ^ 1);
      barrier_expect(full + at.index * 8, bytes);
      load_bulk(base + at.index * kBytesStage, from, bytes, full + at.index * 8);
      from += bytes;
      at.next();
    }
  };
  for (int id = static_cast<int>(blockIdx.x) / kCluster; id < raster.count; id += clusters) {
    const SegmentsPlace place = raster.at<1>(id, rank);
#pragma unroll 1
    for (int segment = 0; segment < Count; ++segment) {
#pragma unroll 1
      for (int part = 0; part < task.parts; ++part) {
        int k = part * task.part_depth + segment * task.part_tiles * kTileK;
#pragma unroll 1
        for (int kt = 0; kt < task.part_tiles; ++kt, k += kTileK) {
          barrier_wait(empty + at.index * 8, at.phase ^ 1);
          const uint32_t barrier = full + at.index * 8, a = base + at.index * kBytesStage, b = a + kBytesA;
          barrier_expect(barrier, kBytesStage);
          load_tile(a, &task.a, barrier, k, place.m);
          if constexpr (TransposeB) {
            for (int chunk = place.odd ? 0 : rank * 2; chunk < (place.odd ? 4 : rank * 2 + 2); ++chunk) {
              if (place.odd) {
                load_tile(b + chunk * 8192, &task.b, barrier, place.n + chunk * 64, k);
              } else {
                load_tile_multicast(b + chunk * 8192, &task.b, barrier, place.n + chunk * 64, k, 3);
              }
            }
          } else if (place.odd) {
            load_tile(b, &task.b, barrier, k, place.n);
            load_tile(b + 16384, &task.b, barrier, k, place.n + 128);
          } else {
            load_tile_multicast(b + rank * 16384, &task.b, barrier, k, place.n + rank * 128, 3);
          }
          at.next();
        }
      }
      if constexpr (Count > 2) {
        if (segment % 4 == 3) load_subtree(0);
      }
      if constexpr (Count == 8) {
        if (segment == 7) load_subtree(1);
      }
    }
  }
}

template <int Count, int TransposeB>
__device__ __forceinline__ void consume(const Wide& task, uint32_t base, uint8_t* subtrees, int own, int thread) {
  const int lane = thread % 32, warp = own * 4 + thread / 32, clusters = static_cast<int>(gridDim.x) / kCluster;
  const int tiles = SegmentsRaster(task.rows, task.cols).count;
  const uint32_t waiting = base + kWaiting + warp * 16 * kRow, mine = waiting + lane * 16;  // 8 KiB of a warp
  Ring<TransposeB> ring{base, own, thread, {}};
  float left[64], right[64], even[64];

  const auto keep = [&] {
#pragma unroll
    for (int i = 0; i < 64; ++i) even[i] = __int_as_float(__float_as_int(left[i]) ^ task.zero);  // a copy that stays one
#pragma unroll
    for (int i = 0; i < 16; ++i) put_shared(mine + i * kRow, right + 4 * i);
  };
  const auto add_kept_left = [&] {
#pragma unroll
    for (int i = 0; i < 64; ++i) left[i] = __fadd_rn(even[i], left[i]);
  };
  const auto add_kept_right = [&] {
#pragma unroll
    for (int i = 0; i < 16; ++i) add_shared(mine + i * kRow, right + 4 * i);
  };
  // What is kept goes outside: the right half at once, the left one quarter by quarter under the tiles of k of a chain;
  // under its last one the producer learns that all is there, so that the chain's end does not wait for the L2.
  const auto send_right = [&](int which) {
    fence_async();
    __syncwarp();
    if (lane == 0) {
      uint8_t* to = subtrees + which * kBytesSubtree + kBytesPart;
      store_bulk(to + (warp * 12 + 4) * kRow, waiting, 8 * kRow);
      store_bulk(to + kBytesPart + warp * 8 * kRow, waiting + 8 * kRow, 8 * kRow);
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
  };
  const auto sent = [&](int which) {
    fence_async();
    if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    __syncwarp();
    if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(base + kOutside + which * 8) : "memory");
  };
  const auto send_left = [&](int which, int kt) {
    uint8_t* to = subtrees + which * kBytesSubtree + warp * 12 * kRow + lane * 16;
    const int quarter = kt >> task.spread;
    if (kt == quarter << task.spread && quarter < 4) {
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        if (quarter == q) {
#pragma unroll
          for (int i = 4 * q; i < 4 * q + 4; ++i) {
            __stcg(reinterpret_cast<float4*>(to + (i < 12 ? i * kRow : kBytesPart + (i - 12) * kRow)),
                   make_float4(even[4 * i], even[4 * i + 1], even[4 * i + 2], even[4 * i + 3]));
          }
        }
      }
    }
    if (kt + 1 == task.length) sent(which);
  };
  // (left, right) += what is kept, if so, then what is outside.
  const auto add_subtree = [&](bool kept) {
    if (kept) add_kept_left();
    ring.wait();
    uint32_t part = ring.stage() + warp * 12 * kRow + lane * 16;
#pragma unroll
    for (int i = 0; i < 12; ++i) add_shared(part + i * kRow, left + 4 * i);
    ring.give_back();
    if (kept) add_kept_right();
    ring.wait();
    part = ring.stage() + warp * 12 * kRow + lane * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) add_shared(part + i * kRow, left + 48 + 4 * i);
#pragma unroll
    for (int i = 0; i < 8; ++i) add_shared(part + (4 + i) * kRow, right + 4 * i);
    ring.give_back();
    ring.wait();
    part = ring.stage() + warp * 8 * kRow + lane * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) add_shared(part + i * kRow, right + 32 + 4 * i);
    ring.give_back();
  };

  for (int id = static_cast<int>(blockIdx.x) / kCluster; id < tiles; id += clusters) {
#pragma unroll
    for (int four = 0; four < (Count == 8 ? 2 : 1); ++four) {
      ring.chain(left, right, task.length, [&](int kt) {
        if (Count == 8 && four > 0) send_left(1, kt);
      });
      keep();
      ring.chain(left, right, task.length, [](int) {});
      if constexpr (Count > 2) {
#pragma unroll
        for (int i = 0; i < 64; ++i) even[i] = __fadd_rn(even[i], left[i]);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          add_shared(mine + i * kRow, right + 4 * i);
          put_shared(mine + i * kRow, right + 4 * i);
        }
        send_right(0);
        ring.chain(left, right, task.length, [&](int kt) { send_left(0, kt); });
        keep();
        ring.chain(left, right, task.length, [](int) {});
        add_subtree(true);
        if constexpr (Count == 8) {
          if (four > 0) {
            add_subtree(false);
          } else {
            keep();
            send_right(1);
          }
        }
      } else {
        add_kept_left();
        add_kept_right();
      }
    }
    const SegmentsPlace place = SegmentsRaster(task.rows, task.cols).at<1>(id, static_cast<int>(cluster_rank()));
    const int first = place.m + own * 64 + (thread / 32) * 16;
    if (task.wide) {
      const int row = first + lane / 4, column = place.n + (lane % 4) * 2;
      store_floats(left, task, row, column);
      store_floats(right, task, row, column + 128);
    } else {
      const Stager stager{waiting, lane};
      stager.send(left, static_cast<__nv_bfloat16*>(task.out), task.cols, task.rows, task.cols, first, place.n);
      stager.send(right, static_cast<__nv_bfloat16*>(task.out), task.cols, task.rows, task.cols, first, place.n + 128);
      __syncwarp();
    }
  }
}

template <int Count, int TransposeB>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1) wide_kernel(const __grid_constant__ Wide task) {
  extern __shared__ uint8_t raw[];
  const uint32_t base = (smem_address(raw) + 1023) & ~1023u;
  const int group = static_cast<int>(threadIdx.x) / 128, thread = threadIdx.x % 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kDeep; ++i) {
      barrier_init(base + kFull + i * 8, 1);
      barrier_init(base + kEmpty + i * 8, 2 * kCluster);
    }
    for (int i = 0; i < 2; ++i) barrier_init(base + kOutside + i * 8, 8);
    barrier_init_fence();
  }
  cluster_sync();
  uint8_t* const subtrees = task.scratch + static_cast<int64_t>(blockIdx.x) * (Count / 4) * kBytesSubtree;
  if (group == 0) {
    registers_down<40>();
    if (thread == 0) produce<Count, TransposeB>(task, base, subtrees);
  } else {
    registers_up<232>();
    consume<Count, TransposeB>(task, base, subtrees, group - 1, thread);
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
  const int blocks = std::min(processors / kCluster, SegmentsRaster(task.rows, task.cols).count) * kCluster;
  if (scratch < int64_t{blocks} * (Count / 4) * kTileM * kTileN || reinterpret_cast<uintptr_t>(task.scratch) % 16 != 0) {
    throw std::runtime_error("segments: scratch must hold 128 x 256 values for each processor and 4 segments, 16-byte aligned");
  }
  wide_kernel<Count, TransposeB><<<static_cast<unsigned>(blocks), kThreads, kBytesAll, stream>>>(task);
  check(cudaGetLastError(), "segments launch");
}

}  // namespace

void segments_wide(Matrix a, Matrix b, bool transposed, int count, int parts, float* scratch, int64_t scratch_size, void* out,
                   bool wide, cudaStream_t stream) {
  auto task = segments_task<Wide>(a, b, transposed, count, parts, out, wide);
  if (task.rows == 0 || task.cols == 0) return;
  task.a = tensor_map(a, kTileK, kTileM);
  task.b = transposed ? tensor_map(b, 64, kTileK) : tensor_map(b, kTileK, 128);
  task.scratch = reinterpret_cast<uint8_t*>(scratch);
  task.length = parts * task.part_tiles;
  if (count > 2 && task.length < kLeastTiles) {
    throw std::runtime_error("segments: of 4 or 8 segments each must have a K of at least " +
                             std::to_string(kLeastTiles * kTileK) + ", not " + std::to_string(task.length * kTileK) +
                             "; sm90_segments takes shorter ones");
  }
  // The last quarter goes out under tile 12, 6 or 3, which never comes after the last one.
  task.spread = task.length >= 20 ? 2 : task.length >= 10 ? 1 : 0;
  by_segments(count, transposed, [&](auto number, auto mn) { launch_wide<number(), mn()>(task, scratch_size, stream); });
}

}  // namespace rlk::sm90
