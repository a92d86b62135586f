// Tiles of dH with tokens as columns: dH^T = W^T d^T, blocks of k (columns of the vocabulary) added in order.
//
// As rows, tokens come in tiles of 128, and an odd one of them costs a cluster more than its share. As columns they come in
// tiles of any multiple of 8: 796 tokens are 4 x 200 instead of 7 x 128, 1820 are 8 x 232 instead of 15 x 128. A cluster
// takes 256 of the hidden size (each block 128, MN-major as the weight is stored) and shares the tokens, of which each
// block loads a box. Rows and columns of a product may change places: each output stays the same chain over ascending k.
#pragma once
#include "turner.cuh"
#include "wgmma_columns.cuh"

namespace rlk::sm90 {

// What the producer of one block loads for one tile of k. The boxes have room for the most tokens a tile may have;
// those beyond this tile's are not multiplied.
__device__ __forceinline__ void load_tokens(const Tile& tile, uint32_t rank, int k, uint32_t barrier, uint32_t a, uint32_t b) {
  const Problem& problem = *tile.problem;
  barrier_expect(barrier, kBytesA + problem.most * kTileK * 2);
  load_tile(a, &problem.b, barrier, tile.m, k);
  load_tile(a + 8192, &problem.b, barrier, tile.m + 64, k);
  if (rank == 0) {
    load_tile_multicast(b, &problem.tokens[0], barrier, k, tile.n, 3);
  } else {
    load_tile_multicast(b + problem.box * kTileK * 2, &problem.tokens[1], barrier, k, tile.n + problem.box, 3);
  }
}

template <int Columns, typename Consumer>
__device__ __forceinline__ void multiply_columns(float (&left)[64], float (&right)[64], int count, Consumer& c) {
  multiply_tiles(left, right, count, c, [&](int kt) {
    const uint64_t a = c.a(c.ring), b = c.b(c.ring, 0);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) {
      wgmma_columns<Columns>(left, right, a + (k * 2048 >> 4), b + (k * 32 >> 4), kt > 0 || k > 0);
    }
  });
}

// All products of a tile, which there are.
template <typename Consumer>
__device__ __forceinline__ void multiply_tokens(float (&left)[64], float (&right)[64], const Tile& tile, Consumer& c) {
  switch (tile.shape->tokens) {
    case 160: return multiply_columns<160>(left, right, tile.k_tiles, c);
    case 168: return multiply_columns<168>(left, right, tile.k_tiles, c);
    case 176: return multiply_columns<176>(left, right, tile.k_tiles, c);
    case 184: return multiply_columns<184>(left, right, tile.k_tiles, c);
    case 192: return multiply_columns<192>(left, right, tile.k_tiles, c);
    case 200: return multiply_columns<200>(left, right, tile.k_tiles, c);
    case 208: return multiply_columns<208>(left, right, tile.k_tiles, c);
    case 216: return multiply_columns<216>(left, right, tile.k_tiles, c);
    case 224: return multiply_columns<224>(left, right, tile.k_tiles, c);
    case 232: return multiply_columns<232>(left, right, tile.k_tiles, c);
    case 240: return multiply_columns<240>(left, right, tile.k_tiles, c);
    default: return multiply_columns<248>(left, right, tile.k_tiles, c);
  }
}

// As store_block. memory: the warpgroup's.
__device__ __forceinline__ void store_tokens(const float (&left)[64], const float (&right)[64], const Tile& tile, uint32_t rank,
                                             uint32_t memory, int group, int thread) {
  const int lane = lane_now(), warp = thread / 32;
  const Problem& problem = *tile.problem;
  int* order = problem.order + (tile.index * kCluster + static_cast<int>(rank)) * 2 + group;
  if (tile.block > 0) await(order, tile.block);  // another cluster may have made the blocks before
  const int cols = problem.cols, token = tile.n + warp * 8 + lane / 16;
  const int value = tile.m + group * 64 + lane % 16 * 4;  // cols is a multiple of 8
  const int tokens = value < cols ? min(tile.shape->rows, tile.n + tile.shape->tokens) - token : 0;
  float* first = problem.out_float + static_cast<int64_t>(token) * cols + value;
  const Turner turner{memory, lane, warp, 1 + group, first, tokens, cols};
  auto values = [&](int part) { return (part < 4 ? left : right) + part % 4 * 16; };
  auto loaded = [](int part) constexpr { return 2 + part + (part + 1) / 4; };  // the more, the more accumulators are done with
  if (tile.block > 0 || problem.continues != 0) {
    turner.store<true, 8>(values, loaded);
  } else {
    turner.store<false, 8>(values, loaded);
  }
  __threadfence();
  named_barrier(1 + group, 128);
  if (thread == 0) count_up(order);
}

}  // namespace rlk::sm90
