// Persistent, warp-specialised bf16 matrix product for Hopper: out[M, N] = A[M, K] B[N, K]^T with fp32 accumulators.
//
// A cluster of two blocks computes 256 x 256 outputs: each block 128 rows, its two consumer warpgroups 64 rows each, and
// both blocks share the 256 columns of B (each loads half and multicasts it). One producer thread keeps four stages of
// 64 k in flight; the first block's producer takes tiles from a counter in global memory and broadcasts them.
// Each output is one chain of accumulations over ascending k, so neither tiles nor scheduling change a bit.
//
// The halves of a tile of logits (128 columns, a leaf) end at different times: the last two tiles of k are multiplied
// first for the left half, then for the right one, during which the left half's epilogue runs; the first two of the next
// tile first for its left half, during which the right half's epilogue runs. So the tensor cores work while exponentials
// are taken and sums are made. Tiles of dW do the same; their epilogue writes to memory.
//
// A and B may be stored with k contiguous (K-major) or with rows contiguous (MN-major). Epilogues:
//   kStatistics   statistics of the 128-column leaves of the vocabulary, and optionally bf16 exp(z - leaf_max)
//   kGradient     bf16 gradient of the logits from merged statistics
//   kStore        bf16 or fp32 output; the accumulators may continue from fp32 values, or k may be cut into blocks, and then
//                 rows of A may be columns of the tile (tokens_as_columns.cuh). Kept logits become the gradients that it
//                 multiplies meanwhile, by the three other warps of the producer's warpgroup (kept_gradient.cuh)
#pragma once
#include "carried.cuh"
#include "kept_gradient.cuh"
#include "tokens_as_columns.cuh"

#include <type_traits>

namespace rlk::sm90 {

// The values from here on have nothing to do with those before, so that nothing keeps registers for them.
__device__ __forceinline__ void forget(float (&acc)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "=f"(acc[i])::"memory");
}

// Copies that cost nothing: the compiler assigns registers to the values before and after on their own, and finds the same
// ones. Without them it may find none for accumulators of both shapes and serialise all products (C7511).
template <int N>
__device__ __forceinline__ void renew(float (&acc)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float copy;
    asm volatile("mov.b32 %0, %1;" : "=f"(copy) : "f"(acc[i]) : "memory");
    acc[i] = copy;
  }
}

// A consumer warpgroup's view of the stages.
struct Consumer {
  uint32_t base, full, empty;
  int group, thread;
  Ring ring, done;  // next stage to read, next stage to give back

  __device__ __forceinline__ void wait(const Ring& at) const { barrier_wait(full + at.stage * 8, at.phase); }
  __device__ __forceinline__ uint64_t a(const Ring& at) const {
    return descriptor(base + at.stage * kBytesStage + group * (kBytesA / 2), 8192, 1024);
  }
  // half: 0 or 1; the rows of B of that half
  __device__ __forceinline__ uint64_t b(const Ring& at, int half) const {
    return descriptor(base + at.stage * kBytesStage + kBytesA + half * (kBytesB / 2), 8192, 1024);
  }
  // Only after products of these stages: they alone keep the four warps together. Otherwise a late warp could still wait
  // for a stage when it is given back and filled again, and would miss its phase.
  __device__ __forceinline__ void release(int stages) {
    const bool signals = thread < kCluster * 32 && thread % 32 == 0;  // one thread for each block of the cluster
    for (; stages > 0; --stages) {
      if (signals) barrier_arrive(empty + done.stage * 8, thread / 32);
      done.next();
    }
  }
};

struct Nothing {
  __device__ __forceinline__ void operator()(const Ring&, int, bool) const {}
};

// The next `Count` tiles of k for one half, which starts a group of products in flight. continued: the accumulators hold
// values to go on from. The stages stay taken. Arrived: the other half has waited for them, and nothing but products has
// touched these accumulators. LastSteps: steps of 16 k of the last tile. beside: starts more products of the same k.
template <int Count, bool Arrived, int TransposeA, int TransposeB, int LastSteps = kTileK / 16, typename Beside = Nothing>
__device__ __forceinline__ void multiply_half(
    float (&acc)[64], int half, bool continued, const Consumer& c, const Beside& beside = {}) {
  constexpr int kStepA = TransposeA ? 2048 : 32, kStepB = TransposeB ? 2048 : 32;  // bytes from one k16 to the next
  Ring at = c.ring;
  if constexpr (!Arrived) pin(acc);
#pragma unroll
  for (int i = 0; i < Count; ++i, at.next()) {
    if constexpr (!Arrived) c.wait(at);
    const uint64_t a = c.a(at), b = c.b(at, half);
    if constexpr (!Arrived) wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) {
      if (i + 1 == Count && k >= LastSteps) break;
      wgmma_64x128x16<TransposeA, TransposeB>(
          acc, a + (k * kStepA >> 4), b + (k * kStepB >> 4), continued || i > 0 || k > 0);
      beside(at, k, continued || i > 0 || k > 0);
    }
  }
  wgmma_commit();
}

