// The gradient of kept logits, made by warps of the product kernel that have nothing else to do, ahead of the tiles.
//
// bf16 exp(z - leaf_max) becomes the bf16 gradient of the logits in place. A pass of its own takes as long as memory needs to
// read and write them all (66 of 1,150 us at T 796, V 75968), with the tensor cores idle; beside the products it costs what it
// takes from their loads. Warps take jobs of 32 rows x 256 columns from a counter, in the order in which tiles of dH want
// them, and count up the unit they belong to, up to 1024 rows x 512 columns; before a producer loads from a unit it waits
// for all of its jobs. Warps wait for nothing but memory, so every job that was taken ends.
#pragma once
#include "epilogue.cuh"

namespace rlk::sm90 {

constexpr int kJobRows = 32, kJobColumns = 2 * kLeaf;
constexpr int kUnitRows = 1024, kUnitColumns = 512;
constexpr int kBlockUnits = kBlockTiles * kTileK / kUnitColumns;  // across a block of dH
constexpr int kRowsAhead = 4;                                     // loads of a lane in flight

// Sizes, known when the kernel starts. Order of units: blocks of dH that its tiles work on at a time; in them bands of rows, as
// many as such tiles have; in a band columns ascending; there blocks, then rows.
struct KeptShape {
  int rows, store_rows;      // that take part; that are written, up to whole tiles of k of dW
  int groups, across;        // units of all rows, of all columns
  int slices;                // jobs of a whole unit over rows
  int together, band;        // blocks; units of rows
  int jobs;

  __device__ __forceinline__ void set(const Shape& dh, const Problem& problem, int clusters) {
    rows = dh.rows;
    store_rows = dh.store_rows;
    groups = (store_rows + kUnitRows - 1) / kUnitRows;
    across = (problem.depth + kUnitColumns - 1) / kUnitColumns;
    slices = (min(store_rows, kUnitRows) + kJobRows - 1) / kJobRows;
    const int blocks = (across + kBlockUnits - 1) / kBlockUnits;
    together = min(max(clusters / max(dh.tiles, 1), 1), max(blocks, 1));
    const int side_by_side = min(problem.group, dh.tiles_n);
    band = min(max((clusters / side_by_side * kCluster * kTileM + kUnitRows - 1) / kUnitRows, 1), max(groups, 1));
    const int rounds = (blocks + together - 1) / together;
    jobs = rounds * together * kBlockUnits * groups * slices * (kUnitColumns / kJobColumns);
  }
  // Jobs that make a unit.
  __device__ __forceinline__ int count(int group, int unit, int columns) const {
    const int here = min(store_rows - group * kUnitRows, kUnitRows);
    return (here + kJobRows - 1) / kJobRows * ((min(columns - unit * kUnitColumns, kUnitColumns) + kJobColumns - 1) / kJobColumns);
  }
};

// As gradients_of_chunk, without entropy and target.
__device__ __forceinline__ void scale(uint4& packed, float factor, float weight) {
  uint32_t* words = reinterpret_cast<uint32_t*>(&packed);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = __fmul_rn(__fmul_rn(__uint_as_float(words[i] << 16), factor), weight);
    const float high = __fmul_rn(__fmul_rn(__uint_as_float(words[i] & 0xffff0000u), factor), weight);
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    words[i] = reinterpret_cast<const uint32_t&>(pair);
  }
}

