// Persistent, warp-specialised bf16 matrix product for Hopper: out[M, N] = A[M, K] B[N, K]^T with fp32 accumulators.
//
// A cluster of two blocks computes 256 x 256 outputs: each block 128 rows, its two consumer warpgroups 64 rows each, and
// both blocks share the 256 columns of B (each loads half and multicasts it). One producer thread keeps four stages of
// 64 k in flight; the first block's producer takes tiles from a counter in global memory and broadcasts them.
// Each output is one chain of accumulations over ascending k, so neither tiles nor scheduling change a bit.
//
// A and B may be stored with k contiguous (K-major) or with rows contiguous (MN-major). Epilogues:
//   kStatistics   statistics of the 128-column leaves of the vocabulary, and optionally bf16 exp(z - leaf_max)
//   kGradient     bf16 gradient of the logits from merged statistics
//   kStore        bf16 or fp32 output; the accumulators may continue from fp32 values, or k may be cut into blocks
#pragma once
#include "arith.cuh"
#include "ptx.cuh"

namespace rlk::sm90 {

constexpr int kTileM = 128, kTileN = 256, kTileK = 64, kStages = 4, kCluster = 2, kThreads = 384;
constexpr int kBytesA = kTileM * kTileK * 2, kBytesB = kTileN * kTileK * 2, kBytesStage = kBytesA + kBytesB;
constexpr int kBytesStaging = 64 * kLeaf * 2;  // for one consumer warpgroup
constexpr int kTileSlots = 2;
constexpr int kBytesShared = kStages * kBytesStage + 2 * kBytesStaging + 256 + 1024;

enum Epilogue { kStatistics = 0, kGradient = 1, kStore = 2 };
enum Output { kBf16 = 0, kFloat = 1, kFloatAccumulate = 2, kBlocks = 3 };

// kBlocks: k is cut into blocks of this many tiles; each block is a chain of its own, added to out_float in order.
constexpr int kBlockTiles = 16384 / kTileK;

struct Problem {
  CUtensorMap a, b;
  __nv_bfloat16* out;                 // kBf16: [M, N]
  int64_t out_stride;
  int rows, cols;                     // M, N
  int pairs, tiles_n, tiles_k, group;  // tiles of 256 rows, of 256 columns, of 64 k; columns per raster group
  int odd;                             // 128 more rows: there a cluster computes 128 x 512, without sharing
  int tiles;                           // tiles of a cluster (kBlocks: for each block of k); group must be even
  int k_begin;
  int transposed_a;                   // A is MN-major
  int output;                         // Output
  float* out_float;                   // [M, N]
  const float* init;                  // [M, N] or null: value of the accumulators before k_begin
  int continues;                      // kBlocks: the first block is added to out_float as well
  int* order;                         // kBlocks: zeros, 4 for each tile of a cluster: blocks finished
};

struct Vocabulary {
  int columns, leaves;    // local columns that are real vocabulary; leaves of the local shard
  int keep;               // write bf16 exp(z - leaf_max)
  int64_t start;          // subtracted from targets
  const int64_t* targets;                                // [M]
  const float* temperatures;                             // [M], or null for 1
  float *leaf_max, *leaf_sum, *leaf_mean, *target_logit;  // [M, leaves] and [M]
  const float *state, *grads;                            // [3, M]
};

struct Params {
  Problem problem[2];
  Vocabulary vocabulary;
  int tiles, tiles_first;  // cluster tiles in all, and of problem[0]
  int* counter;            // zero at launch
};

struct Tile {
  const Problem* problem;
  int m, n;
  int k_first, k_tiles;  // first k and number of k tiles
  int block, index;      // kBlocks: block of k, and which tile of the cluster
  bool shares;           // the blocks of the cluster have the columns of B in common
};

__device__ __forceinline__ Tile locate(const Params& params, int id, uint32_t rank) {
  const Problem& problem = params.problem[id >= params.tiles_first];
  int local = id >= params.tiles_first ? id - params.tiles_first : id;
  Tile tile{&problem, 0, 0, problem.k_begin, problem.tiles_k, 0, local, true};
  if (problem.output == kBlocks) {
    tile.block = local / problem.tiles;
    tile.index = local = local % problem.tiles;
    tile.k_first += tile.block * kBlockTiles * kTileK;
    tile.k_tiles = min(kBlockTiles, problem.tiles_k - tile.block * kBlockTiles);
  }
  // Raster: groups of columns; in a group pairs of row tiles, then the odd row tile, so that B stays in L2.
  const int per_group = problem.pairs * problem.group + problem.odd * (problem.group / kCluster);
  const int group = local / per_group, inside = local % per_group, first = group * problem.group;
  const int width = min(problem.group, problem.tiles_n - first), wide = inside - problem.pairs * width;
  if (wide >= 0) {
    tile.m = problem.pairs * kCluster * kTileM;
    tile.n = (first + wide * kCluster + static_cast<int>(rank)) * kTileN;
    tile.shares = false;
  } else {
    tile.m = (inside / width * kCluster + static_cast<int>(rank)) * kTileM;
    tile.n = (first + inside % width) * kTileN;
  }
  return tile;
}

struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Keeps the compiler from moving uses of the accumulators across the asynchronous products.
__device__ __forceinline__ void pin(float (&acc)[128]) {
#pragma unroll
  for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

template <int TransposeA, int TransposeB>
__device__ __forceinline__ void accumulate(
    float (&acc)[128], bool continued, int tiles_k, Ring& ring, uint32_t base, uint32_t full, uint32_t empty, int group,
    int thread) {
  constexpr int kStepA = TransposeA ? 2048 : 32, kStepB = TransposeB ? 2048 : 32;  // bytes from one k16 to the next
  const bool signals = thread < kCluster * 32 && thread % 32 == 0;  // one thread for each block of the cluster
  int previous = 0;
  pin(acc);
#pragma unroll 1
  for (int kt = 0;;) {
    barrier_wait(full + ring.stage * 8, ring.phase);
    const uint32_t stage = base + ring.stage * kBytesStage;
    const uint64_t a = descriptor(stage + group * (kBytesA / 2), 8192, 1024);
    const uint64_t b = descriptor(stage + kBytesA, 8192, 1024);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) {
      wgmma_64x256x16<TransposeA, TransposeB>(
          acc, a + (k * kStepA >> 4), b + (k * kStepB >> 4), continued || kt > 0 || k > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (kt > 0 && signals) barrier_arrive(empty + previous * 8, thread / 32);
    previous = ring.stage;
    ring.next();
    if (++kt == tiles_k) break;
  }
  wgmma_wait<0>();
  pin(acc);
  if (signals) barrier_arrive(empty + previous * 8, thread / 32);
}

// Sum of the 128 columns of one leaf and row, held as 32 values by each lane of a quad: x[2 j + b] of lane q is column
// 8 j + 2 q + b. The tree over adjacent pairs goes b, q, j; lanes swap halves of their values, so that each level costs
// half as many exchanges as the one before.
__device__ __forceinline__ float tree_of_quad(const float (&x)[32], int q) {
  const bool odd = q & 1, high = q & 2;
  float t[16];
#pragma unroll
  for (int j = 0; j < 16; ++j) t[j] = __fadd_rn(x[2 * j], x[2 * j + 1]);
  float a[8];  // columns of q and q ^ 1, for j = 2 i + (q & 1)
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float keep = odd ? t[2 * i + 1] : t[2 * i], give = odd ? t[2 * i] : t[2 * i + 1];
    a[i] = __fadd_rn(keep, __shfl_xor_sync(~0u, give, 1));
  }
  float c[4];  // all 8 columns, for j = 4 i + q
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float keep = high ? a[2 * i + 1] : a[2 * i], give = high ? a[2 * i] : a[2 * i + 1];
    c[i] = __fadd_rn(keep, __shfl_xor_sync(~0u, give, 2));
  }
  float d[2];  // 16 columns, j / 2 = 4 i + 2 (q & 1) + (q >> 1)
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float keep = odd ? c[2 * i + 1] : c[2 * i], give = odd ? c[2 * i] : c[2 * i + 1];
    d[i] = __fadd_rn(keep, __shfl_xor_sync(~0u, give, 1));
  }
  float e = __fadd_rn(high ? d[1] : d[0], __shfl_xor_sync(~0u, high ? d[0] : d[1], 2));  // j / 4 = 2 (q >> 1) + (q & 1)
  e = __fadd_rn(e, __shfl_xor_sync(~0u, e, 1));
  return __fadd_rn(e, __shfl_xor_sync(~0u, e, 2));
}