// The same for both halves and `count` > 0 tiles of k, which are complete at the end.
template <int TransposeA, int TransposeB, typename Beside = Nothing>
__device__ __forceinline__ void multiply_both(
    float (&left)[64], float (&right)[64], int count, bool continued, Consumer& c, const Beside& beside = {}) {
  constexpr int kStepA = TransposeA ? 2048 : 32, kStepB = TransposeB ? 2048 : 32;
  multiply_tiles(left, right, count, c, [&](int kt) {
    const uint64_t a = c.a(c.ring), b = c.b(c.ring, 0);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) {
      wgmma_64x256x16<TransposeA, TransposeB>(
          left, right, a + (k * kStepA >> 4), b + (k * kStepB >> 4), continued || kt > 0 || k > 0);
      beside(c.ring, k, continued || kt > 0 || k > 0);
    }
  });
}

// Products beside those of the left half, where this tile has any: the code in both versions, chosen outside of its loops.
template <typename Beside, typename Run>
__device__ __forceinline__ void choose(const Beside& beside, Run run) {
  if constexpr (std::is_same_v<Beside, Nothing>) {
    run(beside);
  } else if (beside.now) {
    run(beside);
  } else {
    run(Nothing{});
  }
}

// The first tiles of k of a tile; `between` has the right half for itself while the tensor cores work on the left one.
// Accumulators go from products of one shape to those of another only after a wait.
template <int Edge, int TransposeA, int TransposeB, typename Between, typename Beside = Nothing>
__device__ __forceinline__ void begin_tile(
    float (&left)[64], float (&right)[64], Consumer& c, Between between, const Beside& beside = {}) {
  constexpr bool kRenews = TransposeA || !std::is_same_v<Beside, Nothing>;  // dW, and logits with carried rows
  if constexpr (Edge > 0) {
    choose(beside, [&](const auto& more) {
      multiply_half<Edge, false, TransposeA, TransposeB>(left, 0, false, c, more);
    });
    between();
    wgmma_wait<0>();
    pin(left);
    multiply_half<Edge, false, TransposeA, TransposeB>(right, 1, false, c);
    c.ring.skip(Edge);
    wgmma_wait<0>();
    pin(right);
    if constexpr (kRenews) {
      renew(left);
      renew(right);
    }
    c.release(Edge);
  } else {
    between();
  }
}

// The rest of a tile of more than 2 Edge tiles of k. left_done(finish): the left half is complete, the tensor cores work
// on the right one; it calls finish() at some point, after which the right half is complete, too. brief: the second half of
// the last tile of k is zeros and left out; products before it have met such zeros already, so not even a -0 would change.
// Not where there are products beside.
template <int Edge, int TransposeA, int TransposeB, typename LeftDone, typename Beside = Nothing>
__device__ __forceinline__ void end_tile(
    float (&left)[64], float (&right)[64], int tiles_k, bool brief, Consumer& c, LeftDone left_done,
    const Beside& beside = {}) {
  constexpr bool kRenews = TransposeA || !std::is_same_v<Beside, Nothing>;  // dW, and logits with carried rows
  choose(beside, [&](const auto& more) {
    multiply_both<TransposeA, TransposeB>(left, right, tiles_k - 2 * Edge, Edge > 0, c, more);
    if constexpr (kRenews) {
      renew(left);
      renew(right);
    }
    if constexpr (Edge > 0) {
      if (brief) {
        multiply_half<Edge, false, TransposeA, TransposeB, 2>(left, 0, true, c);
        multiply_half<Edge, true, TransposeA, TransposeB, 2>(right, 1, true, c);
      } else {
        multiply_half<Edge, false, TransposeA, TransposeB>(left, 0, true, c, more);
        multiply_half<Edge, true, TransposeA, TransposeB>(right, 1, true, c);
      }
    }
  });
  if constexpr (Edge > 0) {
    c.ring.skip(Edge);
    wgmma_wait<1>();
    pin(left);
  }
  left_done([&] {
    wgmma_wait<0>();
    c.release(Edge);
  });
  pin(right);
}

__device__ __forceinline__ void start_half(float (&acc)[64], int half, const Tile& tile, int group, int thread) {
#pragma unroll
  for (int i = 0; i < 64; ++i) acc[i] = 0.0f;
  if (tile.problem->init != nullptr) Pairs(tile, half, group, thread).load(acc, tile.problem->init);
}

