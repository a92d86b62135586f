// Persistent, warp-specialised bf16 matrix product for Hopper: out[M, N] = A[M, K] B[N, K]^T with fp32 accumulators.
//
// A cluster of two blocks computes 256 x 256 outputs: each block 128 rows, its two consumer warpgroups 64 rows each, and
// both blocks share the 256 columns of B (each loads half and multicasts it). One producer thread keeps four stages of
// 64 k in flight; a thread beside, in the first block, takes tiles from a counter in global memory and broadcasts them.
//
// The halves of a tile of dW (128 columns) begin and end apart, so that the tensor cores work meanwhile: the last tile of k is
// multiplied for the left half, then for the right one. As soon as the left one is complete it makes room (rounded, in half as
// many registers) for the first products of the next tile, then the right one; they leave while others are multiplied. A
// warpgroup waits while the tensor cores take its products up, so only what follows them runs beside the last ones.
//
// A and B may be stored with k contiguous (K-major) or with rows contiguous (MN-major). Output is bf16 or fp32; the
// accumulators may continue from fp32 values, or k may be cut into blocks, and then rows of A may be columns of the tile
// (tokens_as_columns.cuh). Kept logits become the gradients that it multiplies meanwhile, by what other
// warps the producer's warpgroup has (kept_gradient.cuh). Logits have a kernel of their own (logits.cuh).
#pragma once
#include "block_lines.cuh"
#include "halves.cuh"
#include "kept_gradient.cuh"
#include "tokens_as_columns.cuh"

