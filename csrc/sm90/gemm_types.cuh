// What the parts of the matrix-product kernels share: the problem, where a tile lies, and the ring of stages.
#pragma once
#include "arith.cuh"
#include "ptx.cuh"

#include <climits>

namespace rlk::sm90 {

constexpr int kTileM = 128, kTileN = 256, kTileK = 64, kStages = 4, kCluster = 2, kThreads = 384;
constexpr int kBytesA = kTileM * kTileK * 2, kBytesB = kTileN * kTileK * 2, kBytesStage = kBytesA + kBytesB;
constexpr int kBytesStaging = 64 * kLeaf * 2;  // for one consumer warpgroup
// Rows beyond whole tiles of rows, up to so many, that a tile with sharing may carry along (carried.cuh).
constexpr int kCarried = 32, kBytesCarried = kCarried * kTileK * 2;
constexpr int kBytesBarriers = 256;
constexpr int kBytesShared = kStages * kBytesStage + 2 * kBytesStaging + kBytesBarriers + 1024;
// Of the stages, of the broadcast of tiles with the tile, of the tall stages, which are fewer.
static_assert(2 * kStages * 8 + 24 + 2 * kStages * 8 <= kBytesBarriers);

constexpr int kBeyond = 1 << 30;  // a coordinate outside of every matrix
constexpr int kLeastTokens = 160;  // in a tile with tokens as columns

enum Epilogue { kStatistics = 0, kGradient = 1, kStore = 2 };
enum Output { kBf16 = 0, kFloat = 1, kFloatAccumulate = 2, kBlocks = 3 };
enum Dynamic { kFixed = 0, kRows = 1, kDepth = 2 };  // which size of a product the number of active rows limits

// kBlocks: k is cut into blocks of this many tiles; each block is a chain of its own, added to out_float in order.
constexpr int kBlockTiles = 16384 / kTileK;

// How many tokens a tile takes where tokens had better be its columns than its rows (tokens_as_columns.cuh), at most `most`; 0
// where rows are better. There are as many such tiles as pairs of row tiles, an odd one counted as a pair.
__host__ __device__ __forceinline__ int tokens_a_tile(int rows, int most) {
  const int as_rows = (rows + kTileM - 1) / kTileM, across = (as_rows + 1) / kCluster;
  int each = kLeastTokens;
  while (across * each < rows) each += 8;
  const int saved = as_rows * kTileM - across * each;
  return each <= most && saved * 32 >= as_rows * kTileM && rows > 0 ? each : 0;  // less is lost to shorter products
}

struct Problem {
  CUtensorMap a, b;
  CUtensorMap tokens[2];    // kBlocks: A in boxes of `box` rows and of the others, for tiles with tokens as columns
  __nv_bfloat16* out;       // logits: [M, N], stored row by row where rows are carried
  int64_t out_stride;
  int rows, cols, depth;    // M, N, K
  int group;                // tiles of 256 columns side by side in the raster, up to 2 group - 1 in its last group; even
  int dynamic;              // Dynamic
  int k_begin;
  int transposed_a;         // A is MN-major
  int output;               // Output
  float* out_float;         // [M, N]
  const float* init;        // [M, N] or null: value of the accumulators before k_begin
  int continues;            // kBlocks: the first block is added to out_float as well
  int least;                // tiles of k a tile has at least; those beyond K are zeros, which change no sum
  int* order;               // kBlocks: zeros, 4 for each tile of a cluster: blocks finished
  int most, box;  // kBlocks: tokens a tile may have as columns, 0: always as rows; which of them the first block loads
  __nv_bfloat16* rounded;  // kBlocks, tokens as rows: [.., N], or null: the last block is added to the others on its way there
  const int64_t* row_of;  // kBlocks: which of its rows
};

struct Vocabulary {
  int columns, leaves;  // local columns that are real vocabulary; leaves of the local shard
  int keep;  // columns of which bf16 exp(z - leaf_max) is written: all, or whole tiles of the first ones
  int64_t start;  // subtracted from targets
  const int64_t* targets;  // [M]
  const float* temperatures;  // [M], or null for 1
  float *leaf_max, *leaf_sum, *leaf_mean, *target_logit;  // [M, leaves] and [M]
  const float* table;  // [M, 8], RowGrad
};

// Kept bf16 exp(z - leaf_max), to become gradients while tiles are multiplied (kept_gradient.cuh).
struct Kept {
  __nv_bfloat16* values;  // [rows, stride]: what problem[0] reads; null: gradients they are
  int64_t stride;
  const float* leaf_max;  // [rows, leaves], from the first leaf of the values on
  int leaves;
  int64_t start;  // subtracted from targets
  const int64_t* targets;  // [rows]
  const float* table;  // [rows, 8], RowGrad without gradients by entropy
  int *next, *finished;  // jobs taken, jobs done
  int* left;  // less the jobs that each unit lacks: 0 where its values are gradients
};

struct Params {
  Problem problem[2];
  int problems;
  Vocabulary vocabulary;
  const int* active;  // active rows, or null for all
  int skipped;  // of them, rows in front of this problem's first one
  int* counter;  // zero at launch
  Kept kept;  // of kernels that store
  CUtensorMap carried;  // logits: A of problem 0 in boxes of half the carried rows
  CUtensorMap whole, whole_carried;  // hidden states by row, as `a` or `b` and `carried` have them by slot
  int whole_rows;  // read where so many rows are active, 0: never
  CUtensorMap stores;  // bf16 output of logits or dW, in boxes of 64 columns and the rows that a warp stores at a time
};

// Sizes of a problem, known when the kernel starts. Tiles are numbered over clusters.
struct Shape {
  int rows, store_rows;  // rows that count; rows to write (kGradient: up to whole tiles of k of the next product)
  int pairs, odd;  // tiles of 256 rows; 1: 128 more, there a cluster computes 128 x 512, without sharing
  int tiles_n, tiles_k;
  int filled;  // tiles of k that are not beyond K
  int tokens;  // columns of a tile where tokens are columns, else 0; there `pairs` counts such tiles
  bool whole;  // hidden states are read by row
  bool brief;  // the last tile of k has zeros in its second half, and some in what is not zero of the first
  int tiles, all_tiles;  // of one block of k, of all

