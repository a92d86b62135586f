// Persistent, warp-specialised bf16 matrix product for Hopper: out[M, N] = A[M, K] B[N, K]^T with fp32 accumulators.
//
// A cluster of two blocks computes 256 x 256 outputs: each block 128 rows, its two consumer warpgroups 64 rows each, and
// both blocks share the 256 columns of B (each loads half and multicasts it). One producer thread keeps four stages of
// 64 k in flight; a thread beside, in the first block, takes tiles from a counter in global memory and broadcasts them.
// Tiles of dW have a shape of their own where no accumulators are given (tall.cuh).
//
// A and B may be stored with k contiguous (K-major) or with rows contiguous (MN-major). Output is bf16 or fp32; the
// accumulators may continue from fp32 values, or k may be cut into blocks, and then rows of A may be columns of the tile
// (tokens_as_columns.cuh). Kept logits become the gradients that it multiplies meanwhile, by what other
// warps the producer's warpgroup has (kept_gradient.cuh). Logits have a kernel of their own (logits.cuh).
#pragma once
#include "block_lines.cuh"
#include "halves.cuh"
#include "kept_gradient.cuh"
#include "tall.cuh"
#include "tokens_as_columns.cuh"

namespace rlk::sm90 {

__device__ __forceinline__ void start_half(float (&acc)[64], int half, const Tile& tile, int group, int thread) {
#pragma unroll
  for (int i = 0; i < 64; ++i) acc[i] = 0.0f;
  if (tile.problem->init != nullptr) Pairs(tile, half, group, thread).load(acc, tile.problem->init);
}

// Tall: tiles of dW are (tall.cuh). Columns: tokens may be columns of tiles of dH; only where Tall.
template <bool Tall, bool Columns>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ Params params) {
  extern __shared__ uint8_t raw[];
  __shared__ Shape shapes[2];
  __shared__ KeptShape kept;
  const uint32_t base = (smem_address(raw) + 1023) & ~1023u;
  const uint32_t staging = base + kStages * kBytesStage;
  const uint32_t full = staging + 2 * kBytesStaging, empty = full + kStages * 8;
  const Broadcast tile_at{empty + kStages * 8, empty + kStages * 8 + 8, empty + kStages * 8 + 16};
  const uint32_t tall_full = tile_at.empty + 8, tall_empty = tall_full + kTallStages * 8;
  const uint32_t rank = cluster_rank();
  const int group = static_cast<int>(threadIdx.x) / 128, thread = threadIdx.x % 128;

  if (threadIdx.x == 0) {
    const int active = params.active != nullptr ? max(*params.active - params.skipped, 0) : INT_MAX;
    shapes[0].set<kStore, true>(params.problem[0], active, false);
    shapes[1].all_tiles = 0;
    if (params.problems > 1) shapes[1].set<kStore, false>(params.problem[1], active, false);
    for (int i = 0; i < 2; ++i) {
      shapes[i].whole = false;
      if (!params.problem[i].transposed_a) continue;  // dW
      shapes[i].set_whole(params);
      if (Tall) shapes[i].all_tiles = tall_tiles(params.problem[i].rows, params.problem[i].cols);
    }
    if (params.kept.values != nullptr) {
      kept.set(shapes[0], params.problem[0], static_cast<int>(gridDim.x) / kCluster);
    }
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(empty + i * 8, 2 * kCluster);
    }
    for (int i = 0; Tall && i < kTallStages; ++i) {
      barrier_init(tall_full + i * 8, 1);
      barrier_init(tall_empty + i * 8, 2 * kCluster);
    }
    barrier_init(tile_at.full, 1);
    barrier_init(tile_at.empty, kCluster * (8 + 1));  // eight consumer warps and the producer of each block
    barrier_init_fence();
  }
  cluster_sync();
  const int tiles = shapes[0].all_tiles + shapes[1].all_tiles;

  const int first = params.problem[0].output == kBlocks ? shapes[0].all_tiles : 0;  // tiles of dH, where there is one
  uint32_t phase = 0;

  const int last = params.problems - 1;  // dW, where there is one
  auto tile_of = [&](const TileAt& at) { return locate<Columns>(params, shapes, at.column, rank); };

  if (group == 0) {
    registers_down<56>();
    const bool making = params.kept.values != nullptr;
    if (thread == 0) {  // producer
      Ring ring;
      int gradients = 0;  // kept values in front of this k of the tile are gradients; INT_MAX: all
      TileAt at = tile_at.next<true>(phase);
      for (; at.is(TileAt::kLocate); at = tile_at.next<true>(phase)) {
        const Tile tile = tile_of(at);
        const Problem& problem = *tile.problem;
        const bool rows = Tall || problem.output == kBlocks;  // dH
        const KeptNeed need = rows ? KeptNeed::of_rows(tile, kept) : KeptNeed::of_columns(tile.m, kTileM, kept);
        if (gradients != INT_MAX) gradients = 0;
        for (int kt = 0; kt < tile.k_tiles; ++kt) {
          const int k = tile.k_first + kt * kTileK;
          if (making && k >= gradients) {
            gradients =
                rows ? await_gradients<true>(params.kept, kept, need, k) : await_gradients<false>(params.kept, kept, need, k);
          }
          barrier_wait(empty + ring.stage * 8, ring.phase ^ 1);
          const uint32_t barrier = full + ring.stage * 8, a = base + ring.stage * kBytesStage, b = a + kBytesA;
          ring.next();
          if (Columns && tile.shape->tokens > 0) {
            load_tokens(tile, rank, k, barrier, a, b);
            continue;
          }
          const CUtensorMap* columns = tile.shape->whole ? &params.whole : &problem.b;
          if (problem.transposed_a) {
            load_tile(a, &problem.a, barrier, tile.m, k);
            load_tile(a + 8192, &problem.a, barrier, tile.m + 64, k);
          } else {
            load_tile(a, &problem.a, barrier, k, tile.m);
          }
          if (tile.shares) {
            for (uint32_t chunk = rank * 2; chunk < rank * 2 + 2; ++chunk) {
              load_tile_multicast(b + chunk * 8192, columns, barrier, tile.n + chunk * 64, k, 3);
            }
          } else {
            for (uint32_t chunk = 0; chunk < 4; ++chunk) {
              load_tile(b + chunk * 8192, columns, barrier, tile.n + chunk * 64, k);
            }
          }
          barrier_expect(barrier, kBytesStage);  // behind the loads: what they need from shared memory is here before
        }
      }
      if (Tall && !at.is(TileAt::kEnd)) {
        for (int i = 0; i < kStages; ++i, ring.next()) barrier_wait(empty + ring.stage * 8, ring.phase ^ 1);
        const Problem& problem = params.problem[last];
        const Shape& shape = shapes[last];
        const CUtensorMap* hidden = shape.whole ? &params.whole : &problem.b;
        RingOf<kTallStages> tall;
        for (; !at.is(TileAt::kEnd); at = tile_at.next<true>(phase)) {
          const KeptNeed need = KeptNeed::of_columns(at.column, kTallColumns, kept);
          if (gradients != INT_MAX) gradients = 0;
          for (int kt = 0; kt < shape.tiles_k; ++kt, tall.next()) {
            const int k = kt < shape.filled ? kt * kTileK : kBeyond;  // zeros
            if (making && k >= gradients) gradients = await_gradients<false>(params.kept, kept, need, k);
            barrier_wait(tall_empty + tall.stage * 8, tall.phase ^ 1);
            load_tall(at, hidden, &problem.a, rank, k, tall_full + tall.stage * 8, base + tall.stage * kBytesTallStage);
          }
        }
      }
    } else if (rank == 0 && thread / 32 == 1) {
      if (thread == 32) {  // scheduler
        for (uint32_t free = 1;; free ^= 1) {
          barrier_wait(tile_at.empty, free);
          const int id = atomicAdd(params.counter, 1);
          TileAt at{id < tiles ? TileAt::kLocate : TileAt::kEnd, id};
          if (Tall && id >= first && id < tiles) at = tall_tile(params.problem[last], id - first);
          tile_at.send(at, 0);
          if (!at.is(TileAt::kLocate)) at.column += kTallColumns;
          tile_at.send(at, 1);
          if (id >= tiles) break;
        }
      }
    } else if (making && thread >= 32) {
      make_all_gradients(params.kept, kept, thread % 32);
    }
  } else {
    registers_up<224>();
    const int own = __shfl_sync(~0u, group - 1, 0);  // known to be uniform
    ConsumerOf<kStages> consumer(base, full, empty, own, thread);
    const uint32_t memory = staging + (1 - own) * kBytesStaging;
    const int count = arrived(first);
    TileAt at = tile_at.next<false>(phase);
    {
      float left[64], right[64];
      // Tiles of dH come first. Their halves end together: few tiles, with many products each.
      while (at.is(TileAt::kLocate) && at.column < count) {
        const Tile tile = tile_of(at);
        forget(left);
        forget(right);
        if (Columns && tile.shape->tokens > 0) {
          if constexpr (Columns) {
            multiply_tokens(left, right, tile, consumer);
            store_tokens(left, right, tile, rank, memory, own, thread);
          }
        } else {
          multiply_both<0, 1>(left, right, arrived(tile.k_tiles), false, consumer);
          store_block<!Columns>(left, right, tile, rank, memory + thread_now() / 32 % 4 * BulkStager<16>::kBytes, own, thread);
        }
        at = tile_at.next<false>(phase);
      }
      while (!Tall && !at.is(TileAt::kEnd)) {
        const Tile tile = tile_of(at);
        start_half(left, 0, tile, own, thread);
        start_half(right, 1, tile, own, thread);
        if (tile.k_tiles > 0) multiply_both<1, 1>(left, right, tile.k_tiles, true, consumer);
        const BulkStager<16> stager{memory + thread_now() / 32 % 4 * BulkStager<16>::kBytes, &params.stores};
        store_half(left, 0, tile, stager, own, thread);
        store_half(right, 1, tile, stager, own, thread);
        at = tile_at.next<false>(phase);
      }
    }
    if constexpr (Tall) {
      if (!at.is(TileAt::kEnd)) {
        const Shape& shape = shapes[last];
        // All of dH's stages are free before the first of these is filled. What they hold was read by copies and products
        // alone, and the staging memory lies in them and, of the second warpgroup, in its own of dH.
        TallConsumer tall(base, tall_full, tall_empty, own, thread);
        const TallOutgoing outgoing{params.problem[last], &params.stores,
                                    base + kTallStages * kBytesTallStage + own * kBytesTallStaging, own, thread};
        multiply_all_tall(at, arrived(shape.tiles_k), __any_sync(~0u, shape.brief), tall, outgoing,
                          [&] { return tile_at.next<false>(phase); });
      }
    }
    if (thread % 32 == 0) stores_have_read();  // the memory must last until then
  }
  __syncwarp();
  cluster_sync();
}

}  // namespace rlk::sm90
