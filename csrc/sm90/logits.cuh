// Logits A[M, K] B[N, K]^T for Hopper that stay on the chip: statistics of the leaves of 128 columns (and optionally bf16
// exp(z - leaf_max)), or the bf16 gradients of logits.
//
// Blocks, clusters, tiles and stages are those of gemm.cuh. The halves of a tile (a leaf each) end at different times: the last
// two tiles of k are multiplied first for the left half, then for the right one, during which the left half's epilogue runs;
// the first one of the next tile first for its left half, during which the right half's epilogue runs. Both warpgroups of a
// block come there at about the same time, so what else lies between the products leaves the tensor cores idle: stores are left
// to the copy engine, a thread of its own finds the tiles and says where they lie, and what an epilogue reads is on its way
// before.
#pragma once
#include "carried.cuh"
#include "halves.cuh"

namespace rlk::sm90 {

// Shared memory of a block, as addresses.
struct LogitMemory {
  uint32_t stages, carried, staging, full, empty;
  Broadcast tile;

  __device__ __forceinline__ explicit LogitMemory(uint32_t base, bool carry) {
    stages = base;
    carried = base + kStages * kBytesStage;
    staging = carried + (carry ? kStages * kBytesCarried : 0);
    full = carried + 2 * kBytesStaging;
    empty = full + kStages * 8;
    tile = {empty + kStages * 8, empty + kStages * 8 + 8, empty + kStages * 8 + 16};
  }
};

// Carry: tiles may carry rows that are in none (carried.cuh). Stores: bf16 values are written.
template <int Kind, int End, bool Carry, bool Stores>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    logits_kernel(const __grid_constant__ Params params) {
  extern __shared__ uint8_t raw[];
  __shared__ Shape shape;
  const LogitMemory memory((smem_address(raw) + 1023) & ~1023u, Carry);
  const uint32_t rank = cluster_rank();
  const int group = static_cast<int>(threadIdx.x) / 128, thread = threadIdx.x % 128;
  const Problem& problem = params.problem[0];

  if (threadIdx.x == 0) {
    const int active = params.active != nullptr ? max(*params.active - params.skipped, 0) : INT_MAX;
    shape.set<Kind, true>(problem, active, Carry);
    shape.set_whole(params);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(memory.full + i * 8, 1);
      barrier_init(memory.empty + i * 8, 2 * kCluster);
    }
    barrier_init(memory.tile.full, 1);
    barrier_init(memory.tile.empty, kCluster * (8 + 1));  // eight consumer warps and the producer of each block
    barrier_init_fence();
  }
  cluster_sync();
  const int tiles_k = (problem.depth + kTileK - 1) / kTileK;
  uint32_t phase = 0;

