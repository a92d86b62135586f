// The gradient of kept logits, made by warps of the product kernel that have nothing else to do, ahead of the tiles.
//
// bf16 exp(z - leaf_max) becomes the bf16 gradient of the logits in place. A pass of its own takes as long as memory needs to
// read and write them all (65 of 1,150 us at T 796, V 75968), with the tensor cores idle; beside the products it costs what it
// takes from their loads. Warps take jobs of 32 rows x 256 columns from a counter, in the order in which tiles of dH want
// them, and count up the unit they belong to, up to 1024 rows x 512 columns; before a producer loads from a unit it waits
// for all of its jobs. Warps wait for nothing but memory, so every job that was taken ends. A kernel in front makes the first
// units, with all processors: the tiles start at once, and the warps need not keep up with them (kept_gradient.cu).
#pragma once
#include "epilogue.cuh"
#include "launch.h"

namespace rlk::sm90 {

constexpr int kJobRows = 32, kJobColumns = 2 * kLeaf;
constexpr int kUnitRows = kKeptUnitRows, kUnitColumns = kKeptUnitColumns, kUnitAcross = kUnitColumns / kJobColumns;
constexpr int kBlockUnits = kBlockTiles * kTileK / kUnitColumns;  // across a block of dH
constexpr int kHead = 32;  // one of so many units is made before the products start

struct KeptJob {
  int row, column;  // row -1: nothing to do
};

// Sizes, known when a kernel starts. Order of units: blocks of dH that its tiles work on at a time; in them bands of rows, as
// many as such tiles have; in a band columns ascending; there blocks, then rows.
struct KeptShape {
  int rows, store_rows;  // that take part; that are written, up to whole tiles of k of dW
  int columns;
  int groups, across;    // units of all rows, of all columns
  int slices;            // jobs of a whole unit over rows
  int together, band;    // blocks; units of rows
  int units, head;       // in order, some of them beyond the matrix; of them, those made by the kernel in front

  __device__ __forceinline__ void set(const Shape& dh, const Problem& problem, int clusters) {
    rows = dh.rows;
    store_rows = dh.store_rows;
    columns = problem.depth;
    groups = (store_rows + kUnitRows - 1) / kUnitRows;
    across = (columns + kUnitColumns - 1) / kUnitColumns;
    slices = (min(store_rows, kUnitRows) + kJobRows - 1) / kJobRows;
    const int blocks = (across + kBlockUnits - 1) / kBlockUnits;
    together = min(max(clusters / max(dh.tiles, 1), 1), blocks);
    const int side_by_side = dh.tiles_n < 2 * problem.group ? dh.tiles_n : problem.group;  // one group of tiles, or several
    band = min(max((clusters / side_by_side * kCluster * kTileM + kUnitRows - 1) / kUnitRows, 1), max(groups, 1));
    units = (blocks + together - 1) / together * together * kBlockUnits * groups;
    head = groups * across / kHead;
  }
  __device__ __forceinline__ int jobs(int of_units) const { return of_units * slices * kUnitAcross; }

  // Unit number `order`: which one of all rows and which of all columns.
  __device__ __forceinline__ void place(int order, int& group, int& at) const {
    const int per_round = together * kBlockUnits * groups, per_band = together * kBlockUnits * band;
    const int round = order / per_round, band_index = order % per_round / per_band;
    const int width = min(band, groups - band_index * band), inside = order % per_round % per_band;
    group = band_index * band + inside % width;
    at = (round * together + inside / width % together) * kBlockUnits + inside / (width * together);
  }
  __device__ __forceinline__ int rows_of(int group) const { return min(store_rows - group * kUnitRows, kUnitRows); }
  // Jobs that make a unit.
  __device__ __forceinline__ int count(int group, int at) const {
    return (rows_of(group) + kJobRows - 1) / kJobRows *
           ((min(columns - at * kUnitColumns, kUnitColumns) + kJobColumns - 1) / kJobColumns);
  }
  __device__ __forceinline__ KeptJob job(int number) const {
    int group, at;
    place(number / (slices * kUnitAcross), group, at);
    const int slice = number % (slices * kUnitAcross) / kUnitAcross;
    const int column = at * kUnitColumns + number % kUnitAcross * kJobColumns;
    const bool inside = slice * kJobRows < rows_of(group) && column < columns;
    return {inside ? group * kUnitRows + slice * kJobRows : -1, column};
  }
  // Where Kept::left counts for a place.
  __device__ __forceinline__ int unit_of(int row, int column) const { return column / kUnitColumns * groups + row / kUnitRows; }
};

// As gradients_of_chunk without entropy and target, a word at a time: eight values at once are too many registers here.
__device__ __forceinline__ void scale(uint4& packed, float factor, float weight) {
  uint32_t* words = reinterpret_cast<uint32_t*>(&packed);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = __fmul_rn(__fmul_rn(__uint_as_float(words[i] << 16), factor), weight);
    const float high = __fmul_rn(__fmul_rn(__uint_as_float(words[i] & 0xffff0000u), factor), weight);
    words[i] = pack(low, high);
  }
}