  // First: of problem[0], the only one with blocks of k.
  template <int Kind, bool First>
  __device__ void set(const Problem& problem, int active, bool may_carry) {
    rows = problem.dynamic == kRows ? min(problem.rows, active) : problem.rows;
    const int depth = problem.dynamic == kDepth ? min(problem.depth, active) : problem.depth;
    store_rows = min(problem.rows, (rows + kTileK - 1) / kTileK * kTileK);
    const int uncounted = may_carry & (rows >= kCluster * kTileM) ? kCarried : 0;  // may be left after whole tiles
    const int tiles_m = (rows + kTileM - 1 - uncounted) / kTileM;
    pairs = tiles_m / kCluster;
    odd = tiles_m % kCluster;
    tokens = 0;
    if constexpr (Kind == kStore && First) {
      if (problem.output == kBlocks) tokens = tokens_a_tile(rows, problem.most);
      if (tokens > 0) {
        pairs += odd;
        odd = 0;
      }
    }
    tiles_n = (problem.cols + kTileN - 1) / kTileN;
    filled = (depth + kTileK - 1) / kTileK;
    tiles_k = max(filled, problem.least);
    if constexpr (Kind == kStore) {
      const int last = depth - (tiles_k - 1) * kTileK;
      brief = last > 0 && last < kTileK / 2 && last % 16 != 0;
    }
    tiles = pairs * tiles_n + odd * ((tiles_n + kCluster - 1) / kCluster);
    all_tiles = problem.output == kBlocks ? tiles * ((tiles_k + kBlockTiles - 1) / kBlockTiles) : tiles;
  }
  __device__ __forceinline__ void set_whole(const Params& params) {
    whole = params.whole_rows > 0 && params.active != nullptr && *params.active == params.whole_rows;
  }
  __device__ __forceinline__ int tiled() const { return (pairs * kCluster + odd) * kTileM; }  // rows in tiles, or more
};

struct Tile {
  const Problem* problem;
  const Shape* shape;
  int m, n;
  int k_first, k_tiles;  // first k and number of k tiles
  int block, index;  // kBlocks: block of k, and which tile of the cluster
  bool shares;  // the blocks of the cluster have the columns of B in common