// 16 x 128 fp32 of one warp, as bf16 through the warp's own shared memory to global memory, 256 bytes of a row at a time.
struct Stager {
  uint32_t address;  // 4 KiB
  int lane;

  // Columns [first, first + 128) of the tile, first = 0 or 128; rows from `row` on. `out` [rows, >= cols] with rows of
  // `stride` elements, a multiple of 8: whole groups of 8 columns are written, so up to 7 columns of padding.
  __device__ __forceinline__ void send(
      const float (&acc)[128], int first, __nv_bfloat16* out, int64_t stride, int rows, int cols, int row,
      int column) const {
    const int quad = lane / 4, quad_lane = lane % 4;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* x = acc + first / 2 + j * 4 + 2 * h;
        const __nv_bfloat162 value = __floats2bfloat162_rn(x[0], x[1]);
        const int r = quad + 8 * h;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(address + r * 256 + ((j ^ quad) * 16) + quad_lane * 4),
                     "r"(reinterpret_cast<const uint32_t&>(value))
                     : "memory");
      }
    }
    __syncwarp();
    const int chunk = lane % 16, at = column + first + chunk * 8;
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

// Correctly rounded acc / divisor (one divisor for each of the thread's two rows): a quotient from the rounded
// reciprocal, corrected twice, is exact unless the residual underflows or a value is not finite.
__device__ __forceinline__ void divide_rows(float (&acc)[128], const float (&divisor)[2]) {
  float largest = 0.0f, smallest = 1.0f;
#pragma unroll
  for (int i = 0; i < 128; ++i) {
    largest = fmaxf(largest, fabsf(acc[i]));
    smallest = fminf(smallest, fabsf(acc[i]));
  }
  const bool plain = largest < 0x1p60f && smallest > 0x1p-60f && fminf(divisor[0], divisor[1]) > 0x1p-30f &&
      fmaxf(divisor[0], divisor[1]) < 0x1p30f;
  if (__all_sync(~0u, plain)) {
    const float inverse[2] = {__frcp_rn(divisor[0]), __frcp_rn(divisor[1])};
#pragma unroll
    for (int i = 0; i < 128; ++i) {
      const float t = divisor[(i / 2) % 2], y = inverse[(i / 2) % 2];
      float q = __fmul_rn(acc[i], y);
      q = __fmaf_rn(__fmaf_rn(-q, t, acc[i]), y, q);
      acc[i] = __fmaf_rn(__fmaf_rn(-q, t, acc[i]), y, q);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 128; ++i) acc[i] = __fdiv_rn(acc[i], divisor[(i / 2) % 2]);
  }
}

