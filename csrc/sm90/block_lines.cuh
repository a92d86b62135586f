// Tiles of dH with tokens as rows: blocks of k added in order, in whole lines of memory.
#pragma once
#include "epilogue.cuh"

namespace rlk::sm90 {

// Outputs of one warp, 16 tokens x 256 values of the hidden size, 32 values at a time: a thread has pairs of values, a line of
// memory is 32 of them. They turn in the warp's own shared memory (twice 2 KiB, 128 bytes a token), where chunks of 16 bytes
// lie such that neither way meets a bank twice.
struct Lines {
  uint32_t address;
  int lane, rows, values;  // of the tokens from lane / 8 on, of the values from 4 (lane % 8) on: how many there are
  int cols;

  // Values 32 `part` and on; acc[4 j + 2 h + b] is token lane / 4 + 8 h, value 8 j + 2 (lane % 4) + b.
  __device__ __forceinline__ void put(int part, const float* acc) const {
    const uint32_t to = address + part % 2 * 2048 + lane / 4 * 128 + lane % 2 * 8;
    const int chunk = lane % 4 / 2 ^ lane / 4 % 4 * 2;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + h * 1024 + (chunk ^ 2 * j) * 16), "f"(acc[4 * j + 2 * h]),
                     "f"(acc[4 * j + 2 * h + 1])
                     : "memory");
      }
    }
  }
  // Of token 4 i + lane / 8 values 4 (lane % 8) and three more, as all of the following.
  __device__ __forceinline__ float4 get(int part, int i) const {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address + part % 2 * 2048 + i * 512 + lane / 8 * 128 + (lane % 8 ^ lane / 8 * 2) * 16)
                 : "memory");
    return x;
  }
  __device__ __forceinline__ bool inside(int part, int i) const { return 4 * i < rows && 32 * part < values; }
  __device__ __forceinline__ float4* at(float* first, int part,
                                        int i) const {  // by asm: the compiler would make all of them first
    float4* to;
    asm volatile("mad.wide.u32 %0, %1, %2, %3;" : "=l"(to) : "r"(cols), "r"(i * 16), "l"(first + part * 32));
    return to;
  }
  __device__ __forceinline__ void load(float* first, int part, float4 (&before)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      before[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // else it keeps its registers from tile to tile
      if (inside(part, i)) before[i] = __ldcg(at(first, part, i));
    }
  }
  // first: the lane's first value of its first token. Round: sums go to bf16 rows, places[i] the lane's first value in that of
  // token 4 i + lane / 8.
  template <bool Add, bool Round>
  __device__ __forceinline__ void store(const float (&left)[64], const float (&right)[64], float* first,
                                        __nv_bfloat16* const (&places)[4]) const {
    constexpr int kParts = 8, kAhead = 2;
    [[maybe_unused]] float4 before[kParts][4];
    if constexpr (Add) {
#pragma unroll
      for (int part = 0; part < kAhead; ++part) load(first, part, before[part]);
    }
    __syncwarp();  // what the memory held has been read
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      put(part, (part < 4 ? left : right) + part % 4 * 16);
      if constexpr (Add) {
        if (part + kAhead < kParts) load(first, part + kAhead, before[part + kAhead]);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float4 x = get(part, i);
        if constexpr (Add) {
          const float4& y = before[part][i];
          x = make_float4(__fadd_rn(y.x, x.x), __fadd_rn(y.y, x.y), __fadd_rn(y.z, x.z), __fadd_rn(y.w, x.w));
        }
        if constexpr (Round) {
          if (inside(part, i)) {
            *reinterpret_cast<uint2*>(places[i] + part * 32) = make_uint2(pack(x.x, x.y), pack(x.z, x.w));
          }
        } else {
          if (inside(part, i)) __stcg(at(first, part, i), x);
        }
      }
    }
  }
};

// Waits for the blocks before, and says that this one is done. MayRound: the sums may be rounded.
template <bool MayRound>
__device__ __forceinline__ void store_block(const float (&left)[64], const float (&right)[64], const Tile& tile, uint32_t rank,
                                            uint32_t memory, int group, int thread) {
  const int lane = lane_now();
  const Problem& problem = *tile.problem;
  int* order = problem.order + (tile.index * kCluster + static_cast<int>(rank)) * 2 + group;
  if (tile.block > 0) await(order, tile.block);  // another cluster may have made the blocks before
  const int row = tile.m + group * 64 + thread / 32 * 16 + lane / 8, column = tile.n + lane % 8 * 4, cols = problem.cols;
  const Lines lines{memory, lane, tile.shape->rows - row, cols - column, cols};
  float* first = problem.out_float + static_cast<int64_t>(row) * cols + column;
  __nv_bfloat16* places[4] = {};
  if (MayRound && tile.rounds()) {  // there are blocks before
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      places[i] = problem.rounded + (4 * i < lines.rows ? problem.row_of[row + 4 * i] : 0) * cols + column;
    }
    lines.store<true, true>(left, right, first, places);
  } else if (tile.block > 0 || problem.continues != 0) {
    lines.store<true, false>(left, right, first, places);
  } else {
    lines.store<false, false>(left, right, first, places);
  }
  __threadfence();
  named_barrier(1 + group, 128);
  if (thread == 0) count_up(order);
}

}  // namespace rlk::sm90
