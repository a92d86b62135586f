// Tiles of dH with tokens as columns: dH^T = W^T d^T, blocks of k (columns of the vocabulary) added in order.
//
// As rows, tokens come in tiles of 128, and an odd one of them costs a cluster more than its share. As columns they come in
// tiles of any multiple of 8: 796 tokens are 4 x 200 instead of 7 x 128, 1820 are 8 x 232 instead of 15 x 128. A cluster
// takes 256 of the hidden size (each block 128, MN-major as the weight is stored) and shares the tokens, of which each
// block loads a box. Rows and columns of a product may change places: each output stays the same chain over ascending k.
#pragma once
#include "epilogue.cuh"
#include "wgmma_columns.cuh"

namespace rlk::sm90 {

// What the producer of one block loads for one tile of k. The boxes may hold up to 8 tokens more than the tile has.
__device__ __forceinline__ void load_tokens(const Tile& tile, uint32_t rank, int k, uint32_t barrier, uint32_t a, uint32_t b) {
  const Problem& problem = *tile.problem;
  const int box = problem.box;
  barrier_expect(barrier, kBytesA + kCluster * box * kTileK * 2);
  load_tile(a, &problem.b, barrier, tile.m, k);
  load_tile(a + 8192, &problem.b, barrier, tile.m + 64, k);
  load_tile_multicast(b + rank * box * kTileK * 2, &problem.tokens, barrier, k, tile.n + static_cast<int>(rank) * box, 3);
}

template <int Columns, typename Consumer>
__device__ __forceinline__ void multiply_columns(float (&left)[64], float (&right)[64], int count, Consumer& c) {
  int held = 0;
  pin(left);
  pin(right);
#pragma unroll 1
  for (int kt = 0;;) {
    c.wait(c.ring);
    const uint64_t a = c.a(c.ring), b = c.b(c.ring, 0);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) {
      wgmma_columns<Columns>(left, right, a + (k * 2048 >> 4), b + (k * 32 >> 4), kt > 0 || k > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();
    c.release(held);
    held = 1;
    c.ring.next();
    if (++kt == count) break;
  }
  wgmma_wait<0>();
  pin(left);
  pin(right);
  c.release(held);
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

// 128 tokens of the accumulators of one thread -> fp32 [tokens, cols]: acc[4 j + 2 h + b] is token 8 j + b from `token` on,
// value 8 h from `row` on. A quarter of a warp's lanes have 32 bytes in a row of memory. Loads come before stores.
__device__ __forceinline__ void store_tokens_half(
    const float (&acc)[64], float* to, bool add, int token, int tokens, int row, int cols) {
  constexpr int kBatch = 32;
  const auto inside = [&](int i) { return token + i / 4 * 8 + i % 2 < tokens && row + i / 2 % 2 * 8 < cols; };
  const auto at = [&](int i) {
    return to + static_cast<int64_t>(token + i / 4 * 8 + i % 2) * cols + (row + i / 2 % 2 * 8);
  };
#pragma unroll
  for (int part = 0; part < 64; part += kBatch) {
    float before[kBatch];
#pragma unroll
    for (int i = part; i < part + kBatch; ++i) {
      if (add && inside(i)) before[i - part] = __ldcg(at(i));
    }
#pragma unroll
    for (int i = part; i < part + kBatch; ++i) {
      const float value = add ? __fadd_rn(before[i - part], acc[i]) : acc[i];
      if (inside(i)) __stcg(at(i), value);
    }
  }
}

// As store_block, for both halves.
__device__ __forceinline__ void store_tokens(
    const float (&left)[64], const float (&right)[64], const Tile& tile, uint32_t rank, int group, int thread) {
  const Problem& problem = *tile.problem;
  int* order = problem.order + (tile.index * kCluster + static_cast<int>(rank)) * 2 + group;
  if (tile.block > 0) await(order, tile.block);  // another cluster may have made the blocks before
  const bool add = tile.block > 0 || problem.continues != 0;
  const int token = tile.n + thread % 4 * 2, tokens = min(tile.shape->rows, tile.n + tile.shape->tokens);
  const int row = tile.m + group * 64 + thread / 32 * 16 + thread % 32 / 4;
  store_tokens_half(left, problem.out_float, add, token, tokens, row, problem.cols);
  store_tokens_half(right, problem.out_float, add, token + kLeaf, tokens, row, problem.cols);
  __threadfence();
  named_barrier(1 + group, 128);
  if (thread == 0) count_up(order);
}

}  // namespace rlk::sm90
