// What happens to the accumulators of a tile, 128 columns at a time: statistics and gradients of the vocabulary, stores.
#pragma once
#include "gemm_types.cuh"

namespace rlk::sm90 {

// Sums over the 128 columns of one leaf, of two values for each of two rows. The tree over adjacent pairs of columns: lane q
// of a quad has columns 8 j + 2 q and 8 j + 2 q + 1, whose sums are the x below. Over q lanes swap: of two values a lane
// sums one and its neighbour the other, so that a lane ends with one of the four. Over j it is alone with it.

// Sum of this lane's and lane ^ across's `second` where takes_second holds, else of their `first`; they differ in it.
__device__ __forceinline__ float swap_add(float first, float second, bool takes_second, int across) {
  const float keep = takes_second ? second : first, give = takes_second ? first : second;
  return __fadd_rn(keep, __shfl_xor_sync(~0u, give, across));
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// 16 x 128 bf16 of one warp through the warp's own shared memory to global memory, 256 bytes of a row at a time.
struct Stager {
  static constexpr int kRows = 16;
  uint32_t address;  // 4 KiB
  int lane;

  // Before the first put: what the memory held has been read.
  __device__ __forceinline__ void begin() const { __syncwarp(); }
  // Columns 8 j to 8 j + 31 of rows 8 h to 8 h + 7, which a lane holds as accumulators do: value[i] is columns
  // 8 (j + i) + 2 (lane % 4) and the next one of row lane / 4. j: a multiple of 4.
  __device__ __forceinline__ void put(int j, int h, const uint32_t (&value)[4]) const {
    store_matrices(address + (lane % 8 + 8 * h) * 256 + (((j + lane / 8) ^ (lane % 8)) * 16), value);
  }
  // 128 columns from `column` on, rows from `row` on. `out` [rows, >= cols] with rows of `stride` elements, a multiple
  // of 8: whole groups of 8 columns are written, so up to 7 columns of padding.
  __device__ __forceinline__ void flush(
      __nv_bfloat16* out, int64_t stride, int rows, int cols, int row, int column) const {
    __syncwarp();
    const int chunk = lane % 16, at = column + chunk * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = 2 * i + lane / 16;
      uint4 value;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                   : "r"(address + r * 256 + ((chunk ^ (r % 8)) * 16))
                   : "memory");
      if (row + r < rows && at < cols) {
        *reinterpret_cast<uint4*>(out + static_cast<int64_t>(row + r) * stride + at) = value;
      }
    }
  }
};

// x[4 j + b] is column 8 j + 2 (lane % 4) + b.
__device__ __forceinline__ void stage_row(const float* x, int h, const Stager& stager) {
#pragma unroll
  for (int j = 0; j < 16; j += 4) {
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[i] = pack(x[(j + i) * 4], x[(j + i) * 4 + 1]);
    stager.put(j, h, packed);
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
#pragma unroll
    for (int i = 0; i < 64; ++i) acc[i] = __fdiv_rn(acc[i], divisor[(i / 2) % 2]);
  }
}

// exp(x - shift) of one row of a leaf to shared memory, and the tree over it and its products with x - shift: of row 0 as
// far as `sums`, by j; of both rows up to levels[4]. levels: complete subtrees over j.
template <typename Stage>
__device__ __forceinline__ void statistics_of_row(
    const float* x, int h, float shift, float (&sums)[16], float (&levels)[5], const Stage& stager) {
  const bool odd = stager.lane & 1, high = stager.lane & 2;
#pragma unroll
  for (int part = 0; part < 16; part += 4) {
    uint32_t packed[4];
#pragma unroll
    for (int j = part; j < part + 4; ++j) {
      float value[2], product[2];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float d = __fsub_rn(x[j * 4 + b], shift);
        value[b] = exp_(d);
        product[b] = __fmul_rn(value[b], fmaxf(d, -200.0f));  // e is 0 long before; keeps 0 * -inf out
      }
      packed[j - part] = pack(value[0], value[1]);
      float sum = swap_add(__fadd_rn(value[0], value[1]), __fadd_rn(product[0], product[1]), odd, 1);
      if (h == 0) {
        sums[j] = sum;
      } else {
        sum = swap_add(sums[j], sum, high, 2);
        int level = 0;
#pragma unroll
        for (; j >> level & 1; ++level) sum = __fadd_rn(levels[level], sum);
        levels[level] = sum;
      }
    }
    stager.put(part, h, packed);
  }
}

