// Host entry points of the exchange between GPUs: plain pointers and sizes, no torch types.
//
// A symmetric buffer of every rank is mapped into every process. It holds, in this order,
//   flags     [lanes][16] u64           step that rank r has announced to this lane, at [lane][r]
//   steps     [lanes] u64               steps that this rank has completed; nobody else reads them
//   mailbox   [lanes][2][ranks][items]  16 bytes each: small payloads, every 4 bytes beside the tag of their step
//   slots     [lanes][3]                slot_bytes each: payloads, then results at result_offset
// A lane is a thread block and its counterparts on the other ranks. Lanes share nothing, so no grid needs to be resident
// as a whole; a lane's step counter lives in device memory and only grows, so a captured graph can be replayed.
#pragma once
#include <cstdint>

namespace rlk::gpu {

constexpr int kMaxRanks = 8;
constexpr int kFlagStride = 16;  // u64 between the flags of two lanes: one line of 128 bytes
#if defined(RLK_SIMULATED_SLOTS)  // the negative control of the simulation
constexpr int kSlots = RLK_SIMULATED_SLOTS;
#else
constexpr int kSlots = 3;
#endif

enum Mode : int { kAllReduceWhole = 0, kAllReduceSliced = 1, kReduceScatter = 2, kAllGather = 3 };

struct Exchange {
  char* buffers[kMaxRanks] = {};  // symmetric buffers in rank order
  uint64_t* steps = nullptr;      // [lanes] steps that this rank's lanes have completed
  const void* x = nullptr;
  void* out = nullptr;
  int rank = 0, ranks = 1, mode = 0;
  int lanes = 0;        // lanes of this launch
  int mailbox_items = 0;  // a lane's mailbox from one rank
  int x_size = 4, out_size = 4;  // bytes of an element: 4 float32, 2 bfloat16; 1 for all_gather, which moves bytes
  int64_t mailbox_offset = 0, slots_offset = 0, slot_bytes = 0, result_offset = 0;
  // Elements. Slice p of piece k of x is [p * slice_stride + k * piece_stride, ...), at most `chunk` of them and not
  // beyond limit + p * limit_stride.
  int64_t chunk = 0, pieces = 0, slice_stride = 0, piece_stride = 0, limit = 0, limit_stride = 0;
  uint64_t timeout_ns = 0;
};

// Where x is cut, for `elements` of a slice (of x for all_reduce, of a rank's share otherwise).
inline void cut(Exchange& task, int64_t elements, int64_t chunk) {
  const bool sliced = task.mode == kAllReduceSliced, scatter = task.mode == kReduceScatter;
  task.chunk = chunk;
  task.limit = elements;
  task.limit_stride = scatter ? elements : 0;
  task.slice_stride = sliced ? chunk : scatter ? elements : 0;
  task.piece_stride = sliced ? task.ranks * chunk : chunk;
  task.pieces = (elements + task.piece_stride - 1) / task.piece_stride;
}

// stream: cudaStream_t or hipStream_t. Returns the launch's error code, 0 for success.
int exchange(const Exchange& task, int threads, void* stream);
int exchange_small(const Exchange& task, int threads, void* stream);
const char* error_name(int code);

}  // namespace rlk::gpu