template <int Kind>
__device__ __forceinline__ void vocabulary_epilogue(
    float (&acc)[128], const Tile& tile, const Vocabulary& v, const Stager& stager, int group, int thread) {
  const int warp_row = group * 64 + (thread / 32) * 16, lane = thread % 32, quad = lane / 4, quad_lane = lane % 4;
  const int64_t rows = tile.problem->rows;
  int row[2], hit[2];  // rows of this thread; the target's column in the tile, or -1
  float temperature[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    row[h] = tile.m + warp_row + quad + 8 * h;
    const bool inside = row[h] < rows;
    const int64_t column = inside ? v.targets[row[h]] - v.start - tile.n : -1;
    hit[h] = column >= 0 && column < min(kTileN, v.columns - tile.n) ? static_cast<int>(column) : -1;
    temperature[h] = inside && v.temperatures != nullptr ? v.temperatures[row[h]] : 1.0f;
  }
  if (__any_sync(~0u, temperature[0] != 1.0f || temperature[1] != 1.0f)) {  // division by one changes nothing
    divide_rows(acc, temperature);
  }
  if (tile.n + kTileN > v.columns) {
#pragma unroll
    for (int i = 0; i < 128; ++i) {
      if (tile.n + (i / 4) * 8 + quad_lane * 2 + i % 2 >= v.columns) acc[i] = -INFINITY;
    }
  }
  const bool any_hit = __any_sync(~0u, hit[0] >= 0 || hit[1] >= 0);  // rare
  bool entropy = false;
  RowGrad grad[2];
  if constexpr (Kind == kStatistics) {
    if (any_hit) {
#pragma unroll
      for (int i = 0; i < 128; ++i) {
        const int h = (i / 2) % 2;
        if (hit[h] == (i / 4) * 8 + quad_lane * 2 + i % 2) v.target_logit[row[h]] = acc[i];
      }
    }
  } else {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      grad[h] = row[h] < rows ? row_grad(v.state, v.grads, rows, row[h], temperature[h]) : RowGrad{};
    }
    entropy = __any_sync(~0u, grad[0].ent != 0.0f || grad[1].ent != 0.0f);
  }
