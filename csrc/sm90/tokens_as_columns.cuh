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

// Outputs of a warpgroup, 64 values of the hidden size of a number of tokens, 32 tokens at a time: a thread has single values of
// a token, memory has them side by side. They turn in the warpgroup's shared memory (twice 8 KiB, 256 bytes a token), where
// groups of 8 values lie such that neither way meets a bank twice.
struct Turner {
  uint32_t address;
  int lane, warp, barrier;
  float* first;  // fp32 [tokens, cols]: the lane's first value of its first token
  int tokens, cols;

  // Tokens 32 `part` and on; acc[4 j + 2 h + b] is token 8 j + 2 (lane % 4) + b, value 16 warp + lane / 4 + 8 h.
  __device__ __forceinline__ void put(int part, const float* acc) const {
    const int q = lane % 4;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int token = i / 4 * 8 + q * 2 + i % 2, group = 2 * warp + i / 2 % 2;
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(
                       address + part % 2 * 8192 + token * 256 + (group ^ q) * 32 + lane / 4 * 4),
                   "f"(acc[i])
                   : "memory");
    }
  }
  // Of token 8 warp + 2 i + lane / 16 values 4 (lane % 16) and three more, as all of the following.
  __device__ __forceinline__ float4 get(int part, int i) const {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address + part % 2 * 8192 + (8 * warp + 2 * i + lane / 16) * 256 + (lane % 16 / 2 ^ i) * 32 +
                       lane % 2 * 16)
                 : "memory");
    return x;
  }
  __device__ __forceinline__ bool inside(int part, int i) const { return part * 32 + i * 2 < tokens; }
  __device__ __forceinline__ float4* at(int part, int i) const {  // by asm: the compiler would make all of them first
    float4* to;
    asm volatile("mad.wide.u32 %0, %1, %2, %3;" : "=l"(to) : "r"(cols), "r"(part * 128 + i * 8), "l"(first));
    return to;
  }
  __device__ __forceinline__ void load(int part, float4 (&values)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // else it keeps its registers from tile to tile
      if (inside(part, i)) values[i] = __ldcg(at(part, i));
    }
  }
  // Values of the next parts are under way while those of this one are stored: the more, the more accumulators are done with.
  template <bool Add>
  __device__ __forceinline__ void store(const float (&left)[64], const float (&right)[64]) const {
    constexpr int kParts = 8;
    [[maybe_unused]] float4 before[kParts][4];
    if constexpr (Add) {
      load(0, before[0]);
      load(1, before[1]);
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      put(part, (part < 4 ? left : right) + part % 4 * 16);
      if constexpr (Add) {
#pragma unroll
        for (int next = loaded(part); next < loaded(part + 1); ++next) {
          if (next < kParts) load(next, before[next]);
        }
      }
      named_barrier(barrier, 128);  // also: all have read the part before
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float4 x = get(part, i);
        if constexpr (Add) {
          const float4& y = before[part][i];
          x = make_float4(__fadd_rn(y.x, x.x), __fadd_rn(y.y, x.y), __fadd_rn(y.z, x.z), __fadd_rn(y.w, x.w));
        }
        if (inside(part, i)) __stcg(at(part, i), x);
      }
    }
  }
  // Parts of which values are under way before part `part` is put.
  static constexpr int loaded(int part) { return 2 + part + (part + 1) / 4; }
};

// As store_block. memory: the warpgroup's.
__device__ __forceinline__ void store_tokens(
    const float (&left)[64], const float (&right)[64], const Tile& tile, uint32_t rank, uint32_t memory, int group,
    int thread) {
  const int lane = lane_now(), warp = thread / 32;
  const Problem& problem = *tile.problem;
  int* order = problem.order + (tile.index * kCluster + static_cast<int>(rank)) * 2 + group;
  if (tile.block > 0) await(order, tile.block);  // another cluster may have made the blocks before
  const int cols = problem.cols, token = tile.n + warp * 8 + lane / 16;
  const int value = tile.m + group * 64 + lane % 16 * 4;  // cols is a multiple of 8
  const int tokens = value < cols ? min(tile.shape->rows, tile.n + tile.shape->tokens) - token : 0;
  float* first = problem.out_float + static_cast<int64_t>(token) * cols + value;
  const Turner turner{memory, lane, warp, 1 + group, first, tokens, cols};
  if (tile.block > 0 || problem.continues != 0) {
    turner.store<true>(left, right);
  } else {
    turner.store<false>(left, right);
  }
  __threadfence();
  named_barrier(1 + group, 128);
  if (thread == 0) count_up(order);
}

}  // namespace rlk::sm90
