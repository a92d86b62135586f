// out[M, N] = A[M, K] B[N, K]^T with K in segments that merge in a binary tree, in one launch, for many rows.
//
// Tiles of 128 x 256 a block, a cluster of two shares B: all registers of a consumer hold one segment. What waits for its
// neighbour in the tree waits with its left half in registers and its right half in shared memory, one segment or one
// subtree at a time. A subtree that must make room goes to memory that stays in the L2, under the products of the next
// segment, and comes back through the ring of stages behind the last tile of k of the segment that it is added to; an
// eighth of a subtree of two stays in shared memory.
// Each segment is one chain over ascending k from zero, so neither tiles nor scheduling change a bit.
#include "segments.cuh"

namespace rlk::sm90 {
namespace {

constexpr int kDeep = 3, kBytesWaiting = 2 * 64 * 128 * 4, kBytesSpare = kBytesWaiting / 4;
constexpr int kWaiting = kDeep * kBytesStage, kSpare = kWaiting + kBytesWaiting, kFull = kSpare + kBytesSpare;
constexpr int kEmpty = kFull + kDeep * 8;
constexpr int kOutside = kEmpty + kDeep * 8;  // [2]: subtrees of two, of four have been written
constexpr int kBytesAll = kFull + 256 + 1024;
constexpr int kLeastTiles = 4;  // of k in a segment: a subtree goes out in quarters under as many of them

// A subtree of one block outside: 3 parts that fit into a stage each, [warp][row][lane] of 16 bytes, by columns of the
// accumulators. Of four segments: rows 0 to 11 of the left half; 12 to 15 of it and 0 to 7 of the right one; 8 to 15 of
// the right one. Of two: rows 0 to 11 of the left half, whose last four stay; 0 to 11 of the right one; 12 to 15 of it.
constexpr int kTwo = 0, kFour = 1;
constexpr int kRow = 32 * 16, kBytesPart = 8 * 12 * kRow, kBytesTail = 8 * 8 * kRow;
constexpr int kBytesTailOfTwo = kBytesTail / 2, kBytesSubtree = 2 * kBytesPart + kBytesTail;
static_assert(kBytesSubtree == kTileM * kTileN * 4 && kBytesPart <= kBytesStage && kBytesSpare == 8 * 4 * kRow);

struct Wide : Segments {
  uint8_t* scratch;
  int length;  // tiles of k of a segment
  int spread;  // log2 of the tiles of k from one quarter of a subtree that goes out to the next
  int told;    // tile of k under which the producer learns that a subtree is outside
  int zero;    // 0, which the compiler does not know
};

using Stage = RingStage<kDeep>;

__device__ __forceinline__ void store_bulk(void* to, uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
// The first copy finds its map in the cache.
__device__ __forceinline__ void fetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void load_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}

// x = rows of shared memory + x, four loads under way at a time; Put: the sums take their place.
template <int Rows, bool Put = false>
__device__ __forceinline__ void add_rows(uint32_t at, float* x) {
  constexpr int kBatch = 4;
#pragma unroll
  for (int i = 0; i < Rows; i += kBatch) {
    float4 v[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) v[j] = get_shared(at + (i + j) * kRow);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) add_to(v[j], x + 4 * (i + j));
    if constexpr (Put) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) put_shared(at + (i + j) * kRow, x + 4 * (i + j));
    }
  }
}