// Carry: tiles may carry rows that are in none (carried.cuh); only where there is one problem, of logits.
template <int Kind, int Edge, bool Carry = false>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ Params params) {
  extern __shared__ uint8_t raw[];
  __shared__ Shape shapes[2];
  __shared__ KeptShape kept;
  const uint32_t base = (smem_address(raw) + 1023) & ~1023u;
  const uint32_t staging = base + kStages * kBytesStage;
  const uint32_t full = staging + 2 * kBytesStaging, empty = full + kStages * 8;
  const uint32_t tile_full = empty + kStages * 8, tile_empty = tile_full + kTileSlots * 8;
  const uint32_t tile_ids = tile_empty + kTileSlots * 8;
  const uint32_t rank = cluster_rank();
  const int group = static_cast<int>(threadIdx.x) / 128, thread = threadIdx.x % 128;

  if (threadIdx.x == 0) {
    const int active = params.active != nullptr ? max(*params.active - params.skipped, 0) : INT_MAX;
    shapes[0].set<Kind, true>(params.problem[0], active, Carry);
    shapes[1].all_tiles = 0;
    if (params.problems > 1) shapes[1].set<Kind, false>(params.problem[1], active, false);
    if (Kind == kStore && params.kept.values != nullptr) {
      kept.set(shapes[0], params.problem[0], static_cast<int>(gridDim.x) / kCluster);
    }
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
  const int tiles = shapes[0].all_tiles + shapes[1].all_tiles;

  // Readers of the broadcast: the id of the next tile.
  auto next_tile = [&](int& slot, uint32_t& phase, bool signal) {
    barrier_wait(tile_full + slot * 8, phase);
    const int id = read_shared(tile_ids + slot * 4);
    __syncwarp();
    if (signal) barrier_arrive(tile_empty + slot * 8, 0);
    if (++slot == kTileSlots) {
      slot = 0;
      phase ^= 1;
    }
    return id;
  };

  if (group == 0) {
    registers_down<Kind == kStore ? 56 : 40>();
    const bool making = Kind == kStore && params.kept.values != nullptr;
    if (thread == 0) {  // producer; in block 0 of the cluster also the scheduler
      Ring ring;
      int slot = 0, next_slot = 0;
      uint32_t phase = 0, next_phase = 0;
      [[maybe_unused]] int gradients = 0;  // kept values in front of this k of the tile are gradients; INT_MAX: all
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
        const int id = read_shared(tile_ids + slot * 4);
        barrier_arrive(tile_empty + slot * 8, 0);
        if (++slot == kTileSlots) {
          slot = 0;
          phase ^= 1;
        }
        if (id >= tiles) break;
        if (rank == 0) schedule();
        const Tile tile = locate<Kind == kStore, Carry>(params, shapes, id, rank);
        const Problem& problem = *tile.problem;
        if (gradients != INT_MAX) gradients = 0;
        // Each block loads half of the carried rows for both.
        const int carried_row =
            Carry && tile.carries() ? tile.shape->tiled() + static_cast<int>(rank) * (kCarried / kCluster) : -1;
        for (int kt = 0; kt < tile.k_tiles; ++kt) {
          int k = tile.k_first + kt * kTileK;
          if constexpr (Kind == kStore && Edge > 0) {
            if (kt >= tile.shape->filled) k = kBeyond;  // zeros
          }
          if constexpr (Kind == kStore) {
            if (making && k >= gradients) gradients = await_gradients(params.kept, kept, tile, k);
          }
          barrier_wait(empty + ring.stage * 8, ring.phase ^ 1);
          const uint32_t barrier = full + ring.stage * 8, a = base + ring.stage * kBytesStage, b = a + kBytesA;
          if constexpr (Kind == kStore) {
            if (tile.shape->tokens > 0) {
              load_tokens(tile, rank, k, barrier, a, b);
              ring.next();
              continue;
            }
          }
          if (Carry && carried_row >= 0) {
            barrier_expect(barrier, kBytesStage + kBytesCarried);
            load_tile_multicast(
                staging + ring.stage * kBytesCarried + rank * (kBytesCarried / kCluster), &params.carried, barrier, k,
                carried_row, 3);
          } else {
            barrier_expect(barrier, kBytesStage);
          }
          if (!Carry && problem.transposed_a) {
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
    } else if (making && thread >= 32) {
      make_all_gradients(params.kept, kept, thread % 32);
    }
  } else {
    registers_up<Kind == kStore ? 224 : 232>();
    const int own = group - 1;
    Consumer consumer{base, full, empty, own, thread, {}, {}};
    int slot = 0;
    uint32_t phase = 0;
    const Stager stager{staging + own * kBytesStaging + (thread / 32) * 4096, thread % 32};
    float left[64], right[64];
    int id = next_tile(slot, phase, thread % 32 == 0);
    if constexpr (Kind == kStore) {
      // Tiles of dH, where there is one, come first. Their halves end together: few tiles, with many products each.
      const int first = params.problem[0].output == kBlocks ? shapes[0].all_tiles : 0;
      while (id < first) {
        const Tile tile = locate<true>(params, shapes, id, rank);
        forget(left);
        forget(right);
        if (tile.shape->tokens > 0) {
          multiply_tokens(left, right, tile, consumer);
          store_tokens(left, right, tile, rank, stager, own, thread);
        } else {
          multiply_both<0, 1>(left, right, tile.k_tiles, false, consumer);
          store_block(left, 0, tile, rank, own, thread);
          store_block(right, 1, tile, rank, own, thread);
        }
        id = next_tile(slot, phase, thread % 32 == 0);
      }
    }
    if constexpr (Kind == kStore && Edge > 0) {
      if (id < tiles) {
        Tile tile = locate(params, shapes, id, rank);
        forget(left);
        begin_tile<Edge, 1, 1>(left, right, consumer, [&] { forget(right); });
        while (true) {
          const Tile last = tile;
          end_tile<Edge, 1, 1>(left, right, last.k_tiles, last.shape->brief, consumer, [&](auto finish) {
            store_half(left, 0, last, stager, own, thread);
            finish();
          });
          auto finish_right = [&] {
            store_half(right, 1, last, stager, own, thread);
            forget(right);
          };
          id = next_tile(slot, phase, thread % 32 == 0);
          if (id >= tiles) {
            finish_right();
            break;
          }
          tile = locate(params, shapes, id, rank);
          forget(left);
          begin_tile<Edge, 1, 1>(left, right, consumer, finish_right);
        }
      }
    } else if constexpr (Kind == kStore) {
      while (id < tiles) {
        const Tile tile = locate(params, shapes, id, rank);
        start_half(left, 0, tile, own, thread);
        start_half(right, 1, tile, own, thread);
        if (tile.k_tiles > 0) multiply_both<1, 1>(left, right, tile.k_tiles, true, consumer);
        store_half(left, 0, tile, stager, own, thread);
        store_half(right, 1, tile, stager, own, thread);
        id = next_tile(slot, phase, thread % 32 == 0);
      }
    } else if constexpr (Carry) {
      // As below. The leaf of carried rows is complete when the left half is.
      if (id < tiles) {
        const Vocabulary& v = params.vocabulary;
        const uint32_t meeting = staging + kStages * kBytesCarried;
        const NarrowStager narrow{meeting + own * (kBytesCarriedStaging / 2) + (thread / 32) * 2048, thread % 32};
        float acc[16];
        Tile tile = locate<false, true>(params, shapes, id, rank);
        Carried carried{acc, base + kBytesA + rank * (kBytesB / 2) + own * 8192, staging, tile.carries()};
        begin_tile<Edge, 0, 0>(left, right, consumer, [] {}, carried);
        while (true) {
          const TwoRows two(tile, v, own, thread);
          end_tile<Edge, 0, 0>(left, right, tile.k_tiles, false, consumer, [&](auto finish) {
            if (carried.now) {
              pin(acc);
              carried_leaf(carried, tile, rank, v, meeting, own, thread);
            }
            vocabulary_leaf<Kind, true>(left, 0, two, shapes[0], params.problem[0], v, narrow, own, thread, finish);
          }, carried);
          auto finish_right = [&] {
            vocabulary_leaf<Kind, true>(right, 1, two, shapes[0], params.problem[0], v, narrow, own, thread, [] {});
          };
          id = next_tile(slot, phase, thread % 32 == 0);
          if (id >= tiles) {
            finish_right();
            break;
          }
          tile = locate<false, true>(params, shapes, id, rank);
          carried.now = tile.carries();
          begin_tile<Edge, 0, 0>(left, right, consumer, finish_right, carried);
        }
      }
    } else if (id < tiles) {
      // Tiles overlap: the first products of the next tile are under way before this one's right half is dealt with.
      const Vocabulary& v = params.vocabulary;
      Tile tile = locate(params, shapes, id, rank);
      begin_tile<Edge, 0, 0>(left, right, consumer, [] {});
      while (true) {
        const TwoRows two(tile, v, own, thread);
        end_tile<Edge, 0, 0>(left, right, tile.k_tiles, false, consumer, [&](auto finish) {
          vocabulary_leaf<Kind, (Edge > 0)>(left, 0, two, shapes[0], params.problem[0], v, stager, own, thread, finish);
        });
        auto finish_right = [&] {
          vocabulary_leaf<Kind, (Edge > 0)>(right, 1, two, shapes[0], params.problem[0], v, stager, own, thread, [] {});
        };
        id = next_tile(slot, phase, thread % 32 == 0);
        if (id >= tiles) {
          finish_right();
          break;
        }
        tile = locate(params, shapes, id, rank);
        begin_tile<Edge, 0, 0>(left, right, consumer, finish_right);
      }
    }
  }
  __syncwarp();
  cluster_sync();
}

}  // namespace rlk::sm90
