// Tall tiles of dW: 256 of the hidden size and 160 of the vocabulary a block, dW^T = hidden^T d.
//
// What a processor takes in for a product, and what that costs in power, falls with the size of its tile: 256 + 160 rows of k
// here make a quarter more outputs than 128 + 256. A warpgroup has twice 64 x 160 accumulators. The blocks of a cluster have
// the hidden size in common, and each its own part of the vocabulary. Such a stage is larger, so there are three, on the same
// memory as the four of dH, which are through before. Rows and columns of a product may change places: each output stays the
// same chain over ascending k.
//
// The two 64 rows of a warpgroup, its halves, begin and end apart, so that the tensor cores work meanwhile: the last tile of k
// is multiplied for the left half, then for the right one. As soon as the left one is complete it is put into shared memory,
// turned, and the next tile's first products start on its accumulators; then the right one. A warpgroup waits while the tensor
// cores take its products up, so only what follows them runs beside the last ones.
#pragma once
#include "halves.cuh"
#include "turner.cuh"
#include "wgmma_tall.cuh"

namespace rlk::sm90 {

constexpr int kTallHidden = 256, kTallColumns = 160, kTallStages = 3;
constexpr int kTallChunk = 32;  // columns side by side in shared memory: 64 bytes, of which 160 are a multiple
constexpr int kBytesTallA = kTallHidden * kTileK * 2, kBytesTallB = kTallColumns * kTileK * 2;
constexpr int kBytesTallStage = kBytesTallA + kBytesTallB, kBytesTallStaging = 64 * kTallColumns * 2;  // of a warpgroup
constexpr int kTallLeast = 3;  // tiles of k

__host__ __device__ __forceinline__ int tall_tiles(int vocabulary, int hidden) {
  return (hidden + kTallHidden - 1) / kTallHidden * ((vocabulary + kCluster * kTallColumns - 1) / (kCluster * kTallColumns));
}

// Tile number `id` of the first block of a cluster: row is of the hidden size, column of the vocabulary. As in `locate`, groups
// of tiles side by side, so that their hidden states stay in the L2.
__device__ __forceinline__ TileAt tall_tile(const Problem& problem, int id) {
  const int across = (problem.cols + kTallHidden - 1) / kTallHidden;
  const int down = (problem.rows + kCluster * kTallColumns - 1) / (kCluster * kTallColumns), per_group = down * problem.group;
  const int groups = max(across / problem.group, 1), group = min(id / per_group, groups - 1), first = group * problem.group;
  const int width = group + 1 < groups ? problem.group : across - first, inside = id - group * per_group;
  return {(first + inside % width) * kTallHidden, inside / width * kCluster * kTallColumns};
}

struct TallConsumer : ConsumerOf<kTallStages> {
  __device__ __forceinline__ TallConsumer(uint32_t stages, uint32_t full, uint32_t empty, int group, int thread)
      : ConsumerOf(stages, full, empty, group, thread) {
    first_a = descriptor_kept(descriptor(stages + group * 16384, 8192, 1024));
    first_b = descriptor_kept(descriptor<64>(stages + kBytesTallA, 4096, 512));
  }
  __device__ __forceinline__ uint64_t a(const Ring& at, int half) const {
    return descriptor_behind(first_a, at.stage * kBytesTallStage + half * 8192);
  }
  __device__ __forceinline__ uint64_t b(const Ring& at) const { return descriptor_behind(first_b, at.stage * kBytesTallStage); }
};

// What the producer of one block loads for one tile of k.
__device__ __forceinline__ void load_tall(const TileAt& at, const CUtensorMap* hidden, const CUtensorMap* columns,
                                          uint32_t rank, int k, uint32_t barrier, uint32_t a) {
  barrier_expect(barrier, kBytesTallStage);
  for (uint32_t chunk = rank * 2; chunk < rank * 2 + 2; ++chunk) {
    load_tile_multicast(a + chunk * 8192, hidden, barrier, at.m() + static_cast<int>(chunk) * 64, k, 3);
  }
  for (int chunk = 0; chunk < kTallColumns / kTallChunk; ++chunk) {
    load_tile(a + kBytesTallA + chunk * 4096, columns, barrier, at.column + chunk * kTallChunk, k);
  }
}

// One tile of k of one half, a group of products in flight; see multiply_half.
template <bool Arrived, int Steps = kTileK / 16>
__device__ __forceinline__ void multiply_tall_half(float (&acc)[80], int half, bool continued, const TallConsumer& c) {
  if constexpr (!Arrived) {
    pin(acc);
    c.wait(c.ring);
  }
  const uint64_t a = c.a(c.ring, half), b = c.b(c.ring);
  if constexpr (!Arrived) wgmma_fence();
#pragma unroll
  for (int k = 0; k < Steps; ++k) wgmma_64x160x16(acc, a + (k * 2048 >> 4), b + (k * 1024 >> 4), continued || k > 0);
  wgmma_commit();
}

__device__ __forceinline__ void multiply_tall(float (&left)[80], float (&right)[80], int count, TallConsumer& c) {
  multiply_tiles(left, right, count, c, [&](int) {
    const uint64_t a[2] = {c.a(c.ring, 0), c.a(c.ring, 1)}, b = c.b(c.ring);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) {
      wgmma_64x160x16(left, a[0] + (k * 2048 >> 4), b + (k * 1024 >> 4), true);
      wgmma_64x160x16(right, a[1] + (k * 2048 >> 4), b + (k * 1024 >> 4), true);
    }
  });
}