// 16 x 256 bf16 of one warp, a Stager's 4 KiB for each half: eight loads are under way before the first store.
__device__ __forceinline__ void flush_tile(
    uint32_t address, int lane, __nv_bfloat16* out, int rows, int cols, int row, int column) {
  const int chunk = lane % 16, first = row + lane / 16;
  __nv_bfloat16* to = out + static_cast<int64_t>(first) * cols + column + chunk * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float4 value[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = 2 * i + lane / 16;
      value[i] = get_shared(address + half * 4096 + r * 256 + ((chunk ^ (r % 8)) * 16));
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (first + 2 * i < rows && column + half * 128 + chunk * 8 < cols) {
        *reinterpret_cast<float4*>(to + static_cast<int64_t>(2 * i) * cols + half * 128) = value[i];
      }
    }
  }
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
      const int bytes = part < 2 ? kBytesPart : which == kTwo ? kBytesTailOfTwo : kBytesTail;
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

  const uint32_t spare = base + kSpare + warp * 4 * kRow + lane * 16;
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
  // What is kept goes outside: the right half at once, the left one quarter by quarter under the tiles of k of a chain;
  // under a later one the producer learns that all is there, so that the chain's end does not wait for the L2.
  const auto send_right = [&](int which) {
    fence_async_shared();  // one of all memory would wait for the stores of the last tile
    __syncwarp();
    if (lane == 0) {
      uint8_t* to = subtrees + which * kBytesSubtree + kBytesPart;
      const int left_rows = which == kTwo ? 0 : 4, rows = 12 - left_rows, rest = 16 - rows;
      store_bulk(to + (warp * 12 + left_rows) * kRow, waiting, rows * kRow);
      store_bulk(to + kBytesPart + warp * rest * kRow, waiting + rows * kRow, rest * kRow);
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
    const int quarters = which == kTwo ? 3 : 4;
    if (kt == quarter << task.spread && quarter < quarters) {
#pragma unroll
      for (int q = 0; q < quarters; ++q) {
        if (quarter == q) {
#pragma unroll
          for (int i = 4 * q; i < 4 * q + 4; ++i) {
            __stcg(reinterpret_cast<float4*>(to + (i < 12 ? i * kRow : kBytesPart + (i - 12) * kRow)),
                   make_float4(even[4 * i], even[4 * i + 1], even[4 * i + 2], even[4 * i + 3]));
          }
        }
      }
    }
    if (kt == task.told) sent(which);
  };
  // (left, right) += what is kept and a subtree of two, or a subtree of four.
  const auto add_subtree = [&](auto which) {
    constexpr bool kOfTwo = which() == kTwo;
    if constexpr (kOfTwo) add_kept_left();
    ring.wait();
    uint32_t part = ring.stage() + warp * 12 * kRow + lane * 16;
    add_rows<12>(part, left);
    ring.give_back();
    if constexpr (kOfTwo) {
      add_rows<4>(spare, left + 48);
      add_rows<16>(mine, right);
    }
    ring.wait();
    part = ring.stage() + warp * 12 * kRow + lane * 16;
    if constexpr (kOfTwo) {
      add_rows<12>(part, right);
    } else {
      add_rows<4>(part, left + 48);
      add_rows<8>(part + 4 * kRow, right);
    }
    ring.give_back();
    ring.wait();
    constexpr int kRest = kOfTwo ? 4 : 8;
    add_rows<kRest>(ring.stage() + warp * kRest * kRow + lane * 16, right + 64 - 4 * kRest);
    ring.give_back();
  };
  using Two = std::integral_constant<int, kTwo>;
  using Four = std::integral_constant<int, kFour>;

  // Two or four segments; under the first one's products a subtree of four leaves.
  const auto segments_of = [&](auto second) {
    ring.chain(left, right, task.length, [&](int kt) {
      if constexpr (second()) send_left(kFour, kt);
    });
    keep();
    ring.chain(left, right, task.length, [](int) {});
    if constexpr (Count > 2) {
#pragma unroll
      for (int i = 0; i < 48; ++i) even[i] = __fadd_rn(even[i], left[i]);
#pragma unroll
      for (int i = 48; i < 64; ++i) left[i] = __fadd_rn(even[i], left[i]);
#pragma unroll
      for (int i = 0; i < 4; ++i) put_shared(spare + i * kRow, left + 48 + 4 * i);
      add_rows<16, true>(mine, right);
      send_right(kTwo);
      ring.chain(left, right, task.length, [&](int kt) { send_left(kTwo, kt); });
      keep();
      ring.chain(left, right, task.length, [](int) {});
      add_subtree(Two{});
    } else {
      add_kept_left();
      add_rows<16>(mine, right);
    }
  };

  for (int id = static_cast<int>(blockIdx.x) / kCluster; id < tiles; id += clusters) {
    segments_of(std::false_type{});
    if constexpr (Count == 8) {
      keep();
      send_right(kFour);
      segments_of(std::true_type{});
      add_subtree(Four{});
    }
    const SegmentsPlace place = SegmentsRaster(task.rows, task.cols).at<1>(id, static_cast<int>(cluster_rank()));
    const int first = place.m + own * 64 + (thread / 32) * 16;
    if (task.wide) {
      const int row = first + lane / 4, column = place.n + (lane % 4) * 2;
      store_floats(left, task, row, column);
      store_floats(right, task, row, column + 128);
    } else if constexpr (Count == 8) {  // no registers for the addresses of what follows
      const Stager stager{waiting, lane};
      stager.send(left, static_cast<__nv_bfloat16*>(task.out), task.cols, task.rows, task.cols, first, place.n);
      stager.send(right, static_cast<__nv_bfloat16*>(task.out), task.cols, task.rows, task.cols, first, place.n + 128);
      __syncwarp();
    } else {
      int here = lane;
      asm volatile("" : "+r"(here));  // keeps addresses from being computed before the loop, where registers are short
      const Stager of_left{waiting, here}, of_right{waiting + 4096, here};
      of_left.begin();
      stage_row(left, 0, of_left);
      stage_row(left + 2, 1, of_left);
      stage_row(right, 0, of_right);
      stage_row(right + 2, 1, of_right);
      __syncwarp();
      flush_tile(waiting, here, static_cast<__nv_bfloat16*>(task.out), task.rows, task.cols, first, place.n);
      __syncwarp();
    }
  }
}

template <int Count, int TransposeB>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1) wide_kernel(const __grid_constant__ Wide task) {
  extern __shared__ uint8_t raw[];
  const uint32_t base = (smem_address(raw) + 1023) & ~1023u;
  const int group = static_cast<int>(threadIdx.x) / 128, thread = threadIdx.x % 128;
  if (threadIdx.x == 32) {
    fetch_map(&task.a);
    fetch_map(&task.b);
  }
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
  task.told = std::min(task.length - 1, (3 << task.spread) + 3);  // when the stores have long reached the L2
  by_segments(count, transposed, [&](auto number, auto mn) { launch_wide<number(), mn()>(task, scratch_size, stream); });
}

}  // namespace rlk::sm90