#pragma unroll
  for (int leaf = 0; leaf < kTileN / kLeaf; ++leaf) {
    const int leaf_index = tile.n / kLeaf + leaf;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float* x = acc + leaf * 64 + 2 * h;  // x[4 j + b]
      float leaf_max = -INFINITY;
#pragma unroll
      for (int i = 0; i < 32; ++i) leaf_max = fmaxf(leaf_max, x[(i / 2) * 4 + i % 2]);
      leaf_max = fmaxf(leaf_max, __shfl_xor_sync(~0u, leaf_max, 1));
      leaf_max = __fadd_rn(fmaxf(leaf_max, __shfl_xor_sync(~0u, leaf_max, 2)), 0.0f);
      const float shift = shift_of(leaf_max);
      if constexpr (Kind == kStatistics) {
        float e[32], u[32];
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const float d = __fsub_rn(x[(i / 2) * 4 + i % 2], shift);
          e[i] = exp_(d);
          u[i] = __fmul_rn(e[i], fmaxf(d, -200.0f));  // e is 0 long before; keeps 0 * -inf out
        }
        const float mean = tree_of_quad(u, quad_lane), sum = tree_of_quad(e, quad_lane);
        if (row[h] < rows && leaf_index < v.leaves) {
          const int64_t at = static_cast<int64_t>(row[h]) * v.leaves + leaf_index;
          if (quad_lane == 0) v.leaf_max[at] = leaf_max;
          if (quad_lane == 1) v.leaf_sum[at] = sum;
          if (quad_lane == 2) v.leaf_mean[at] = mean;
        }
#pragma unroll
        for (int i = 0; i < 32; ++i) x[(i / 2) * 4 + i % 2] = e[i];
      } else {
        const LeafGrad gradient = LeafGrad::of(leaf_max, grad[h]);
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          float& z = x[(i / 2) * 4 + i % 2];
          z = __bfloat162float(__float2bfloat16_rn(exp_(__fsub_rn(z, shift))));
        }
        if (entropy) {
#pragma unroll
          for (int i = 0; i < 32; ++i) {
            x[(i / 2) * 4 + i % 2] = gradient.template operator()<true>(x[(i / 2) * 4 + i % 2], grad[h]);
          }
        } else {
#pragma unroll
          for (int i = 0; i < 32; ++i) {
            x[(i / 2) * 4 + i % 2] = gradient.template operator()<false>(x[(i / 2) * 4 + i % 2], grad[h]);
          }
        }
        if (any_hit) {
#pragma unroll
          for (int i = 0; i < 32; ++i) {
            if (hit[h] == leaf * kLeaf + (i / 2) * 8 + quad_lane * 2 + i % 2) {
              x[(i / 2) * 4 + i % 2] = __fadd_rn(x[(i / 2) * 4 + i % 2], grad[h].logp);
            }
          }
        }
      }
    }
    if (Kind == kGradient || v.keep) {
      stager.send(acc, leaf * kLeaf, tile.problem->out, tile.problem->out_stride, tile.problem->rows,
                  tile.problem->cols, tile.m + warp_row, tile.n);
    }
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

// fp32 [M, cols] <-> accumulators of one thread. Loads are issued 32 pairs at a time: a store in between would order them.
struct Pairs {
  int row, column, rows, cols;

