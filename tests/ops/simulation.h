// Stands in for a GPU in csrc/gpu/exchange.cuh: threads of this process, barriers, and C++ atomics. Loads of a peer's
// memory are plain on purpose, so that the race detector judges the protocol's ordering alone.
#pragma once
#include <atomic>
#include <barrier>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>

#define __device__
#define __global__
#define __forceinline__ inline
#define RLK_OUT_OF_LINE __attribute__((noinline))
#define __launch_bounds__(x)
#define RLK_GRID_CONSTANT

namespace rlk::gpu {

struct Index {
  unsigned x;
};
inline thread_local Index threadIdx, blockIdx, blockDim;
inline thread_local std::barrier<>* block_barrier;
inline void __syncthreads() { block_barrier->arrive_and_wait(); }

struct alignas(16) Wide {
  uint32_t word[4];
};
struct alignas(16) Pair {
  uint64_t low, high;
};

inline void signal(uint64_t* flag, uint64_t value) {
  std::atomic_ref<uint64_t>(*flag).store(value, std::memory_order_release);
}
inline uint64_t poll(const uint64_t* flag) {
  return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(flag)).load(std::memory_order_acquire);
}
inline Wide load_peer(const void* address) { return *static_cast<const Wide*>(address); }
inline void send(Pair* address, Pair value) {
  std::atomic_ref<uint64_t>(address->low).store(value.low, std::memory_order_relaxed);
  std::atomic_ref<uint64_t>(address->high).store(value.high, std::memory_order_relaxed);
}
inline Pair receive(const Pair* address) {
  Pair& mail = *const_cast<Pair*>(address);
  return {std::atomic_ref<uint64_t>(mail.low).load(std::memory_order_relaxed),
          std::atomic_ref<uint64_t>(mail.high).load(std::memory_order_relaxed)};
}
inline uint64_t now_ns() {
  std::this_thread::yield();  // called by who waits
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
inline void give_up() {
  std::fprintf(stderr, "a rank never arrived\n");
  std::abort();
}
inline uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }
inline float float_of(uint32_t x) { return std::bit_cast<float>(x); }
inline uint16_t round_to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace rlk::gpu
