// Schemas and bindings of the portable GPU operators (stable ABI).
#include "exchange.h"

#include <Python.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#if defined(USE_ROCM)  // exported by torch for ROCm as well, declared for CUDA alone
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
#endif

namespace rlk::gpu {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

int element_size(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
  const ScalarType type = tensor.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, name, " must be float32 or bfloat16");
  return type == ScalarType::Float ? 4 : 2;
}

// One call of a group: mode as in exchange.h. chunk 0 means the path of small payloads. buffers: addresses of the
// symmetric buffers in rank order, int64 on the host; steps: [lanes of the buffer] int64, this rank's own.
// layout: (mailbox_offset, mailbox_items, slots_offset, slot_bytes, result_offset), int64 on the host.
void exchange_op(Tensor x, Tensor out, Tensor steps, Tensor buffers, Tensor layout, int64_t rank, int64_t mode, int64_t lanes,
                 int64_t chunk, int64_t threads, int64_t timeout_s) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  Exchange task;
  task.ranks = static_cast<int>(buffers.numel());
  task.rank = static_cast<int>(rank);
  task.mode = static_cast<int>(mode);
  STD_TORCH_CHECK(task.ranks >= 2 && task.ranks <= kMaxRanks && rank >= 0 && rank < task.ranks,
                  "peer_exchange serves 2 to 8 ranks");
  STD_TORCH_CHECK(x.is_cuda() && out.is_cuda() && steps.is_cuda() && !buffers.is_cuda() && !layout.is_cuda(),
                  "x, out and steps must be on the GPU, buffers and layout on the host");
  STD_TORCH_CHECK(steps.scalar_type() == ScalarType::Long && buffers.scalar_type() == ScalarType::Long &&
                      layout.scalar_type() == ScalarType::Long && layout.numel() == 5,
                  "steps, buffers and layout must be int64");
  const int64_t* addresses = static_cast<const int64_t*>(buffers.data_ptr());
  for (int r = 0; r < task.ranks; ++r) task.buffers[r] = reinterpret_cast<char*>(addresses[r]);
  const int64_t* places = static_cast<const int64_t*>(layout.data_ptr());
  task.mailbox_offset = places[0];
  task.mailbox_items = static_cast<int>(places[1]);
  task.slots_offset = places[2];
  task.slot_bytes = places[3];
  task.result_offset = places[4];
  task.steps = static_cast<uint64_t*>(steps.data_ptr());
  task.x = x.data_ptr();
  task.out = out.data_ptr();
  task.lanes = static_cast<int>(lanes);
  task.timeout_ns = static_cast<uint64_t>(timeout_s) * 1000000000u;
  STD_TORCH_CHECK(lanes >= 1 && lanes <= steps.numel() && threads >= 32 && threads <= 512, "lanes or threads");

  const int64_t ranks = task.ranks, numel = x.numel();
  STD_TORCH_CHECK(numel > 0, "x is empty");
  int64_t elements = numel;  // of a slice
  if (mode == kAllGather) {
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::Byte && out.scalar_type() == ScalarType::Byte && x.is_contiguous() &&
                        out.is_contiguous() && out.numel() == ranks * numel,
                    "all_gather moves bytes: out must be [ranks, *x.shape]");
    task.x_size = task.out_size = 1;
  } else {
    STD_TORCH_CHECK(mode >= kAllReduceWhole && mode <= kReduceScatter, "mode");
    task.x_size = element_size(x, "x");
    task.out_size = element_size(out, "out");
    if (mode == kReduceScatter) elements = numel / ranks;
    STD_TORCH_CHECK(out.numel() == elements && (mode != kReduceScatter || numel % ranks == 0), "out has the wrong size");
  }
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  int status = 0;
  if (chunk == 0) {
    task.chunk = elements * task.x_size;
    const int64_t items = (task.chunk + 7) / 8, share = (items + lanes - 1) / lanes;
    STD_TORCH_CHECK(mode != kAllReduceSliced && share <= task.mailbox_items && (lanes - 1) * share < items,
                    "the mailbox is too small, or a lane has nothing to do");
    status = exchange_small(task, static_cast<int>(threads), stream);
  } else {
    const bool sliced = mode == kAllReduceSliced, scatter = mode == kReduceScatter;
    STD_TORCH_CHECK(chunk > 0 && chunk % 16 == 0, "chunk must be a multiple of 16 elements");
    cut(task, elements, chunk);
    STD_TORCH_CHECK(chunk * task.x_size * (sliced || scatter ? ranks : 1) <= task.result_offset &&
                        (!sliced || chunk * task.out_size <= task.slot_bytes - task.result_offset),
                    "the slot is too small");
    STD_TORCH_CHECK(lanes <= task.pieces, "a lane has nothing to do");
    status = exchange(task, static_cast<int>(threads), stream);
  }
  STD_TORCH_CHECK(status == 0, "peer_exchange: ", error_name(status));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rlk, m) {
  m.def(
      "peer_exchange(Tensor x, Tensor(a!) out, Tensor(b!) steps, Tensor buffers, Tensor layout, int rank, int mode,"
      " int lanes, int chunk, int threads, int timeout_s) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rlk, CUDA, m) { m.impl("peer_exchange", TORCH_BOX(&exchange_op)); }

}  // namespace rlk::gpu

#if defined(USE_ROCM)  // with CUDA, csrc/sm90 defines the module
extern "C" PyMODINIT_FUNC PyInit__C_gpu(void) {
  static struct PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C_gpu", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
#endif