  __device__ __forceinline__ Pairs(const Tile& tile, int group, int thread)
      : row(tile.m + group * 64 + (thread / 32) * 16 + (thread % 32) / 4), column(tile.n + (thread % 4) * 2),
        rows(tile.problem->rows), cols(tile.problem->cols) {}
  __device__ __forceinline__ bool inside(int i) const { return row + (i % 2) * 8 < rows && column + (i / 2) * 8 < cols; }
  __device__ __forceinline__ int64_t at(int i) const {
    return static_cast<int64_t>(row + (i % 2) * 8) * cols + column + (i / 2) * 8;
  }
  __device__ __forceinline__ void load(float (&acc)[128], const float* from) const {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      if (inside(i)) {
        const float2 value = __ldcg(reinterpret_cast<const float2*>(from + at(i)));
        acc[2 * i] = value.x;
        acc[2 * i + 1] = value.y;
      }
    }
  }
  __device__ __forceinline__ void store(const float (&acc)[128], float* to, bool add) const {
#pragma unroll
    for (int first = 0; first < 64; first += 32) {
      float2 before[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (add && inside(first + i)) before[i] = __ldcg(reinterpret_cast<const float2*>(to + at(first + i)));
      }
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        float2 value = make_float2(acc[2 * (first + i)], acc[2 * (first + i) + 1]);
        if (add) value = make_float2(__fadd_rn(before[i].x, value.x), __fadd_rn(before[i].y, value.y));
        if (inside(first + i)) __stcg(reinterpret_cast<float2*>(to + at(first + i)), value);
      }
    }
  }
};

__device__ __forceinline__ void store_epilogue(
    float (&acc)[128], const Tile& tile, const Stager& stager, uint32_t rank, int group, int thread) {
  const Problem& problem = *tile.problem;
  if (problem.output == kBf16) {
#pragma unroll
    for (int first = 0; first < kTileN; first += kLeaf) {
      stager.send(acc, first, problem.out, problem.out_stride, problem.rows, problem.cols,
                  tile.m + group * 64 + (thread / 32) * 16, tile.n);
    }
    return;
  }
  const bool blocks = problem.output == kBlocks;
  const bool add = problem.output == kFloatAccumulate || (blocks && (tile.block > 0 || problem.continues != 0));
  int* order = blocks ? problem.order + (tile.index * kCluster + static_cast<int>(rank)) * 2 + group : nullptr;
  if (blocks && tile.block > 0) await(order, tile.block);  // another cluster may have made the blocks before
  Pairs(tile, group, thread).store(acc, problem.out_float, add);
  if (blocks) {
    __threadfence();
    named_barrier(1 + group, 128);
    if (thread == 0) count_up(order);
  }
}

template <int TransposeA>
__device__ __forceinline__ void store_tile_of(
    const Tile& tile, Ring& ring, uint32_t base, uint32_t full, uint32_t empty, const Stager& stager, uint32_t rank,
    int group, int thread) {
  float acc[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) acc[i] = 0.0f;
  const float* init = tile.problem->init;
  if (init != nullptr) Pairs(tile, group, thread).load(acc, init);
  accumulate<TransposeA, 1>(acc, true, tile.k_tiles, ring, base, full, empty, group, thread);
  store_epilogue(acc, tile, stager, rank, group, thread);
}