// What the halves of a tile have in common for one thread: its two rows.
struct TwoRows {
  int m, n;          // where the tile starts
  int row[2];
  int hit[2];        // the target's column in the tile, or -1
  float temperature[2];

  __device__ __forceinline__ TwoRows(const Tile& tile, const Vocabulary& v, int group, int thread) : m(tile.m), n(tile.n) {
    const int rows = tile.shape->rows;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row[h] = m + group * 64 + (thread / 32) * 16 + (thread % 32) / 4 + 8 * h;
      const bool inside = row[h] < rows;
      const int64_t column = inside ? v.targets[row[h]] - v.start - n : -1;
      hit[h] = column >= 0 && column < min(kTileN, v.columns - n) ? static_cast<int>(column) : -1;
      temperature[h] = inside && v.temperatures != nullptr ? v.temperatures[row[h]] : 1.0f;
    }
  }
};

// One leaf for each of the thread's two rows: acc[4 j + 2 h + b] is column 8 j + 2 (lane % 4) + b of row h. `between`
// runs when the arithmetic is done and only stores are left. Some: whether some columns may be kept and others not. A stager
// of 8 rows takes those of either h in turn.
template <int Kind, bool Some, typename Stage, typename Between>
__device__ __forceinline__ void vocabulary_leaf(
    float (&acc)[64], int leaf, const TwoRows& two, const Shape& shape, const Problem& problem, const Vocabulary& v,
    const Stage& stager, int group, int thread, Between between) {
  const int lane = thread % 32, quad_lane = lane % 4, first = two.n + leaf * kLeaf;
  if (__any_sync(~0u, two.temperature[0] != 1.0f || two.temperature[1] != 1.0f)) {  // division by one changes nothing
    divide_rows(acc, two.temperature);
  }
  if (first + kLeaf > v.columns) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      if (first + (i / 4) * 8 + quad_lane * 2 + i % 2 >= v.columns) acc[i] = -INFINITY;
    }
  }
  const int hit[2] = {two.hit[0] - leaf * kLeaf, two.hit[1] - leaf * kLeaf};  // outside 0 .. 127: none here
  const bool any_hit =
      __any_sync(~0u, static_cast<unsigned>(hit[0]) < kLeaf || static_cast<unsigned>(hit[1]) < kLeaf);  // rare
  if constexpr (Kind == kStatistics) {
    if (any_hit) {
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        const int h = (i / 2) % 2;
        if (hit[h] == (i / 4) * 8 + quad_lane * 2 + i % 2) v.target_logit[two.row[h]] = acc[i];
      }
    }
  }
  stager.begin();
  [[maybe_unused]] float sums[16], levels[5], maxima[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float* x = acc + 2 * h;  // x[4 j + b]
    float leaf_max = -INFINITY;
#pragma unroll
    for (int i = 0; i < 32; ++i) leaf_max = fmaxf(leaf_max, x[(i / 2) * 4 + i % 2]);
    leaf_max = fmaxf(leaf_max, __shfl_xor_sync(~0u, leaf_max, 1));
    leaf_max = __fadd_rn(fmaxf(leaf_max, __shfl_xor_sync(~0u, leaf_max, 2)), 0.0f);
    const float shift = shift_of(leaf_max);
    if constexpr (Kind == kStatistics) {
      maxima[h] = leaf_max;
      statistics_of_row(x, h, shift, sums, levels, stager);
      if constexpr (Stage::kRows == 8) {
        if (h == 0 && (Some ? two.n < v.keep : v.keep > 0)) {
          stager.flush(problem.out, problem.out_stride, shape.store_rows, problem.cols,
                       two.m + group * 64 + (thread / 32) * 16, first);
          stager.begin();
        }
      }
    } else {
      const RowGrad grad = two.row[h] < shape.rows ? load_row_grad(v.table, two.row[h]) : RowGrad{};
      const LeafGrad gradient = LeafGrad::of(leaf_max, grad);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        float& z = x[(i / 2) * 4 + i % 2];
        z = __bfloat162float(__float2bfloat16_rn(exp_(__fsub_rn(z, shift))));
      }
      if (__any_sync(~0u, grad.ent != 0.0f)) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          x[(i / 2) * 4 + i % 2] = gradient.template operator()<true>(x[(i / 2) * 4 + i % 2], grad);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          x[(i / 2) * 4 + i % 2] = gradient.template operator()<false>(x[(i / 2) * 4 + i % 2], grad);
        }
      }
      if (any_hit) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          if (hit[h] == (i / 2) * 8 + quad_lane * 2 + i % 2) {
            x[(i / 2) * 4 + i % 2] = __fadd_rn(x[(i / 2) * 4 + i % 2], grad.logp);
          }
        }
      }
      stage_row(x, h, stager);
    }
  }
  if constexpr (Kind == kStatistics) {
    const bool odd = lane & 1, high = lane & 2;
    const int row = (high ? two.row[1] : two.row[0]), leaf_index = first / kLeaf;
    if (row < shape.rows && leaf_index < v.leaves) {
      const int64_t at = static_cast<int64_t>(row) * v.leaves + leaf_index;
      (odd ? v.leaf_mean : v.leaf_sum)[at] = levels[4];
      if (!odd) v.leaf_max[at] = high ? maxima[1] : maxima[0];
    }
  }
  between();
  if (Kind == kGradient || (Some ? two.n < v.keep : v.keep > 0)) {
    stager.flush(problem.out, problem.out_stride, shape.store_rows, problem.cols,
                 two.m + group * 64 + (thread / 32) * 16 + (16 - Stage::kRows), first);
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
        column(tile.n + half * kLeaf + (thread % 4) * 2), rows(tile.shape->rows), cols(tile.problem->cols) {}
  __device__ __forceinline__ bool inside(int i) const { return row + (i % 2) * 8 < rows && column + (i / 2) * 8 < cols; }
  template <typename Float>
  __device__ __forceinline__ Float* start(Float* values) const { return values + static_cast<int64_t>(row) * cols + column; }
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
      float2 before[kBatch];
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

// 128 columns of a product.
__device__ __forceinline__ void store_half(
    float (&acc)[64], int half, const Tile& tile, const Stager& stager, int group, int thread) {
  const Problem& problem = *tile.problem;
  if (problem.output == kBf16) {
    const Stager now{stager.address, lane_now()};
    now.begin();
    stage_row(acc, 0, now);
    stage_row(acc + 2, 1, now);
    now.flush(problem.out, problem.out_stride, tile.shape->rows, problem.cols,
              tile.m + group * 64 + (thread / 32) * 16, tile.n + half * kLeaf);
  } else {
    Pairs(tile, half, group, thread).store(acc, problem.out_float, problem.output == kFloatAccumulate);
  }
}

// kBlocks: the left half waits for the blocks before, the right one says that this one is done.
__device__ __forceinline__ void store_block(
    float (&acc)[64], int half, const Tile& tile, uint32_t rank, int group, int thread) {
  const Problem& problem = *tile.problem;
  int* order = problem.order + (tile.index * kCluster + static_cast<int>(rank)) * 2 + group;
  if (tile.block > 0 && half == 0) await(order, tile.block);  // another cluster may have made the blocks before
  Pairs(tile, half, group, thread).store(acc, problem.out_float, tile.block > 0 || problem.continues != 0);
  if (half == 1) {
    __threadfence();
    named_barrier(1 + group, 128);
    if (thread == 0) count_up(order);
  }
}

}  // namespace rlk::sm90