// The values of a job on their way to the L2.
__device__ __forceinline__ void prefetch(const Kept& kept, const KeptShape& shape, const KeptJob& job, int lane) {
  if (job.row + lane >= shape.rows) return;
  const __nv_bfloat16* values = kept.values + static_cast<int64_t>(job.row + lane) * kept.stride + job.column;
#pragma unroll
  for (int i = 0; i < kJobColumns; i += 64) {
    if (job.column + i < shape.columns) asm volatile("prefetch.global.L2 [%0];" ::"l"(values + i));
  }
}

// By one warp. Ahead: rows at a time. grad_of(row): what the row's gradients need.
template <int Ahead, typename GradOf>
__device__ __forceinline__ void make_gradients(const Kept& kept, const KeptShape& shape, const KeptJob& job, int lane,
                                               GradOf grad_of) {
  // Lane i knows what row i needs: a factor for each leaf, the weight, and the gradient of its target where that is here.
  const int64_t stride = kept.stride;
  __nv_bfloat16* values = kept.values + static_cast<int64_t>(job.row) * stride + job.column;
  float factor[2] = {}, weight = 0.0f;
  unsigned own = 0;  // bf16, and above it the target's column + 1
  if (const int row = job.row + lane; row < shape.rows) {
    const float* leaf_max = kept.leaf_max + static_cast<int64_t>(row) * kept.leaves + job.column / kLeaf;
    const float left = leaf_max[0], right = job.column + kLeaf < shape.columns ? leaf_max[1] : left;
    const int64_t target = kept.targets[row] - kept.start - job.column;
    const RowGrad grad = grad_of(row);
    factor[0] = LeafGrad::of(left, grad).factor;
    factor[1] = LeafGrad::of(right, grad).factor;
    weight = grad.weight;
    if (target >= 0 && target < min(kJobColumns, shape.columns - job.column)) {
      const int hit = static_cast<int>(target);
      const LeafGrad leaf{0.0f, hit < kLeaf ? factor[0] : factor[1]};
      const float e = __bfloat162float(values[lane * stride + hit]);
      own = __bfloat16_as_ushort(__float2bfloat16_rn(__fadd_rn(leaf.operator()<false>(e, grad), grad.logp)));
      own |= (hit + 1) << 16;
    }
  }
  __syncwarp();  // the target's value has been read
  char* from = reinterpret_cast<char*>(values + lane * 8);
  char* to = from;
  const bool inside = job.column + lane * 8 < shape.columns;
  const int read = inside ? shape.rows - job.row : 0, write = inside ? shape.store_rows - job.row : 0;  // rows
#pragma unroll 1
  for (int first = 0; first < kJobRows; first += Ahead) {
    uint4 packed[Ahead];
#pragma unroll
    for (int i = 0; i < Ahead; ++i, from += stride * 2) {
      packed[i] = make_uint4(0, 0, 0, 0);
      if (first + i < read) packed[i] = __ldcg(reinterpret_cast<const uint4*>(from));
    }
#pragma unroll
    for (int i = 0; i < Ahead; ++i, to += stride * 2) {
      const float left = __shfl_sync(~0u, factor[0], first + i), right = __shfl_sync(~0u, factor[1], first + i);
      scale(packed[i], lane < 16 ? left : right, __shfl_sync(~0u, weight, first + i));
      if (first + i < write) __stcg(reinterpret_cast<uint4*>(to), packed[i]);
    }
  }
  if (__any_sync(~0u, own != 0)) {
    __syncwarp();
    if (own != 0) values[lane * stride + ((own >> 16) - 1)] = __ushort_as_bfloat16(static_cast<unsigned short>(own));
  }
}