template <int Kind>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ Params params) {
  extern __shared__ uint8_t raw[];
  const uint32_t base = (smem_address(raw) + 1023) & ~1023u;
  const uint32_t staging = base + kStages * kBytesStage;
  const uint32_t full = staging + 2 * kBytesStaging, empty = full + kStages * 8;
  const uint32_t tile_full = empty + kStages * 8, tile_empty = tile_full + kTileSlots * 8;
  const uint32_t tile_ids = tile_empty + kTileSlots * 8;
  const uint32_t rank = cluster_rank();
  const int group = static_cast<int>(threadIdx.x) / 128, thread = threadIdx.x % 128;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(empty + i * 8, 2 * kCluster);
    }
    for (int i = 0; i < kTileSlots; ++i) {
      barrier_init(tile_full + i * 8, 1);
      barrier_init(tile_empty + i * 8, kCluster * (8 + 1));  // eight consumer warps and the producer of each block
    }
    barrier_init_fence();
  }
  cluster_sync();

  // Readers of the broadcast: the id of the next tile.
  auto next_tile = [&](int& slot, uint32_t& phase, bool signal) {
    barrier_wait(tile_full + slot * 8, phase);
    int id;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(id) : "r"(tile_ids + slot * 4) : "memory");
    __syncwarp();
    if (signal) barrier_arrive(tile_empty + slot * 8, 0);
    if (++slot == kTileSlots) {
      slot = 0;
      phase ^= 1;
    }
    return id;
  };

  if (group == 0) {
    registers_down<40>();
    if (thread == 0) {  // producer; in block 0 of the cluster also the scheduler
      Ring ring;
      int slot = 0, next_slot = 0;
      uint32_t phase = 0, next_phase = 0;
      auto schedule = [&] {
        barrier_wait(tile_empty + next_slot * 8, next_phase ^ 1);
        const int id = atomicAdd(params.counter, 1);
        for (uint32_t to = 0; to < kCluster; ++to) {
          barrier_expect_remote(tile_full + next_slot * 8, 4, to);
          store_remote(tile_ids + next_slot * 4, id, tile_full + next_slot * 8, to);
        }
        if (++next_slot == kTileSlots) {
          next_slot = 0;
          next_phase ^= 1;
        }
      };
      if (rank == 0) schedule();
      while (true) {
        barrier_wait(tile_full + slot * 8, phase);
        int id;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(id) : "r"(tile_ids + slot * 4) : "memory");
        barrier_arrive(tile_empty + slot * 8, 0);
        if (++slot == kTileSlots) {
          slot = 0;
          phase ^= 1;
        }
        if (id >= params.tiles) break;
        if (rank == 0) schedule();
        const Tile tile = locate(params, id, rank);
        const Problem& problem = *tile.problem;
        for (int kt = 0; kt < tile.k_tiles; ++kt) {
          const int k = tile.k_first + kt * kTileK;
          barrier_wait(empty + ring.stage * 8, ring.phase ^ 1);
          const uint32_t barrier = full + ring.stage * 8, a = base + ring.stage * kBytesStage, b = a + kBytesA;
          barrier_expect(barrier, kBytesStage);
          if (problem.transposed_a) {
            load_tile(a, &problem.a, barrier, tile.m, k);
            load_tile(a + 8192, &problem.a, barrier, tile.m + 64, k);
          } else {
            load_tile(a, &problem.a, barrier, k, tile.m);
          }
          if constexpr (Kind == kStore) {
            if (tile.shares) {
              for (uint32_t chunk = rank * 2; chunk < rank * 2 + 2; ++chunk) {
                load_tile_multicast(b + chunk * 8192, &problem.b, barrier, tile.n + chunk * 64, k, 3);
              }
            } else {
              for (uint32_t chunk = 0; chunk < 4; ++chunk) {
                load_tile(b + chunk * 8192, &problem.b, barrier, tile.n + chunk * 64, k);
              }
            }
          } else if (tile.shares) {
            load_tile_multicast(b + rank * 16384, &problem.b, barrier, k, tile.n + rank * 128, 3);
          } else {
            load_tile(b, &problem.b, barrier, k, tile.n);
            load_tile(b + 16384, &problem.b, barrier, k, tile.n + 128);
          }
          ring.next();
        }
      }
    }
  } else {
    registers_up<232>();
    Ring ring;
    int slot = 0;
    uint32_t phase = 0;
    const Stager stager{staging + (group - 1) * kBytesStaging + (thread / 32) * 4096, thread % 32};
    while (true) {
      const int id = next_tile(slot, phase, thread % 32 == 0);
      if (id >= params.tiles) break;
      const Tile tile = locate(params, id, rank);
      if constexpr (Kind == kStore) {
        if (tile.problem->transposed_a) {
          store_tile_of<1>(tile, ring, base, full, empty, stager, rank, group - 1, thread);
        } else {
          store_tile_of<0>(tile, ring, base, full, empty, stager, rank, group - 1, thread);
        }
      } else {
        float acc[128];
        accumulate<0, 0>(acc, false, tile.k_tiles, ring, base, full, empty, group - 1, thread);
        vocabulary_epilogue<Kind>(acc, tile, params.vocabulary, stager, group - 1, thread);
      }
    }
  }
  __syncwarp();
  cluster_sync();
}

}  // namespace rlk::sm90