  // It is the last block of k of a sum that is rounded. A vote: the same for the whole warp, and known to be.
  __device__ __forceinline__ bool rounds() const {
    return __any_sync(~0u, problem->rounded != nullptr && (block + 1) * kBlockTiles >= shape->tiles_k);
  }
  // The rows in no tile come along with those of the first pair.
  __device__ __forceinline__ bool carries() const { return m < kCluster * kTileM && shape->rows > shape->tiled(); }
};

// MayBeColumns: tokens may be columns of the tile (dH); elsewhere registers are too few for what it takes. Single: there is
// one problem, whose k is not cut.
template <bool MayBeColumns = false, bool Single = false>
__device__ __forceinline__ Tile locate(const Params& params, const Shape* shapes, int id, uint32_t rank) {
  const int which = !Single && id >= shapes[0].all_tiles, local_id = which ? id - shapes[0].all_tiles : id;
  const Problem& problem = params.problem[which];
  const Shape& shape = shapes[which];
  int local = local_id;
  Tile tile{&problem, &shape, 0, 0, problem.k_begin, shape.tiles_k, 0, local, true};
  if (!Single && problem.output == kBlocks) {
    tile.block = local / shape.tiles;
    tile.index = local = local % shape.tiles;
    tile.k_first += tile.block * kBlockTiles * kTileK;
    tile.k_tiles = min(kBlockTiles, shape.tiles_k - tile.block * kBlockTiles);
  }
  // Raster: groups of columns; in a group pairs of row tiles, then the odd row tile, so that B stays in L2. The last group has
  // the columns left over as well: tiles that carry rows take longest and would otherwise be among the last ones of all.
  const int per_group = shape.pairs * problem.group + shape.odd * (problem.group / kCluster);
  const int groups = max(shape.tiles_n / problem.group, 1), group = min(local / per_group, groups - 1);
  const int inside = local - group * per_group, first = group * problem.group;
  const int width = group + 1 < groups ? problem.group : shape.tiles_n - first, wide = inside - shape.pairs * width;
  if (wide >= 0) {
    tile.m = shape.pairs * kCluster * kTileM;
    tile.n = (first + wide * kCluster + static_cast<int>(rank)) * kTileN;
    tile.shares = false;
  } else if (MayBeColumns && shape.tokens > 0) {
    tile.m = ((first + inside % width) * kCluster + static_cast<int>(rank)) * kTileM;
    tile.n = inside / width * shape.tokens;
  } else {
    tile.m = (inside / width * kCluster + static_cast<int>(rank)) * kTileM;
    tile.n = (first + inside % width) * kTileN;
  }
  return tile;
}

// A tile as the scheduler broadcasts it to a block: its first row, below which flags lie, and its first column. kEnd: there is
// none. kLocate: in place of the column its number in the raster.
struct TileAt {
  static constexpr int kShares = 1, kCarries = 2, kEnd = 4, kLocate = 8;
  static_assert(kCluster == 2);
  int row, column;

  __device__ __forceinline__ static TileAt of(const Tile& tile, int flags = 0) {
    return {tile.m | (tile.shares ? kShares : 0) | flags, tile.n};
  }
  // Where the second block's part lies, of the first block's.
  __device__ __forceinline__ TileAt next_to() const {
    return is(kShares) ? TileAt{row + kTileM, column} : TileAt{row, column + kTileN};
  }
  __device__ __forceinline__ bool is(int flag) const { return row & flag; }
  __device__ __forceinline__ int m() const { return row & ~(kTileM - 1); }
};

// Its place in the shared memory of each block, as addresses: the tile, and barriers. Initialised for one sender, and for as
// many readers as all warps and threads that read.
struct Broadcast {
  uint32_t at, full, empty;

  // By one thread or a whole warp. The next tile is sent when all have read this one.
  template <bool Alone>
  __device__ __forceinline__ TileAt next(uint32_t& phase) const {
    barrier_wait(full, phase);
    const int2 value = read_shared_pair(at);
    if constexpr (!Alone) __syncwarp();
    if (Alone || threadIdx.x % 32 == 0) barrier_arrive(empty, 0);
    phase ^= 1;
    return {value.x, value.y};
  }
  __device__ __forceinline__ void send(const TileAt& tile, uint32_t rank) const {
    barrier_expect_remote(full, 8, rank);
    store_remote_pair(at, tile.row, tile.column, full, rank);
  }
};

template <int Deep>
struct RingOf {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == Deep) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void skip(int count) {
    for (; count > 0; --count) next();
  }
  __device__ __forceinline__ int before() const { return (stage == 0 ? Deep : stage) - 1; }
};
using Ring = RingOf<kStages>;

struct Nothing {
  template <typename... Arguments>
  __device__ __forceinline__ void operator()(const Arguments&...) const {}
};

// `count` > 0 tiles of k of both halves of a tile, which are complete at the end. multiply(kt): starts the products of the
// stage that the consumer's ring is at, for tile kt of k.
template <int N, typename Consumer, typename Multiply>
__device__ __forceinline__ void multiply_tiles(float (&left)[N], float (&right)[N], int count, Consumer& c, Multiply multiply) {
  int held = 0;
  pin(left);
  pin(right);
#pragma unroll 1
  for (int kt = 0;;) {
    c.wait(c.ring);
    multiply(kt);
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

}  // namespace rlk::sm90