namespace rlk::sm90 {

__device__ __forceinline__ void start_half(float (&acc)[64], int half, const Tile& tile, int group, int thread) {
#pragma unroll
  for (int i = 0; i < 64; ++i) acc[i] = 0.0f;
  if (tile.problem->init != nullptr) Pairs(tile, half, group, thread).load(acc, tile.problem->init);
}

// End: see halves.cuh. Columns: tokens may be columns of tiles of dH.
template <int End, bool Columns>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ Params params) {
  extern __shared__ uint8_t raw[];
  __shared__ Shape shapes[2];
  __shared__ KeptShape kept;
  const uint32_t base = (smem_address(raw) + 1023) & ~1023u;
  const uint32_t staging = base + kStages * kBytesStage;
  const uint32_t full = staging + 2 * kBytesStaging, empty = full + kStages * 8;
  const Broadcast tile_at{empty + kStages * 8, empty + kStages * 8 + 8, empty + kStages * 8 + 16};
  const uint32_t rank = cluster_rank();
  const int group = static_cast<int>(threadIdx.x) / 128, thread = threadIdx.x % 128;

  if (threadIdx.x == 0) {
    const int active = params.active != nullptr ? max(*params.active - params.skipped, 0) : INT_MAX;
    shapes[0].set<kStore, true>(params.problem[0], active, false);
    shapes[1].all_tiles = 0;
    if (params.problems > 1) shapes[1].set<kStore, false>(params.problem[1], active, false);
    for (int i = 0; i < 2; ++i) {
      shapes[i].whole = false;
      if (params.problem[i].transposed_a) shapes[i].set_whole(params);  // dW
    }
    if (params.kept.values != nullptr) {
      kept.set(shapes[0], params.problem[0], static_cast<int>(gridDim.x) / kCluster);
    }
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(empty + i * 8, 2 * kCluster);
    }
    barrier_init(tile_at.full, 1);
    barrier_init(tile_at.empty, kCluster * (8 + 1));  // eight consumer warps and the producer of each block
    barrier_init_fence();
  }
  cluster_sync();
  const int tiles = shapes[0].all_tiles + shapes[1].all_tiles;

  const int first = params.problem[0].output == kBlocks ? shapes[0].all_tiles : 0;  // tiles of dH, where there is one
  uint32_t phase = 0;

  // Tiles of dW lie where the broadcast says.
  auto weight_tile = [&](const TileAt& at) {
    const int last = params.problems - 1;
    return Tile{&params.problem[last], &shapes[last], at.m(), at.column, 0, shapes[last].tiles_k, 0, 0, at.is(TileAt::kShares)};
  };
  auto tile_of = [&](const TileAt& at) {
    return End > 0 && !at.is(TileAt::kLocate) ? weight_tile(at) : locate<Columns>(params, shapes, at.column, rank);
  };

  if (group == 0) {
    registers_down<56>();
    const bool making = params.kept.values != nullptr;
    if (thread == 0) {  // producer
      Ring ring;
      int gradients = 0;  // kept values in front of this k of the tile are gradients; INT_MAX: all
      while (true) {
        const TileAt at = tile_at.next<true>(phase);
        if (at.is(TileAt::kEnd)) break;
        const Tile tile = tile_of(at);
        const Problem& problem = *tile.problem;
        if (gradients != INT_MAX) gradients = 0;
        for (int kt = 0; kt < tile.k_tiles; ++kt) {
          int k = tile.k_first + kt * kTileK;
          if constexpr (End > 0) {
            if (kt >= tile.shape->filled) k = kBeyond;  // zeros
          }
          if (making && k >= gradients) gradients = await_gradients(params.kept, kept, tile, k);
          barrier_wait(empty + ring.stage * 8, ring.phase ^ 1);
          const uint32_t barrier = full + ring.stage * 8, a = base + ring.stage * kBytesStage, b = a + kBytesA;
          if (Columns && tile.shape->tokens > 0) {
            load_tokens(tile, rank, k, barrier, a, b);
            ring.next();
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
          ring.next();
        }
      }
    } else if (rank == 0 && thread / 32 == 1) {
      if (thread == 32) {  // scheduler
        for (uint32_t free = 1;; free ^= 1) {
          barrier_wait(tile_at.empty, free);
          const int id = atomicAdd(params.counter, 1);
          TileAt at{id < tiles ? TileAt::kLocate : TileAt::kEnd, id};
          if (End > 0 && id >= first && id < tiles) at = TileAt::of(locate(params, shapes, id, 0));
          tile_at.send(at, 0);
          if (!at.is(TileAt::kLocate | TileAt::kEnd)) at = at.next_to();
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
    ConsumerOf<kStages> consumer{base, full, empty, own, thread, {}, {}};
    auto stager = [&] {
      return BulkStager<16>{staging + (thread_now() / 32 - 4) * BulkStager<16>::kBytes, &params.stores};
    };
    const int count = arrived(first);
    float left[64], right[64];
    TileAt at = tile_at.next<false>(phase);
    // Tiles of dH come first. Their halves end together: few tiles, with many products each.
    while (at.is(TileAt::kLocate) && at.column < count) {
      const Tile tile = tile_of(at);
      forget(left);
      forget(right);
      if (Columns && tile.shape->tokens > 0) {
        if constexpr (Columns) {
          multiply_tokens(left, right, tile, consumer);
          store_tokens(left, right, tile, rank, staging + own * kBytesStaging, own, thread);
        }
      } else {
        multiply_both<0, 1>(left, right, arrived(tile.k_tiles), false, consumer);
        store_block<!Columns>(left, right, tile, rank, stager().address, own, thread);
      }
      at = tile_at.next<false>(phase);
    }
    const Problem& last_problem = params.problem[params.problems - 1];
    Outgoing outgoing(last_problem);
    if constexpr (End > 0) {
      if (!at.is(TileAt::kEnd)) {
        const Shape& shape = shapes[params.problems - 1];
        const int middle = arrived(shape.tiles_k) - kBegin - End;
        // The second half of the last tile of k is zeros and left out; products before it have met such zeros already, so not
        // even a -0 would change.
        const bool brief = __any_sync(~0u, shape.brief);
        TileAt last = at;
        auto take = [&](float (&acc)[64], int half) { outgoing.take(acc, half, weight_tile(last), own, thread); };
        auto leave = [&](int half) { outgoing.leave(half, weight_tile(last), stager(), own, thread); };
        forget(left);
        begin_tile<End, 1, 1>(left, right, consumer, [&] { forget(right); }, Nothing{});
        for (bool follows = false;; follows = true) {
          multiply_both<1, 1>(left, right, middle, true, consumer, Nothing{}, [&](int kt) {
            if (kt == 0 && follows) leave(1);  // of the tile before
          });
          renew(left);
          renew(right);
          if (brief) {
            multiply_half<End, false, 1, 1, 2>(left, 0, true, consumer);
            multiply_half<End, true, 1, 1, 2>(right, 1, true, consumer);
          } else {
            multiply_half<End, false, 1, 1>(left, 0, true, consumer);
            multiply_half<End, true, 1, 1>(right, 1, true, consumer);
          }
          consumer.ring.skip(End);
          last = at;
          at = tile_at.next<false>(phase);
          wgmma_wait<1>();
          pin(left);
          take(left, 0);
          // Behind the last tile the products are of what the memory happens to hold: with accumulators in flight on one way
          // and not on the other, the compiler would serialise all products (C7514).
          const bool more = __any_sync(~0u, !at.is(TileAt::kEnd));
          if (!more) consumer.ring.phase ^= 1;  // there is nothing to wait for
          forget(left);
          multiply_half<kBegin, false, 1, 1>(left, 0, false, consumer);
          leave(0);
          wgmma_wait<1>();
          pin(right);
          consumer.release(End);
          take(right, 1);
          forget(right);
          multiply_half<kBegin, false, 1, 1>(right, 1, false, consumer);
          consumer.ring.skip(kBegin);
          wgmma_wait<0>();
          pin(left);
          pin(right);
          if (!more) break;
          renew(left);
          renew(right);
          consumer.release(kBegin);
        }
        leave(1);
      }
    } else {
      while (!at.is(TileAt::kEnd)) {
        const Tile tile = tile_of(at);
        start_half(left, 0, tile, own, thread);
        start_half(right, 1, tile, own, thread);
        if (tile.k_tiles > 0) multiply_both<1, 1>(left, right, tile.k_tiles, true, consumer);
        outgoing.take(left, 0, tile, own, thread);
        outgoing.leave(0, tile, stager(), own, thread);
        outgoing.take(right, 1, tile, own, thread);
        outgoing.leave(1, tile, stager(), own, thread);
        at = tile_at.next<false>(phase);
      }
    }
    if (thread % 32 == 0) stores_have_read();  // the memory must last until then
  }
  __syncwarp();
  cluster_sync();
}

}  // namespace rlk::sm90