  if (group == 0) {
    registers_down<40>();
    if (thread == 0) {  // producer
      const CUtensorMap *rows = shape.whole ? &params.whole : &problem.a,
                        *carried_rows = shape.whole ? &params.whole_carried : &params.carried;
      Ring ring;
      while (true) {
        const TileAt tile = memory.tile.next<true>(phase);
        if (tile.is(TileAt::kEnd)) break;
        const int m = tile.m(), n = tile.column;
        // Each block loads half of the carried rows for both.
        const int carried_row =
            Carry && tile.is(TileAt::kCarries) ? shape.tiled() + static_cast<int>(rank) * (kCarried / kCluster) : -1;
        for (int kt = 0; kt < tiles_k; ++kt) {
          const int k = kt * kTileK;
          barrier_wait(memory.empty + ring.stage * 8, ring.phase ^ 1);
          const uint32_t barrier = memory.full + ring.stage * 8, a = memory.stages + ring.stage * kBytesStage, b = a + kBytesA;
          if (Carry && carried_row >= 0) {
            barrier_expect(barrier, kBytesStage + kBytesCarried);
            load_tile_multicast(memory.carried + ring.stage * kBytesCarried + rank * (kBytesCarried / kCluster), carried_rows,
                                barrier, k, carried_row, 3);
          } else {
            barrier_expect(barrier, kBytesStage);
          }
          load_tile(a, rows, barrier, k, m);
          if (tile.is(TileAt::kShares)) {
            load_tile_multicast(b + rank * (kBytesB / 2), &problem.b, barrier, k, n + static_cast<int>(rank) * kLeaf, 3);
          } else {
            load_tile(b, &problem.b, barrier, k, n);
            load_tile(b + kBytesB / 2, &problem.b, barrier, k, n + kLeaf);
          }
          ring.next();
        }
      }
    } else if (rank == 0 && thread == 32) {  // scheduler
      const int tiles = shape.all_tiles;
      for (uint32_t free = 1;; free ^= 1) {
        barrier_wait(memory.tile.empty, free);
        const int id = atomicAdd(params.counter, 1);
        TileAt at{TileAt::kEnd, 0};
        if (id < tiles) {
          const Tile tile = locate<false, true>(params, &shape, id, 0);
          at = TileAt::of(tile, Carry && tile.carries() ? TileAt::kCarries : 0);
        }
        memory.tile.send(at, 0);
        if (id < tiles) at = at.next_to();
        memory.tile.send(at, 1);
        if (id >= tiles) break;
      }
    }
  } else {
    registers_up<232>();
    const Vocabulary& v = params.vocabulary;
    // Shuffled, so that these loads have ended before any arrival.
    const RowCounts rows{__shfl_sync(~0u, shape.rows, 0), __shfl_sync(~0u, shape.store_rows, 0)};
    const int own = __shfl_sync(~0u, group - 1, 0), warp = own * 4 + thread / 32;
    ConsumerOf<kStages> consumer(memory.stages, memory.full, memory.empty, own, thread);
    constexpr int kRows = Carry ? 8 : 16;
    using Stage = std::conditional_t<Stores, BulkStager<kRows>, NoStager>;
    Stage stager{};
    if constexpr (Stores) stager = {memory.staging + warp * BulkStager<kRows>::kBytes, &params.stores};
    float left[64], right[64];
    RowInputs inputs;
    TwoRows two;
    TileAt tile = memory.tile.next<false>(phase);
    // All tiles. Between them the right half's epilogue runs while the next tile's first products do; values leave when
    // products that could start are on their way.
    auto run = [&](auto& beside, auto of_tile, auto left_first) {
      auto leaf = [&](float (&acc)[64], int half, auto halfway) {
        return vocabulary_leaf<Kind>(acc, half, two, rows, v, stager, own, thread, halfway);
      };
      auto leave = [&](const Leaving& values) {
        if (values.any) stager.flush(values.row, values.column, thread % 32);
      };
      auto start = [&] {
        of_tile();
        inputs.load(tile.m(), rows.active, v, own, thread);
      };
      auto advance = [&] {
        tile = memory.tile.next<false>(phase);
        if (!tile.is(TileAt::kEnd)) start();
      };
      auto set = [&] { two.set(tile.m(), tile.column, inputs, v); };
      Leaving values;
      start();
      begin_tile<End, 0, 0>(left, right, consumer, [] {}, set, beside);
      while (true) {
        end_tile<End, 0, 0>(
            left, right, tiles_k, consumer,
            [&](auto finish) {
              left_first();
              if constexpr (!Stores)
                advance();  // while the tensor cores have work; registers are too few where values are stored
              values = leaf(left, 0, finish);
            },
            beside);
        if constexpr (Stores) advance();
        if (tile.is(TileAt::kEnd)) break;
        begin_tile<End, 0, 0>(
            left, right, consumer,
            [&] {
              leave(values);
              values = leaf(right, 1, [] {});
            },
            [&] {
              leave(values);
              set();
            },
            beside);
      }
      leave(values);
      leave(leaf(right, 1, [] {}));
    };
    if (!tile.is(TileAt::kEnd)) {
      if constexpr (Carry) {
        float acc[16];
        const int tiled = __shfl_sync(~0u, shape.tiled(), 0);
        Carried carried{acc, memory.stages + kBytesA + rank * (kBytesB / 2) + own * 8192, memory.carried, false};
        run(
            carried, [&] { carried.now = tile.is(TileAt::kCarries); },
            [&] {
              if (carried.now) {
                pin(acc);
                carried_leaf(carried, tile.column, rank, tiled, rows.active, problem, v, memory.staging, own, thread);
              }
            });
      } else {
        Nothing nothing;
        run(nothing, [] {}, [] {});
      }
    }
    if (Stores && thread % 32 == 0) stores_have_read();  // the memory must last until then
  }
  __syncwarp();
  cluster_sync();
}

}  // namespace rlk::sm90
