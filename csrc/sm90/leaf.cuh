// One leaf (128 columns) of the logits of a warpgroup: statistics, or gradients.
#pragma once
#include "epilogue.cuh"

namespace rlk::sm90 {

// zero or one. By asm: the compiler would put all values into memory to find one of them.
__device__ __forceinline__ float select(bool takes_one, float zero, float one) {
  float value;
  asm("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nselp.f32 %0, %2, %1, p;\n}"
      : "=f"(value)
      : "f"(zero), "f"(one), "r"(static_cast<int>(takes_one)));
  return value;
}

// values[index % Count], Count a power of two.
template <int Count>
__device__ __forceinline__ float value_at(float (&values)[Count], int index) {
  if constexpr (Count == 1) {
    return values[0];
  } else {
    float half[Count / 2];
#pragma unroll
    for (int j = 0; j < Count / 2; ++j) half[j] = select(index & Count / 2, values[j], values[j + Count / 2]);
    return value_at(half, index);
  }
}

// Of one row of a leaf, as statistics_of_row has it, the value of `column` where this lane has it, else any.
__device__ __forceinline__ float value_of_row(const float* x, int column) {
  float values[16];
#pragma unroll
  for (int j = 0; j < 16; ++j) values[j] = select(column & 1, x[4 * j], x[4 * j + 1]);
  return value_at(values, column / 8);
}

// Sum of this lane's and lane ^ across's `second` where takes_second holds, else of their `first`; they differ in it.
__device__ __forceinline__ float swap_add(float first, float second, bool takes_second, int across) {
  const float keep = takes_second ? second : first, give = takes_second ? first : second;
  return __fadd_rn(keep, __shfl_xor_sync(~0u, give, across));
}

// Where nothing is kept.
struct NoStager {
  static constexpr int kRows = 0;
  __device__ __forceinline__ void begin(int) const {}
  __device__ __forceinline__ void put(int, int, const uint32_t (&)[4], int) const {}
  __device__ __forceinline__ void flush(int, int, int) const {}
};

// Staged values that have yet to leave.
struct Leaving {
  int row, column;
  bool any;
};

// Sums over the 128 columns of one leaf, of two values for each of two rows. The tree over adjacent pairs of columns: lane q
// of a quad has columns 8 j + 2 q and 8 j + 2 q + 1, whose sums are the x below. Over q lanes swap: of two values a lane
// sums one and its neighbour the other, so that a lane ends with one of the four. Over j it is alone with it.

// exp(x - shift) of one row of a leaf to shared memory, and the tree over it and its products with x - shift: of row 0 as
// far as `sums`, by j; of both rows up to levels[4]. levels: complete subtrees over j.
template <typename Stage>
__device__ __forceinline__ void statistics_of_row(const float* x, int h, float shift, float (&sums)[16], float (&levels)[5],
                                                  const Stage& stager, int lane) {
  const bool odd = lane & 1, high = lane & 2;
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
    if (part == 0 && (h == 0 || Stage::kRows == 8)) stager.begin(lane);
    stager.put(part, h, packed, lane);
  }
}

// Rows that count, and rows to write (Shape).
struct RowCounts {
  int active, stored;
};

// What a thread reads about its two rows, on its way while products run.
struct RowInputs {
  int row[2];
  int64_t target[2];
  float temperature[2];

  __device__ __forceinline__ void load(int m, int rows, const Vocabulary& v, int group, int thread) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row[h] = m + group * 64 + (thread / 32) * 16 + (thread % 32) / 4 + 8 * h;
      const bool inside = row[h] < rows;
      target[h] = inside ? v.targets[row[h]] : v.start - 1;
      temperature[h] = inside && v.temperatures != nullptr ? v.temperatures[row[h]] : 1.0f;
    }
  }
};

// What the halves of a tile have in common for one thread: its two rows.
struct TwoRows {
  int m, n;          // where the tile starts
  int row[2];
  int hit[2];        // the target's column in the tile, or -1
  float temperature[2];

