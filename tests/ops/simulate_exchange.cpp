// Runs the kernels of csrc/gpu/exchange.cuh on threads: every rank a sequence of random calls, every result compared bit
// for bit with the tree of the specification. Built with -fsanitize=thread, it also checks that no slot is read while it
// is written, whatever the ranks' skew.   simulate_exchange RANKS CALLS SEED
// -DRLK_SIMULATED_SLOTS=2 is the negative control: a slot too few, which the race detector reports.
#include "gpu/exchange.cuh"

#include <cstring>
#include <memory>
#include <random>
#include <vector>

using namespace rlk::gpu;

namespace {

constexpr int kLanes = 2, kItems = 64, kChunk = 32;

// A rank's flag is waited for by a thread of its own.
int threads_of(int ranks) { return ranks < 4 ? 4 : ranks; }

struct Call {
  int mode = 0, in_size = 4, out_size = 4, lanes = 1, shift = 0;
  bool small = false;
  int64_t elements = 0;  // of x for all_reduce and all_gather, of one slice for reduce_scatter
};

Call random_call(std::mt19937& random) {
  Call call;
  call.mode = static_cast<int>(random() % 4);
  call.small = random() % 2 == 0 && call.mode != kAllReduceSliced;
  call.in_size = call.mode == kAllGather ? 1 : random() % 2 ? 4 : 2;
  call.out_size = call.mode == kAllGather ? 1 : random() % 2 ? 4 : 2;
  call.shift = random() % 3 == 0 ? 1 + random() % 3 : 0;  // elements off the 16 byte grid
  call.elements = 1 + random() % (call.small ? 100 : 700);
  call.lanes = 1 + random() % kLanes;
  return call;
}

uint32_t payload(int rank, int call, int64_t i, int size) {
  std::mt19937 random(rank * 7919 + call * 104729 + static_cast<int>(i) * 31);
  const float value = (static_cast<float>(random() % 20001) - 10000.0f) * (random() % 7 == 0 ? 1e-6f : 0.37f);
  if (size == 4) return bits_of(random() % 50 == 0 ? -0.0f : value);
  return size == 2 ? round_to_bf16(value) : static_cast<uint8_t>(random());
}

void put(std::vector<char>& to, int64_t i, int shift, uint32_t bits, int size) {
  std::memcpy(to.data() + (i + shift) * size, &bits, size);
}

uint32_t expected_sum(int ranks, int call, int64_t i, const Call& c) {
  int leaves = 1;
  while (leaves < ranks) leaves *= 2;
  std::vector<float> level(leaves, 0.0f);
  for (int r = 0; r < ranks; ++r) {
    const uint32_t bits = payload(r, call, i, c.in_size);
    level[r] = float_of(c.in_size == 4 ? bits : bits << 16);
  }
  for (; level.size() > 1; level.resize(level.size() / 2)) {
    for (size_t j = 0; j < level.size() / 2; ++j) level[j] = level[2 * j] + level[2 * j + 1];
  }
  return c.out_size == 4 ? bits_of(level[0]) : round_to_bf16(level[0]);
}

template <int Size, int Leaves>
void block_thread(const Exchange& task, bool small) {
  if (small) {
    exchange_small_kernel<Size, Leaves>(task);
  } else {
    exchange_kernel<Size, Leaves>(task);
  }
}

void launch(const Exchange& task, bool small) {
  std::vector<std::unique_ptr<std::barrier<>>> barriers;
  std::vector<std::thread> threads;
  const int count = threads_of(task.ranks);
  for (int lane = 0; lane < task.lanes; ++lane) barriers.push_back(std::make_unique<std::barrier<>>(count));
  for (int lane = 0; lane < task.lanes; ++lane) {
    for (int t = 0; t < count; ++t) {
      threads.emplace_back([&, lane, t, count] {
        threadIdx.x = t;
        blockIdx.x = lane;
        blockDim.x = count;
        block_barrier = barriers[lane].get();
        const bool two = task.ranks <= 2, four = task.ranks <= 4;
        if (task.x_size == 2) {
          two ? block_thread<2, 2>(task, small) : four ? block_thread<2, 4>(task, small) : block_thread<2, 8>(task, small);
        } else {
          two ? block_thread<4, 2>(task, small) : four ? block_thread<4, 4>(task, small) : block_thread<4, 8>(task, small);
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

std::atomic<int64_t> wrong{0}, compared{0};

void run_rank(int rank, int ranks, const std::vector<char*>& buffers, const std::vector<Call>& calls) {
  std::mt19937 random(rank);
  std::vector<uint64_t> steps(kLanes, 0);
  for (int number = 0; number < static_cast<int>(calls.size()); ++number) {
    const Call& call = calls[number];
    Exchange task;
    for (int r = 0; r < ranks; ++r) task.buffers[r] = buffers[r];
    task.steps = steps.data();
    task.rank = rank;
    task.ranks = ranks;
    task.mode = call.mode;
    task.x_size = call.in_size;
    task.out_size = call.out_size;
    task.mailbox_items = kItems;
    task.mailbox_offset = kLanes * kFlagStride * 8;
    task.slots_offset = task.mailbox_offset + int64_t{kLanes} * 2 * ranks * kItems * 16;
    task.result_offset = int64_t{kChunk} * 4 * ranks;
    task.slot_bytes = task.result_offset + kChunk * 4;
    task.timeout_ns = 60'000'000'000u;
    const bool scatter = call.mode == kReduceScatter, gather = call.mode == kAllGather;
    const int64_t numel = call.elements * (scatter ? ranks : 1);
    std::vector<char> x((numel + call.shift) * call.in_size + 16), out((call.elements * (gather ? ranks : 1) + 8) * 4, 77);
    for (int64_t i = 0; i < numel; ++i) put(x, i, call.shift, payload(rank, number, i, call.in_size), call.in_size);
    task.x = x.data() + call.shift * call.in_size;
    task.out = out.data();
    if (call.small) {
      task.chunk = call.elements * call.in_size;
      const int64_t items = (task.chunk + 7) / 8;
      const int64_t wanted = std::min<int64_t>(call.lanes, items), share = (items + wanted - 1) / wanted;
      task.lanes = static_cast<int>((items + share - 1) / share);
    } else {
      cut(task, call.elements, kChunk);
      task.lanes = static_cast<int>(std::min<int64_t>(call.lanes, task.pieces));
    }
    if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
    launch(task, call.small);
    const int64_t results = call.elements * (gather ? ranks : 1);
    for (int64_t i = 0; i < results; ++i) {
      uint32_t found = 0;
      std::memcpy(&found, out.data() + i * call.out_size, call.out_size);
      const uint32_t right = gather ? payload(static_cast<int>(i / call.elements), number, i % call.elements, 1)
                                    : expected_sum(ranks, number, i + (scatter ? rank * call.elements : 0), call);
      wrong += found != right;
    }
    wrong += out[results * call.out_size] != 77;  // nothing beyond the end
    compared += results;
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) return 2;
  const int ranks = std::atoi(arguments[1]), number = std::atoi(arguments[2]);
  std::mt19937 random(std::atoi(arguments[3]));
  std::vector<Call> calls;
  for (int i = 0; i < number; ++i) calls.push_back(random_call(random));
  const size_t bytes = kLanes * kFlagStride * 8 + size_t{kLanes} * 2 * ranks * kItems * 16 +
                       size_t{kLanes} * 3 * (size_t{kChunk} * 4 * (ranks + 1));
  std::vector<std::unique_ptr<char[], void (*)(char*)>> memory;
  std::vector<char*> buffers;
  for (int r = 0; r < ranks; ++r) {
    memory.emplace_back(static_cast<char*>(std::aligned_alloc(128, (bytes + 127) / 128 * 128)),
                        [](char* p) { std::free(p); });
    std::memset(memory.back().get(), 0, bytes);
    buffers.push_back(memory.back().get());
  }
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) threads.emplace_back(run_rank, r, ranks, std::cref(buffers), std::cref(calls));
  for (std::thread& thread : threads) thread.join();
  std::printf("ranks %d calls %d compared %lld wrong %lld\n", ranks, number, static_cast<long long>(compared),
              static_cast<long long>(wrong));
  return wrong == 0 ? 0 : 1;
}