// 64 of the hidden size and 160 of the vocabulary on their way to dW: acc[4 j + 2 h + b] is row 16 warp + lane / 4 + 8 h,
// column 8 j + 2 (lane % 4) + b; memory has the rows side by side. bf16 turns in the warpgroup's shared memory, 128 bytes a
// column, swizzled as the map says, and leaves by the copy engine.
struct TallOutgoing {
  const Problem& problem;
  const CUtensorMap* stores;
  uint32_t staging;
  int group, thread;

  __device__ __forceinline__ void leave(const float (&acc)[80], const TileAt& at, int half) const {
    const int row = at.m() + group * 128 + half * 64;
    if (__any_sync(~0u, problem.output == kBf16)) {
      stage(acc, row, at.column);
    } else {
      store(acc, row, at.column);
    }
  }
  __device__ __forceinline__ void stage(const float (&acc)[80], int row, int column) const {
    const int lane = lane_now(), warp = thread / 32;
    if (thread == 0) stores_have_read();
    named_barrier(1 + group, 128);
    const uint32_t to = staging + (lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16;
#pragma unroll
    for (int j = 0; j < kTallColumns / 8; j += 2) {
      const uint32_t four[4] = {pack(acc[4 * j], acc[4 * j + 1]), pack(acc[4 * j + 2], acc[4 * j + 3]),
                                pack(acc[4 * j + 4], acc[4 * j + 5]), pack(acc[4 * j + 6], acc[4 * j + 7])};
      store_matrices_turned(to + j * 1024, four);
    }
    store_fence();
    named_barrier(1 + group, 128);
    if (thread == 0) {
      store_tile(stores, staging, row, column);
      stores_commit();
    }
  }
  // fp32, in whole lines.
  __device__ __forceinline__ void store(const float (&acc)[80], int first_row, int first_column) const {
    const int lane = lane_now(), warp = thread / 32, cols = problem.cols;
    const int column = first_column + warp * 8 + lane / 16, row = first_row + lane % 16 * 4;  // cols is a multiple of 8
    float* first = problem.out_float + static_cast<int64_t>(column) * cols + row;
    const Turner turner{
        staging, lane, warp, 1 + group, first, row < cols ? min(problem.rows, first_column + kTallColumns) - column : 0, cols};
    auto values = [&](int part) { return acc + part * 16; };
    named_barrier(1 + group, 128);  // all have read what the memory held
    if (__any_sync(~0u, problem.output == kFloatAccumulate)) {
      turner.store<true, kTallColumns / 32>(values, [](int part) constexpr { return 1 + part; });
    } else {
      turner.store<false, kTallColumns / 32>(values, [](int) constexpr { return 0; });
    }
  }
};

// All tiles of a warpgroup, the first of which is `at`; next() is the one behind. brief: the second half of the last tile of k
// is zeros and left out; products before it have met such zeros already, so not even a -0 would change.
template <typename Next>
__device__ __forceinline__ void multiply_all_tall(TileAt at, int tiles_k, bool brief, TallConsumer& c,
                                                  const TallOutgoing& outgoing, Next next) {
  float left[80], right[80];
  const int middle = tiles_k - 2;
  forget(left);
  multiply_tall_half<false>(left, 0, false, c);
  forget(right);
  wgmma_wait<0>();
  pin(left);
  multiply_tall_half<false>(right, 1, false, c);
  c.ring.next();
  wgmma_wait<0>();
  pin(right);
  c.release(1);
  while (true) {
    multiply_tall(left, right, middle, c);
    if (brief) {
      multiply_tall_half<false, 2>(left, 0, true, c);
      multiply_tall_half<true, 2>(right, 1, true, c);
    } else {
      multiply_tall_half<false>(left, 0, true, c);
      multiply_tall_half<true>(right, 1, true, c);
    }
    c.ring.next();
    const TileAt last = at;
    at = next();
    wgmma_wait<1>();
    pin(left);
    outgoing.leave(left, last, 0);
    // Behind the last tile the products are of what the memory happens to hold: with accumulators in flight on one way and not
    // on the other, the compiler would serialise all products (C7514).
    const bool more = __any_sync(~0u, !at.is(TileAt::kEnd));
    if (!more) c.ring.phase ^= 1;  // there is nothing to wait for
    forget(left);
    multiply_tall_half<false>(left, 0, false, c);
    wgmma_wait<1>();
    pin(right);
    c.release(1);
    outgoing.leave(right, last, 1);
    forget(right);
    multiply_tall_half<false>(right, 1, false, c);
    c.ring.next();
    wgmma_wait<0>();
    pin(left);
    pin(right);
    if (!more) break;
    c.release(1);
  }
}

}  // namespace rlk::sm90