  __device__ __forceinline__ void set(int tile_m, int tile_n, const RowInputs& inputs, const Vocabulary& v) {
    m = tile_m;
    n = tile_n;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row[h] = inputs.row[h];
      temperature[h] = inputs.temperature[h];
      const int64_t column = inputs.target[h] - v.start - n;
      hit[h] = column >= 0 && column < min(kTileN, v.columns - n) ? static_cast<int>(column) : -1;
    }
  }
};

// One leaf for each of the thread's two rows: acc[4 j + 2 h + b] is column 8 j + 2 (lane % 4) + b of row h. `halfway` runs
// between the rows. A stager of 8 rows takes those of either h in turn. The last values stay staged: they may leave when other
// products are on their way.
template <int Kind, typename Stage, typename Halfway>
__device__ __forceinline__ Leaving vocabulary_leaf(float (&acc)[64], int leaf, const TwoRows& two, const RowCounts& rows,
                                                   const Vocabulary& v, const Stage& stager, int group, int thread,
                                                   Halfway halfway) {
  const int lane = thread % 32, quad_lane = lane % 4, first = two.n + leaf * kLeaf;
  const int first_row = two.m + group * 64 + (thread / 32) * 16;
  const bool stores = (Kind == kGradient || two.n < v.keep) && first_row < rows.stored;
  if (__any_sync(~0u, two.temperature[0] != 1.0f || two.temperature[1] != 1.0f)) {  // division by one changes nothing
    divide_rows(acc, two.temperature);
  }
  if (first + kLeaf > v.columns) {
    by_eights(acc, [&](int turn, int i, float x) {
      return first + (2 * turn + i / 4) * 8 + quad_lane * 2 + i % 2 >= v.columns ? -INFINITY : x;
    });
  }
  const int hit[2] = {two.hit[0] - leaf * kLeaf, two.hit[1] - leaf * kLeaf};  // outside 0 .. 127: none here
  const bool any_hit = __any_sync(~0u, static_cast<unsigned>(hit[0]) < kLeaf || static_cast<unsigned>(hit[1]) < kLeaf);  // rare
  if constexpr (Kind == kStatistics) {
    if (any_hit) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float value = value_of_row(acc + 2 * h, hit[h]);
        if (static_cast<unsigned>(hit[h]) < kLeaf && hit[h] / 2 % 4 == quad_lane) v.target_logit[two.row[h]] = value;
      }
    }
  }
  if constexpr (Kind == kGradient) stager.begin(lane);
  [[maybe_unused]] float sums[16], levels[5], maxima[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (h == 1) halfway();
    float* x = acc + 2 * h;  // x[4 j + b]
    float top[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};  // NaN is not seen
#pragma unroll
    for (int i = 0; i < 32; ++i) top[i % 4] = fmaxf(top[i % 4], x[(i / 2) * 4 + i % 2]);
    float leaf_max = fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
    leaf_max = fmaxf(leaf_max, __shfl_xor_sync(~0u, leaf_max, 1));
    leaf_max = __fadd_rn(fmaxf(leaf_max, __shfl_xor_sync(~0u, leaf_max, 2)), 0.0f);
    const float shift = shift_of(leaf_max);
    if constexpr (Kind == kStatistics) {
      maxima[h] = leaf_max;
      statistics_of_row(x, h, shift, sums, levels, stager, lane);
      if (Stage::kRows == 8 && h == 0) {
        if (stores) stager.flush(first_row, first, lane);
      }
    } else {
      const RowGrad grad = two.row[h] < rows.active ? load_row_grad(v.table, two.row[h]) : RowGrad{};
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
      stage_row(x, h, stager, lane);
    }
  }
  if constexpr (Kind == kStatistics) {
    const bool odd = lane & 1, high = lane & 2;
    const int row = (high ? two.row[1] : two.row[0]), leaf_index = first / kLeaf;
    if (row < rows.active && leaf_index < v.leaves) {
      const int64_t at = static_cast<int64_t>(row) * v.leaves + leaf_index;
      (odd ? v.leaf_mean : v.leaf_sum)[at] = levels[4];
      if (!odd) v.leaf_max[at] = high ? maxima[1] : maxima[0];
    }
  }
  return {first_row + (Stage::kRows == 8 ? 8 : 0), first, stores};
}

}  // namespace rlk::sm90