__device__ __forceinline__ void make_gradients(const Kept& kept, const KeptShape& shape, int columns, int job, int lane) {
  constexpr int kHalves = kUnitColumns / kJobColumns;
  int unit = job / (shape.slices * kHalves);
  const int slice = job % (shape.slices * kHalves) / kHalves, half = job % kHalves;
  const int per_round = shape.together * kBlockUnits * shape.groups, per_band = shape.together * kBlockUnits * shape.band;
  const int round = unit / per_round;
  unit %= per_round;
  const int band = unit / per_band, width = min(shape.band, shape.groups - band * shape.band);
  unit %= per_band;
  const int group = band * shape.band + unit % width, block = round * shape.together + unit / width % shape.together;
  const int at = block * kBlockUnits + unit / (width * shape.together);
  const int row = group * kUnitRows + slice * kJobRows, column = at * kUnitColumns + half * kJobColumns;
  if (row >= min(shape.store_rows, (group + 1) * kUnitRows) || column >= columns) return;
  // Lane i knows what row i needs: a factor for each leaf, the weight, and the gradient of its target where that is here.
  const int64_t stride = kept.stride;
  __nv_bfloat16* values = kept.values + static_cast<int64_t>(row) * stride + column;
  if (row + lane < shape.rows) {  // all of the job's values on their way to the L2
    for (int i = 0; i < kJobColumns; i += 64) {
      if (column + i < columns) asm volatile("prefetch.global.L2 [%0];" ::"l"(values + lane * stride + i));
    }
  }
  float factor[2] = {}, weight = 0.0f;
  unsigned own = 0;  // bf16, and above its column + 1
  if (row + lane < shape.rows) {
    const RowGrad grad = load_row_grad(kept.table, row + lane);
    const float* leaf_max = kept.leaf_max + static_cast<int64_t>(row + lane) * kept.leaves + column / kLeaf;
    factor[0] = LeafGrad::of(leaf_max[0], grad).factor;
    if (column + kLeaf < columns) factor[1] = LeafGrad::of(leaf_max[1], grad).factor;
    weight = grad.weight;
    const int64_t target = kept.targets[row + lane] - kept.start - column;
    if (target >= 0 && target < min(kJobColumns, columns - column)) {
      const int hit = static_cast<int>(target);
      const LeafGrad leaf{0.0f, hit < kLeaf ? factor[0] : factor[1]};
      const float e = __bfloat162float(values[lane * stride + hit]);
      own = __bfloat16_as_ushort(__float2bfloat16_rn(__fadd_rn(leaf.operator()<false>(e, grad), grad.logp)));
      own |= (hit + 1) << 16;
    }
  }
  char* from = reinterpret_cast<char*>(values + lane * 8);
  char* to = from;
  // Rows to read and to write from here on.
  int read = column + lane * 8 < columns ? shape.rows - row : 0, write = column + lane * 8 < columns ? shape.store_rows - row : 0;
#pragma unroll 1
  for (int first = 0; first < kJobRows; first += kRowsAhead) {
    uint4 packed[kRowsAhead];
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i, from += stride * 2) {
      packed[i] = make_uint4(0, 0, 0, 0);
      if (first + i < read) packed[i] = __ldcg(reinterpret_cast<const uint4*>(from));
    }
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i, to += stride * 2) {
      const float left = __shfl_sync(~0u, factor[0], first + i), right = __shfl_sync(~0u, factor[1], first + i);
      scale(packed[i], lane < 16 ? left : right, __shfl_sync(~0u, weight, first + i));
      if (first + i < write) __stcg(reinterpret_cast<uint4*>(to), packed[i]);
    }
  }
  if (__any_sync(~0u, own != 0)) {
    __syncwarp();
    if (own != 0) values[lane * stride + ((own >> 16) - 1)] = __ushort_as_bfloat16(static_cast<unsigned short>(own));
  }
  // Whoever waits for the count reads by the copy engine.
  asm volatile("fence.proxy.async.global;" ::: "memory");
  __syncwarp();
  if (lane == 0) count_up(kept.done + at * shape.groups + group);
}

// Before the load of k of a tile: what it reads are gradients.
__device__ __forceinline__ void await_gradients(
    const Kept& kept, const KeptShape& shape, const Tile& tile, int columns, int k) {
  int unit, group, last;
  if (tile.problem->output == kBlocks) {  // dH: k are columns
    if (k % kUnitColumns != 0) return;
    const bool by_column = tile.shape->tokens > 0;
    const int first = by_column ? tile.n : tile.m, rows = by_column ? tile.shape->tokens : kTileM;
    unit = k / kUnitColumns;
    group = first / kUnitRows;
    last = (min(first + rows, shape.store_rows) - 1) / kUnitRows;
  } else {  // dW: k are rows
    if (k % kUnitRows != 0) return;
    unit = tile.m / kUnitColumns;
    group = last = k / kUnitRows;
    if (k >= shape.store_rows) return;
  }
  for (; group <= last; ++group) {
    await(kept.done + unit * shape.groups + group, shape.count(group, unit, columns));
  }
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace rlk::sm90
