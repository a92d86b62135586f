// Sums over ranks through memory that all GPUs of one machine can read: kernels.
// Specification: rl_kernel/ops/collectives/reference.py. out = round(((p0 + p1) + (p2 + p3)) + ...), fp32, padded with
// +0.0 to a power of two; every rank adds the same values in the same order, so who adds them cannot change a bit.
#pragma once
#include "exchange.h"
#include "system.cuh"

namespace rlk::gpu {

__device__ __forceinline__ int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Fails loudly where a rank never arrives, instead of spinning for ever.
struct Patience {
  uint64_t limit, started = 0;
  int polls = 0;
  __device__ __forceinline__ void missed() {
    if (++polls % 1024 != 0) return;
    const uint64_t time = now_ns();
    if (started == 0) started = time;
    if (time - started > limit) give_up();
  }
};

__device__ __forceinline__ uint64_t* flag_of(const Exchange& task, int owner, int lane, int source) {
  return reinterpret_cast<uint64_t*>(task.buffers[owner]) + lane * kFlagStride + source;
}

__device__ __forceinline__ char* slot_of(const Exchange& task, int owner, int lane, uint64_t step) {
  return task.buffers[owner] + task.slots_offset + (static_cast<int64_t>(lane) * kSlots + step % kSlots) * task.slot_bytes;
}

__device__ __forceinline__ bool aligned(const void* address, int bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

// Ends and unaligned parts, 16 bytes a call and byte by byte; out of line, since they are rare.
__device__ RLK_OUT_OF_LINE Wide load_bytes(const char* from, int bytes) {
  Wide value = {};
#pragma unroll
  for (int word = 0; word < 4; ++word) {
#pragma unroll 1
    for (int i = 4 * word; i < 4 * word + 4 && i < bytes; ++i) {
      value.word[word] |= static_cast<uint32_t>(static_cast<uint8_t>(from[i])) << (8 * (i % 4));
    }
  }
  return value;
}

__device__ RLK_OUT_OF_LINE void store_bytes(char* to, Wide value, int bytes) {
#pragma unroll
  for (int word = 0; word < 4; ++word) {
#pragma unroll 1
    for (int i = 4 * word; i < 4 * word + 4 && i < bytes; ++i) {
      to[i] = static_cast<char>(value.word[word] >> (8 * (i % 4)));
    }
  }
}

__device__ __forceinline__ int at_most_16(int64_t bytes) { return bytes < 16 ? static_cast<int>(bytes) : 16; }

// The block copies `bytes`. Peer: `from` is a slot, whole groups of 16 bytes are readable and the read is fresh.
template <bool Peer>
__device__ __forceinline__ void copy(char* to, const char* from, int64_t bytes) {
  constexpr int kUnroll = 4;
  const int64_t stride = static_cast<int64_t>(blockDim.x) * 16, first = threadIdx.x * int64_t{16};
  const int64_t whole = aligned(to, 16) && aligned(from, 16) ? bytes & ~int64_t{15} : 0;
  for (int64_t at = first; at < whole; at += stride * kUnroll) {
    Wide value[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const char* place = from + at + u * stride;
      if (at + u * stride < whole) value[u] = Peer ? load_peer(place) : *reinterpret_cast<const Wide*>(place);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (at + u * stride < whole) *reinterpret_cast<Wide*>(to + at + u * stride) = value[u];
    }
  }
#pragma unroll 1
  for (int64_t at = whole + first; at < bytes; at += stride) {
    const int part = at_most_16(bytes - at);
    store_bytes(to + at, Peer ? load_peer(from + at) : load_bytes(from + at, part), part);
  }
}

// Elements of 16 bytes of payload as fp32: 4 of float32, 8 of bfloat16.
template <int Size>
struct Elements {
  static constexpr int kCount = 16 / Size;
  static __device__ __forceinline__ float get(const Wide& value, int i) {
    if constexpr (Size == 4) {
      return float_of(value.word[i]);
    } else {
      return float_of(i % 2 == 0 ? value.word[i / 2] << 16 : value.word[i / 2] & 0xffff0000u);
    }
  }
};

template <int Leaves>
__device__ __forceinline__ float tree(float (&leaf)[Leaves]) {
#pragma unroll
  for (int width = Leaves / 2; width > 0; width /= 2) {
#pragma unroll
    for (int i = 0; i < width; ++i) leaf[i] = leaf[2 * i] + leaf[2 * i + 1];
  }
  return leaf[0];
}

// Count fp32 values as float32 or bfloat16 to aligned memory.
template <int Count>
__device__ __forceinline__ void store_rounded(char* to, int size, const float (&value)[Count]) {
  if (size == 4) {
#pragma unroll
    for (int part = 0; part < Count / 4; ++part) {
      Wide words;
#pragma unroll
      for (int i = 0; i < 4; ++i) words.word[i] = bits_of(value[4 * part + i]);
      reinterpret_cast<Wide*>(to)[part] = words;
    }
    return;
  }
  uint32_t word[Count / 2];
#pragma unroll
  for (int i = 0; i < Count / 2; ++i) {
    word[i] = round_to_bf16(value[2 * i]) | static_cast<uint32_t>(round_to_bf16(value[2 * i + 1])) << 16;
  }
#pragma unroll
  for (int i = 0; i < Count / 4; ++i) {
    reinterpret_cast<uint64_t*>(to)[i] = word[2 * i] | static_cast<uint64_t>(word[2 * i + 1]) << 32;
  }
}

// A lane's work on one call. Step by step: announce the filled slot, fill the next one meanwhile, wait for the others'
// announcement, then read their slots. Three slots suffice: a rank announces step s only after it has read everything of
// step s - 2, and slot (s + 1) % 3 is written only after the announcements of step s - 1 have been seen.
template <int Size, int Leaves>
struct Lane {
  const Exchange& task;
  const int lane;

  __device__ __forceinline__ int64_t start(int slice, int64_t piece) const {
    return slice * task.slice_stride + piece * task.piece_stride;
  }
  __device__ __forceinline__ int64_t count(int slice, int64_t piece) const {
    const int64_t left = task.limit + slice * task.limit_stride - start(slice, piece);
    return left < 0 ? 0 : least(left, task.chunk);
  }
  __device__ __forceinline__ bool whole() const { return task.mode == kAllReduceWhole || task.mode == kAllGather; }

  // What the other ranks will read of this piece.
  __device__ __forceinline__ void fill(int64_t piece, uint64_t step) const {
    char* slot = slot_of(task, task.rank, lane, step);
    const char* x = static_cast<const char*>(task.x);
    if (whole()) {
      copy<false>(slot, x + start(0, piece) * task.x_size, count(0, piece) * task.x_size);
      return;
    }
    for (int i = 1; i < task.ranks; ++i) {
      const int slice = (task.rank + i) % task.ranks;
      copy<false>(slot + slice * task.chunk * task.x_size, x + start(slice, piece) * task.x_size,
                  count(slice, piece) * task.x_size);
    }
  }

  __device__ __forceinline__ void gather(int64_t piece, uint64_t step) const {
    const char* x = static_cast<const char*>(task.x);
    char* out = static_cast<char*>(task.out);
    const int64_t first = start(0, piece), bytes = count(0, piece);
    copy<false>(out + task.rank * task.limit + first, x + first, bytes);
    for (int i = 1; i < task.ranks; ++i) {
      const int source = (task.rank + i) % task.ranks;
      copy<true>(out + source * task.limit + first, slot_of(task, source, lane, step), bytes);
    }
  }

  // Sum of one slice (or of the whole piece) to the output and, for the others, to `results`.
  __device__ __forceinline__ void reduce(int64_t piece, uint64_t step, char* results) const {
    constexpr int kCount = Elements<Size>::kCount;
    constexpr int kUnroll = Leaves == 2 ? 4 : Leaves == 4 ? 2 : 1;
    const int slice = whole() ? 0 : task.rank;
    const int64_t first = start(slice, piece), elements = count(slice, piece);
    const char* own = static_cast<const char*>(task.x) + first * Size;
    char* out = static_cast<char*>(task.out) + (task.mode == kReduceScatter ? piece * task.chunk : first) * task.out_size;
    const char* from[Leaves];
#pragma unroll
    for (int p = 0; p < Leaves; ++p) {
      from[p] = p == task.rank ? own : p < task.ranks ? slot_of(task, p, lane, step) + slice * task.chunk * Size : nullptr;
    }
    const int64_t stride = static_cast<int64_t>(blockDim.x) * kCount, mine = threadIdx.x * int64_t{kCount};
    const int64_t fast = aligned(own, 16) && aligned(out, 16) ? elements / kCount * kCount : 0;
    for (int64_t at = mine; at < fast; at += stride * kUnroll) {
      Wide payload[kUnroll][Leaves];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t place = at + u * stride;
#pragma unroll
        for (int p = 0; p < Leaves; ++p) {
          payload[u][p] = Wide{};
          if (place < fast && p < task.ranks) payload[u][p] = load_peer(from[p] + place * Size);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t place = at + u * stride;
        if (place >= fast) break;
        float sum[kCount];
        add(payload[u], sum);
        store_rounded(out + place * task.out_size, task.out_size, sum);
        if (results != nullptr) store_rounded(results + place * task.out_size, task.out_size, sum);
      }
    }
#pragma unroll 1
    for (int64_t place = fast + mine; place < elements; place += stride) {
      const int left = static_cast<int>(least(elements - place, kCount));
      Wide payload[Leaves];
#pragma unroll
      for (int p = 0; p < Leaves; ++p) {
        payload[p] = Wide{};
        if (p == task.rank) {
          payload[p] = load_bytes(own + place * Size, left * Size);
        } else if (p < task.ranks) {
          payload[p] = load_peer(from[p] + place * Size);
        }
      }
      float sum[kCount];
      add(payload, sum);
      alignas(16) Wide rounded[2] = {};
      store_rounded(reinterpret_cast<char*>(rounded), task.out_size, sum);
      char* to = out + place * task.out_size;
      store_bytes(to, rounded[0], at_most_16(left * task.out_size));
      if (left * task.out_size > 16) store_bytes(to + 16, rounded[1], left * task.out_size - 16);
      if (results != nullptr) store_rounded(results + place * task.out_size, task.out_size, sum);
    }
  }

  static __device__ __forceinline__ void add(const Wide (&payload)[Leaves], float (&sum)[Elements<Size>::kCount]) {
#pragma unroll
    for (int i = 0; i < Elements<Size>::kCount; ++i) {
      float leaf[Leaves];
#pragma unroll
      for (int p = 0; p < Leaves; ++p) leaf[p] = Elements<Size>::get(payload[p], i);
      sum[i] = tree(leaf);
    }
  }

  // The other ranks' sums of the previous piece.
  __device__ __forceinline__ void collect(int64_t piece, uint64_t step) const {
    for (int i = 1; i < task.ranks; ++i) {
      const int source = (task.rank + i) % task.ranks;
      copy<true>(static_cast<char*>(task.out) + start(source, piece) * task.out_size,
                 slot_of(task, source, lane, step) + task.result_offset, count(source, piece) * task.out_size);
    }
  }

  __device__ __forceinline__ void run() const {
    const uint64_t done = task.steps[lane];
    const int64_t pieces = (task.pieces - lane + task.lanes - 1) / task.lanes;
    const bool sliced = task.mode == kAllReduceSliced;
    const int64_t steps = pieces + (sliced ? 1 : 0);
    const int peer = static_cast<int>(threadIdx.x);  // the block has a thread for every rank
    const bool messenger = peer < task.ranks && peer != task.rank;
#pragma unroll 1
    for (int64_t i = -1; i < steps; ++i) {  // -1 only fills the first slot
      const uint64_t step = done + 1 + i;
      const int64_t piece = lane + i * task.lanes;
      if (i >= 0) {
        __syncthreads();
        if (messenger) signal(flag_of(task, peer, lane, task.rank), step);
      }
      if (i + 1 < pieces) fill(piece + task.lanes, step + 1);
      if (i < 0) continue;
      if (messenger) {
        Patience patience{task.timeout_ns};
        while (poll(flag_of(task, task.rank, lane, peer)) < step) patience.missed();
      }
      __syncthreads();
      if (i < pieces) {
        if (task.mode == kAllGather) {
          gather(piece, step);
        } else {
          reduce(piece, step, sliced ? slot_of(task, task.rank, lane, step + 1) + task.result_offset : nullptr);
        }
      }
      if (sliced && i > 0) collect(piece - task.lanes, step);
    }
    if (threadIdx.x == 0) task.steps[lane] = done + steps;
  }
};

template <int Size, int Leaves>
__global__ void __launch_bounds__(512) exchange_kernel(const RLK_GRID_CONSTANT Exchange task) {
  Lane<Size, Leaves>{task, static_cast<int>(blockIdx.x)}.run();
}

// Small payloads travel in one direction, without a flag: 4 bytes beside the tag of their step, and the reader waits for
// the tag. Two mailboxes suffice: who sends step s + 2 has received step s + 1, which its sender wrote in a later launch
// than the one that read step s. Tags repeat after 2^32 - 1 steps, an odd number, so not in the same mailbox.
__device__ __forceinline__ uint32_t tag_of(uint64_t step) { return static_cast<uint32_t>(step % 0xffffffffu) + 1; }

__device__ __forceinline__ Pair* mail_of(const Exchange& task, int owner, int lane, uint64_t step, int source) {
  const int64_t box = (static_cast<int64_t>(lane) * 2 + static_cast<int64_t>(step % 2)) * task.ranks + source;
  return reinterpret_cast<Pair*>(task.buffers[owner] + task.mailbox_offset) + box * task.mailbox_items;
}

// 8 bytes of payload, zero beyond the end.
__device__ __forceinline__ uint64_t load_item(const char* from, int64_t bytes) {
  if (bytes >= 8 && aligned(from, 8)) return *reinterpret_cast<const uint64_t*>(from);
  const Wide value = load_bytes(from, static_cast<int>(least(bytes, 8)));
  return value.word[0] | static_cast<uint64_t>(value.word[1]) << 32;
}

__device__ __forceinline__ void store_item(char* to, uint64_t value, int64_t bytes) {
  if (bytes >= 8 && aligned(to, 8)) {
    *reinterpret_cast<uint64_t*>(to) = value;
  } else if (bytes == 4 && aligned(to, 4)) {
    *reinterpret_cast<uint32_t*>(to) = static_cast<uint32_t>(value);
  } else {
    store_bytes(to, {{static_cast<uint32_t>(value), static_cast<uint32_t>(value >> 32)}}, static_cast<int>(least(bytes, 8)));
  }
}

__device__ __forceinline__ uint64_t receive_item(const Exchange& task, const Pair* mail, uint32_t tag) {
  Patience patience{task.timeout_ns};
  while (true) {
    const Pair pair = receive(mail);
    if (static_cast<uint32_t>(pair.low >> 32) == tag && static_cast<uint32_t>(pair.high >> 32) == tag) {
      return (pair.low & 0xffffffffu) | (pair.high << 32);
    }
    patience.missed();
  }
}

// task.chunk: bytes of a slice (of x; of every rank's part for all_gather); task.limit unused.
template <int Size, int Leaves>
__global__ void __launch_bounds__(512) exchange_small_kernel(const RLK_GRID_CONSTANT Exchange task) {
  constexpr int kCount = 8 / Size;
  const int lane = static_cast<int>(blockIdx.x), threads = static_cast<int>(blockDim.x);
  const uint64_t step = task.steps[lane] + 1;
  const uint32_t tag = tag_of(step);
  const int items = static_cast<int>((task.chunk + 7) / 8), share = (items + task.lanes - 1) / task.lanes;
  const int first = lane * share, left_items = items - first;
  const int own_items = share < left_items ? share : left_items;  // above 0: see the launch
  const char* x = static_cast<const char*>(task.x);
  char* out = static_cast<char*>(task.out);
  const bool scatter = task.mode == kReduceScatter;
  for (int i = threadIdx.x; i < own_items; i += threads) {
    const int64_t at = (first + i) * int64_t{8};
    uint64_t value = scatter ? 0 : load_item(x + at, task.chunk - at);
    for (int r = 1; r < task.ranks; ++r) {
      const int target = (task.rank + r) % task.ranks;
      if (scatter) value = load_item(x + target * task.chunk + at, task.chunk - at);
      const uint64_t mark = static_cast<uint64_t>(tag) << 32;
      send(mail_of(task, target, lane, step, task.rank) + i, Pair{(value & 0xffffffffu) | mark, (value >> 32) | mark});
    }
  }
  const char* own = x + (scatter ? task.rank * task.chunk : 0);
  for (int i = threadIdx.x; i < own_items; i += threads) {
    const int64_t at = (first + i) * int64_t{8}, bytes = task.chunk - at;
    if (task.mode == kAllGather) {
      for (int source = 0; source < task.ranks; ++source) {
        const uint64_t value = source == task.rank ? load_item(own + at, bytes)
                                                   : receive_item(task, mail_of(task, task.rank, lane, step, source) + i, tag);
        store_item(out + source * task.chunk + at, value, bytes);
      }
      continue;
    }
    uint64_t payload[Leaves];
#pragma unroll
    for (int p = 0; p < Leaves; ++p) {
      payload[p] = 0;
      if (p == task.rank) {
        payload[p] = load_item(own + at, bytes);
      } else if (p < task.ranks) {
        payload[p] = receive_item(task, mail_of(task, task.rank, lane, step, p) + i, tag);
      }
    }
    uint64_t rounded[2] = {0, 0};  // kCount results of 4 or 2 bytes
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      float leaf[Leaves];
#pragma unroll
      for (int p = 0; p < Leaves; ++p) {
        const uint32_t word = static_cast<uint32_t>(payload[p] >> (8 * Size * e));
        leaf[p] = float_of(Size == 4 ? word : word << 16);
      }
      const float sum = tree(leaf);
      if (task.out_size == 4) {
        rounded[e / 2] |= static_cast<uint64_t>(bits_of(sum)) << (32 * (e % 2));
      } else {
        rounded[0] |= static_cast<uint64_t>(round_to_bf16(sum)) << (16 * e);
      }
    }
    const int64_t left = bytes / Size * task.out_size;  // bytes of the result from here to the end
    char* to = out + at / Size * task.out_size;
    store_item(to, rounded[0], least(left, kCount * task.out_size));
    if (kCount * task.out_size > 8) store_item(to + 8, rounded[1], left - 8);
  }
  __syncthreads();
  if (threadIdx.x == 0) task.steps[lane] = step;
}

}  // namespace rlk::gpu