__device__ __forceinline__ int relaxed(const int* counter) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

__device__ __forceinline__ void count_up_relaxed(int* counter) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ void device_fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// A warp of the product kernel. While it deals with a job it takes the next one, whose values come to the L2 while the stores
// of this one end.
__device__ __forceinline__ void make_all_gradients(const Kept& kept, const KeptShape& shape, int lane) {
  const int jobs = shape.jobs(shape.units);
  auto take = [&] { return lane == 0 ? atomicAdd(kept.next, 1) : 0; };
  int number = __shfl_sync(~0u, take(), 0);
  if (number >= jobs) return;
  KeptJob job = shape.job(number);
  while (true) {
    number = take();
    int done = -1;
    if (job.row >= 0) {
      make_gradients<4>(kept, shape, job, lane, [&](int row) { return load_row_grad(kept.table, row); });
      proxy_fence();  // whoever waits for the count reads by the copy engine
      __syncwarp();
      done = shape.unit_of(job.row, job.column);
    }
    number = __shfl_sync(~0u, number, 0);
    if (number < jobs) {
      job = shape.job(number);
      if (job.row >= 0) prefetch(kept, shape, job, lane);
    }
    if (lane == 0) {
      device_fence();
      if (done >= 0) count_up_relaxed(kept.left + done);
      count_up_relaxed(kept.finished);
    }
    if (number >= jobs) return;
  }
}

// Kept values that a tile reads: all columns of some rows (dH) or all rows of some columns (dW).
struct KeptNeed {
  int first, end;  // rows or columns; none where first >= end

  __device__ __forceinline__ static KeptNeed of_rows(const Tile& tile, const KeptShape& shape) {
    const bool by_column = tile.shape->tokens > 0;
    const int first = by_column ? tile.n : tile.m;
    return {first, min(first + (by_column ? tile.shape->tokens : kTileM), shape.store_rows)};
  }
  __device__ __forceinline__ static KeptNeed of_columns(int first, int count, const KeptShape& shape) {
    return {first, min(first + count, shape.columns)};
  }
};

// A producer, before it loads what lies at k of a tile: waits until they are gradients, and says up to which k they are. Looks
// some units ahead, and at whether all jobs are done, since an answer takes as long as a tile of k. OfRows: of what is needed.
template <bool OfRows>
__device__ __forceinline__ int await_gradients(const Kept& kept, const KeptShape& shape, const KeptNeed& need, int k) {
  constexpr int kUnitsAhead = 3, kThisTile = INT_MAX - 1;
  constexpr int kUnit = OfRows ? kUnitRows : kUnitColumns, kUnitK = OfRows ? kUnitColumns : kUnitRows;
  if (need.first >= need.end || (!OfRows && k >= shape.store_rows)) return kThisTile;
  const int from = need.first / kUnit, at = k / kUnitK, ahead = (OfRows ? shape.across : shape.groups) - at;
  const bool two = (need.end - 1) / kUnit > from;  // what the tile needs lies in two units
  const int step = OfRows ? shape.groups : 1, all = shape.jobs(shape.units);
  // Units ready one after the other, of unit `beside` of what is needed.
  auto count_ready = [&](int beside) {
    const int* left = kept.left + (OfRows ? at * shape.groups + beside : beside * shape.groups + at);
    int seen[kUnitsAhead], ready = 0;
#pragma unroll
    for (int i = 0; i < kUnitsAhead; ++i) seen[i] = i < ahead ? relaxed(left + i * step) : -1;
#pragma unroll
    for (int i = kUnitsAhead - 1; i >= 0; --i) {
      ready = seen[i] == 0 ? ready + 1 : 0;
    }
    return ready;
  };
  int ready;
  bool every;
  do {
    every = relaxed(kept.finished) == all;
    ready = count_ready(from);
    if (two) ready = min(ready, count_ready(from + 1));
  } while (ready == 0 && !every);
  device_fence();
  proxy_fence();
  return every ? INT_MAX : (at + ready) * kUnitK;
}

}  // namespace rlk::sm90
