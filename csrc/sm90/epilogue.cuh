// How the accumulators of a tile are stored, 128 columns at a time.
#pragma once
#include "gemm_types.cuh"

namespace rlk::sm90 {

// Bf16 of one warp, Rows x 128, through the warp's own shared memory to global memory by the copy engine: two boxes of 64
// columns (128 bytes, swizzled as the map says). What lies outside of the map is not stored.
template <int Rows>
struct BulkStager {
  static constexpr int kRows = Rows, kBytes = Rows * kLeaf * 2;
  uint32_t address;
  const CUtensorMap* map;

  // Before the first put: what the memory held has been read.
  __device__ __forceinline__ void begin(int lane) const {
    if (lane == 0) stores_have_read();
    __syncwarp();
  }
  // Columns 8 j to 8 j + 31 of rows 8 h to 8 h + 7 (of 8 rows: of all), which a lane holds as accumulators do: value[i] is
  // columns 8 (j + i) + 2 (lane % 4) and the next one of row lane / 4. j: a multiple of 4.
  __device__ __forceinline__ void put(int j, int h, const uint32_t (&value)[4], int lane) const {
    const int row = lane % 8 + (Rows == 16 ? 8 * h : 0);
    store_matrices(address + j / 8 * (kBytes / 2) + row * 128 + ((j % 8 + lane / 8) ^ (lane % 8)) * 16, value);
  }
  __device__ __forceinline__ void flush(int row, int column, int lane) const {
    store_fence();
    __syncwarp();
    if (lane == 0) {
      store_tile(map, address, column, row);
      store_tile(map, address + kBytes / 2, column + 64, row);
      stores_commit();
    }
  }
};

// Each eight of the values in turn, for what is rare: an eighth of the instructions, which all have to come from memory when a
// kernel starts. f(turn, i, x): of x = acc[8 turn + i].
template <typename F>
__device__ __forceinline__ void by_eights(float (&acc)[64], F f) {
#pragma unroll 1
  for (int turn = 0; turn < 8; ++turn) {
    float first[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) first[i] = f(turn, i, acc[i]);
#pragma unroll
    for (int i = 0; i < 56; ++i) acc[i] = acc[i + 8];
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[56 + i] = first[i];
  }
}

// Correctly rounded acc / divisor (one divisor for each of the thread's two rows): a quotient from the rounded
// reciprocal, corrected twice, is exact unless the residual underflows or a value is not finite.
__device__ __forceinline__ void divide_rows(float (&acc)[64], const float (&divisor)[2]) {
  float largest = 0.0f, smallest = 1.0f;
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    largest = fmaxf(largest, fabsf(acc[i]));
    smallest = fminf(smallest, fabsf(acc[i]));
  }
  const bool plain = largest < 0x1p60f && smallest > 0x1p-60f && fminf(divisor[0], divisor[1]) > 0x1p-30f &&
                     fmaxf(divisor[0], divisor[1]) < 0x1p30f;
  if (__all_sync(~0u, plain)) {
    const float inverse[2] = {__frcp_rn(divisor[0]), __frcp_rn(divisor[1])};
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const float t = divisor[(i / 2) % 2], y = inverse[(i / 2) % 2];
      float q = __fmul_rn(acc[i], y);
      q = __fmaf_rn(__fmaf_rn(-q, t, acc[i]), y, q);
      acc[i] = __fmaf_rn(__fmaf_rn(-q, t, acc[i]), y, q);
    }
  } else {
    by_eights(acc, [&](int, int i, float x) { return __fdiv_rn(x, divisor[(i / 2) % 2]); });
  }
}

// Columns of one row of a half, as a thread's accumulators have them: x[4 j + b] is column 8 j + 2 (lane % 4) + b.
template <typename Stage>
__device__ __forceinline__ void stage_row(const float* x, int h, const Stage& stager, int lane) {
#pragma unroll
  for (int j = 0; j < 16; j += 4) {
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[i] = pack(x[(j + i) * 4], x[(j + i) * 4 + 1]);
    stager.put(j, h, packed, lane);
  }
}

__device__ __forceinline__ void count_up(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ void await(const int* counter, int value) {
  int seen;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (seen < value);
}

// fp32 [M, cols] <-> 128 columns of accumulators of one thread. Loads come before stores, some pairs at a time: a store in
// between would order them.
struct Pairs {
  static constexpr int kBatch = 16;
  int row, column, rows, cols;

  __device__ __forceinline__ Pairs(const Tile& tile, int half, int group, int thread)
      : row(tile.m + group * 64 + (thread / 32) * 16 + (thread % 32) / 4),
        column(tile.n + half * kLeaf + (thread % 4) * 2),
        rows(tile.shape->rows),
        cols(tile.problem->cols) {}
  __device__ __forceinline__ bool inside(int i) const { return row + (i % 2) * 8 < rows && column + (i / 2) * 8 < cols; }
  template <typename Float>
  __device__ __forceinline__ Float* start(Float* values) const {
    return values + static_cast<int64_t>(row) * cols + column;
  }
  __device__ __forceinline__ void load(float (&acc)[64], const float* from) const {
    const float* first[2] = {start(from), start(from) + 8 * static_cast<int64_t>(cols)};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (inside(i)) {
        const float2 value = __ldcg(reinterpret_cast<const float2*>(first[i % 2] + (i / 2) * 8));
        acc[2 * i] = value.x;
        acc[2 * i + 1] = value.y;
      }
    }
  }
  __device__ __forceinline__ void store(const float (&acc)[64], float* to, bool add) const {
    float* first[2] = {start(to), start(to) + 8 * static_cast<int64_t>(cols)};
#pragma unroll
    for (int part = 0; part < 32; part += kBatch) {
      float2 before[kBatch] = {};  // else what is not read keeps registers
#pragma unroll
      for (int i = part; i < part + kBatch; ++i) {
        if (add && inside(i)) before[i - part] = __ldcg(reinterpret_cast<const float2*>(first[i % 2] + (i / 2) * 8));
      }
#pragma unroll
      for (int i = part; i < part + kBatch; ++i) {
        float2 value = make_float2(acc[2 * i], acc[2 * i + 1]);
        if (add) value = make_float2(__fadd_rn(before[i - part].x, value.x), __fadd_rn(before[i - part].y, value.y));
        if (inside(i)) __stcg(reinterpret_cast<float2*>(first[i % 2] + (i / 2) * 8), value);
      }
    }
  }
};

// 128 columns of a product to memory: bf16 by the copy engine, fp32 at once.
__device__ __forceinline__ void store_half(const float (&acc)[64], int half, const Tile& tile, const BulkStager<16>& stager,
                                           int group, int thread) {
  const Problem& problem = *tile.problem;
  if (!__any_sync(~0u, problem.output == kBf16)) {
    Pairs(tile, half, group, thread).store(acc, problem.out_float, problem.output == kFloatAccumulate);
    return;
  }
  const int lane = lane_now(), row = tile.m + group * 64 + thread / 32 * 16;
  stager.begin(lane);
#pragma unroll
  for (int h = 0; h < 2; ++h) stage_row(acc + 2 * h, h, stager, lane);
  if (row < tile.shape->rows) stager.flush(row, tile.n + half * kLeaf, lane);
}

}  // namespace rlk::sm90
