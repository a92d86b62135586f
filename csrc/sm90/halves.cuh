// Products of one tile by a consumer warpgroup: 64 rows and 256 columns in two halves, which may begin and end apart.
//
// Each output is one chain of accumulations over ascending k, so neither tiles nor halves nor scheduling change a bit.
#pragma once
#include "gemm_types.cuh"

#include <type_traits>

namespace rlk::sm90 {

// The values from here on have nothing to do with those before, so that nothing keeps registers for them.
template <int N>
__device__ __forceinline__ void forget(float (&acc)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "=f"(acc[i])::"memory");
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
template <int Deep>
struct ConsumerOf {
  using Ring = RingOf<Deep>;
  uint32_t full, given_back;  // given_back: in the cluster's memory, of threads that say so for one of its blocks; else 0
  Ring ring, done;  // next stage to read, next stage to give back
  uint64_t first_a, first_b;  // of the first stage

  // stages: their memory
  __device__ __forceinline__ ConsumerOf(uint32_t stages, uint32_t full, uint32_t empty, int group, int thread)
      : full(full),
        given_back(thread < kCluster * 32 && thread % 32 == 0 ? barrier_of(empty, thread / 32) : 0),
        first_a(descriptor_kept(descriptor(stages + group * (kBytesA / 2), 8192, 1024))),
        first_b(descriptor_kept(descriptor(stages + kBytesA, 8192, 1024))) {}

  __device__ __forceinline__ void wait(const Ring& at) const { barrier_wait(full + at.stage * 8, at.phase); }
  __device__ __forceinline__ uint64_t a(const Ring& at) const { return descriptor_behind(first_a, at.stage * kBytesStage); }
  // half: 0 or 1; the rows of B of that half
  __device__ __forceinline__ uint64_t b(const Ring& at, int half) const {
    return descriptor_behind(first_b, at.stage * kBytesStage + half * (kBytesB / 2));
  }
  // Only after products of these stages: they alone keep the four warps together. Otherwise a late warp could still wait
  // for a stage when it is given back and filled again, and would miss its phase.
  __device__ __forceinline__ void release(int stages) {
    for (; stages > 0; --stages) {
      if (given_back != 0) barrier_arrive_there(given_back + done.stage * 8);
      done.next();
    }
  }
};

// The next `Count` tiles of k for one half, which starts a group of products in flight. continued: the accumulators hold
// values to go on from. The stages stay taken. Arrived: the other half has waited for them, and nothing but products has
// touched these accumulators. LastSteps: steps of 16 k of the last tile. beside: starts more products of the same k.
template <int Count, bool Arrived, int TransposeA, int TransposeB, int LastSteps = kTileK / 16, int Deep,
          typename Beside = Nothing>
__device__ __forceinline__ void multiply_half(float (&acc)[64], int half, bool continued, const ConsumerOf<Deep>& c,
                                              const Beside& beside = {}) {
  constexpr int kStepA = TransposeA ? 2048 : 32, kStepB = TransposeB ? 2048 : 32;  // bytes from one k16 to the next
  RingOf<Deep> at = c.ring;
  if constexpr (!Arrived) pin(acc);
#pragma unroll
  for (int i = 0; i < Count; ++i, at.next()) {
    if constexpr (!Arrived) c.wait(at);
    const uint64_t a = c.a(at), b = c.b(at, half);
    if constexpr (!Arrived) wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) {
      if (i + 1 == Count && k >= LastSteps) break;
      wgmma_64x128x16<TransposeA, TransposeB>(acc, a + (k * kStepA >> 4), b + (k * kStepB >> 4), continued || i > 0 || k > 0);
      beside(at, k, continued || i > 0 || k > 0);
    }
  }
  wgmma_commit();
}

// The same for both halves and `count` > 0 tiles of k, which are complete at the end.
template <int TransposeA, int TransposeB, int Deep, typename Beside = Nothing>
__device__ __forceinline__ void multiply_both(float (&left)[64], float (&right)[64], int count, bool continued,
                                              ConsumerOf<Deep>& c, const Beside& beside = {}) {
  constexpr int kStepA = TransposeA ? 2048 : 32, kStepB = TransposeB ? 2048 : 32;
  multiply_tiles(left, right, count, c, [&](int kt) {
    const uint64_t a = c.a(c.ring), b = c.b(c.ring, 0);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) {
      wgmma_64x256x16<TransposeA, TransposeB>(left, right, a + (k * kStepA >> 4), b + (k * kStepB >> 4),
                                              continued || kt > 0 || k > 0);
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

// Tiles of k at the begin and (`End`) at the end of a tile whose halves are multiplied one after the other; with End 0 there
// are none.
constexpr int kBegin = 1;

// The first tiles of k of a tile; `between` has the right half for itself while the tensor cores work on the left one,
// `meanwhile` runs while they work on the right one.
// Accumulators go from products of one shape to those of another only after a wait.
template <int End, int TransposeA, int TransposeB, int Deep, typename Between, typename Meanwhile, typename Beside = Nothing>
__device__ __forceinline__ void begin_tile(float (&left)[64], float (&right)[64], ConsumerOf<Deep>& c, Between between,
                                           Meanwhile meanwhile, const Beside& beside = {}) {
  if constexpr (End > 0) {
    choose(beside, [&](const auto& more) { multiply_half<kBegin, false, TransposeA, TransposeB>(left, 0, false, c, more); });
    between();
    wgmma_wait<0>();
    pin(left);
    multiply_half<kBegin, false, TransposeA, TransposeB>(right, 1, false, c);
    c.ring.skip(kBegin);
    meanwhile();
    wgmma_wait<0>();
    pin(right);
    renew(left);
    renew(right);
    c.release(kBegin);
  } else {
    between();
    meanwhile();
  }
}

// The rest of a tile of more than kBegin + End tiles of k. left_done(finish): the left half is complete, the tensor cores work
// on the right one; it calls finish() at some point, after which the right half is complete, too.
template <int End, int TransposeA, int TransposeB, int Deep, typename LeftDone, typename Beside = Nothing>
__device__ __forceinline__ void end_tile(float (&left)[64], float (&right)[64], int tiles_k, ConsumerOf<Deep>& c,
                                         LeftDone left_done, const Beside& beside = {}) {
  choose(beside, [&](const auto& more) {
    multiply_both<TransposeA, TransposeB>(left, right, tiles_k - (End > 0 ? kBegin + End : 0), End > 0, c, more);
    renew(left);
    renew(right);
    if constexpr (End > 0) {
      multiply_half<End, false, TransposeA, TransposeB>(left, 0, true, c, more);
      multiply_half<End, true, TransposeA, TransposeB>(right, 1, true, c);
    }
  });
  if constexpr (End > 0) {
    c.ring.skip(End);
    wgmma_wait<1>();
    pin(left);
  }
  left_done([&] {
    wgmma_wait<0>();
    c.release(End);
  });
  pin(right);
}

}  // namespace rlk::sm90
