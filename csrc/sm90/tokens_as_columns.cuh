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

// fp32 [tokens, cols] <-> 128 tokens of the accumulators of one thread: acc[4 j + 2 h + b] is token 8 j + b of `first`,
// value 8 h. Eight lanes have 32 bytes of a row together. limit: tokens from the thread's first one on, for each h; 0 beyond
// cols. Loads come before stores, some at a time: a store in between would order them.
template <bool Add>
__device__ __forceinline__ void store_tokens_half(const float (&acc)[64], float* first, const int (&limit)[2], int cols) {
  constexpr int kBatch = 32;
  const auto at = [&](int i) {  // one instruction for two values, where the compiler's own arithmetic takes four for each
    float* token;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(token) : "r"(cols * 4), "r"(i / 4 * 8 + i % 2), "l"(first));
    return token + i / 2 % 2 * 8;
  };
  const auto inside = [&](int i) { return i / 4 * 8 + i % 2 < limit[i / 2 % 2]; };
#pragma unroll
  for (int part = 0; part < 64; part += kBatch) {
    float before[kBatch];
    if constexpr (Add) {
#pragma unroll
      for (int i = part; i < part + kBatch; ++i) {
        if (inside(i)) before[i - part] = __ldcg(at(i));
      }
    }
#pragma unroll
    for (int i = part; i < part + kBatch; ++i) {
      if (inside(i)) __stcg(at(i), Add ? __fadd_rn(before[i - part], acc[i]) : acc[i]);
    }
  }
}

// As store_block, for both halves.
__device__ __forceinline__ void store_tokens(
    const float (&left)[64], const float (&right)[64], const Tile& tile, uint32_t rank, int group, int thread) {
  const Problem& problem = *tile.problem;
  int* order = problem.order + (tile.index * kCluster + static_cast<int>(rank)) * 2 + group;
  if (tile.block > 0) await(order, tile.block);  // another cluster may have made the blocks before
  const int cols = problem.cols, token = tile.n + thread % 4 * 2, row = tile.m + group * 64 + thread / 32 * 16 + thread % 32 / 4;
  const int tokens = min(tile.shape->rows, tile.n + tile.shape->tokens) - token;
  const int limit[2] = {row < cols ? tokens : 0, row + 8 < cols ? tokens : 0};
  const int limit_right[2] = {limit[0] - kLeaf, limit[1] - kLeaf};
  float* first = problem.out_float + static_cast<int64_t>(token) * cols + row;
  float* first_right = first + static_cast<int64_t>(kLeaf) * cols;
  if (tile.block > 0 || problem.continues != 0) {
    store_tokens_half<true>(left, first, limit, cols);
    store_tokens_half<true>(right, first_right, limit_right, cols);
  } else {
    store_tokens_half<false>(left, first, limit, cols);
    store_tokens_half<false>(right, first_right, limit_right, cols);
  }
  __threadfence();
  named_barrier(1 + group, 128);
  if (thread == 0) count_up(order);
}

}  // namespace rlk::sm90
