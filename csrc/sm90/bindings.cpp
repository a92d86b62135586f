// Schemas and bindings of the Hopper kernels (stable ABI). Outputs are arguments, so that callers own all memory; the
// whole operator linear_logp is in linear_logp.cpp.
#include "tensors.h"

#include <Python.h>
#include <torch/csrc/stable/library.h>

namespace rlk::sm90 {
namespace {

void prepare_op(Tensor hidden, Tensor targets, Maybe temperatures, int64_t ignore, double absent, Tensor active, Tensor order,
                Tensor picked_targets, Tensor place, Maybe picked_temperatures, Tensor target_logit, Tensor picked,
                Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(hidden.get_device_index());
  Prepare task;
  task.hidden = matrix(hidden, "hidden");
  task.tokens = hidden.size(0);
  task.ignore = ignore;
  task.absent = static_cast<float>(absent);
  task.targets = data<int64_t>(targets, "targets", ScalarType::Long);
  task.temperatures = floats(temperatures, "temperatures");
  task.active = data<int>(active, "active", ScalarType::Int);
  task.counters = static_cast<int>(active.numel());
  task.order = data<int64_t>(order, "order", ScalarType::Long);
  task.picked_targets = data<int64_t>(picked_targets, "picked_targets", ScalarType::Long);
  task.place = data<int>(place, "place", ScalarType::Int);
  task.picked_temperatures = floats(picked_temperatures, "picked_temperatures");
  task.target_logit = floats(target_logit, "target_logit");
  task.picked = data<void>(picked, "picked", ScalarType::BFloat16);
  task.out = floats(out, "out");
  const int64_t tokens = task.tokens;
  STD_TORCH_CHECK(targets.numel() == tokens && order.numel() == tokens && picked_targets.numel() == tokens &&
                      place.numel() == tokens && target_logit.numel() == tokens && out.numel() == 5 * tokens &&
                      picked.numel() == hidden.numel() && hidden.size(1) % 8 == 0 && task.counters >= 1 &&
                      task.counters <= 256 && temperatures.has_value() == picked_temperatures.has_value(),
                  "prepare: one value a row, hidden states of a multiple of 8, at most 256 counters");
  prepare(task, stream_of(hidden));
}

void statistics_op(Tensor hidden, Tensor weight, Tensor targets, Maybe temperatures, int64_t start, int64_t columns,
                   Maybe active, int64_t skipped, Tensor counter, Tensor stats, Tensor target_logit, Maybe kept) {
  const torch::stable::accelerator::DeviceGuard guard(hidden.get_device_index());
  const int64_t tokens = hidden.size(0);
  STD_TORCH_CHECK(!kept.has_value() || (kept->dim() == 2 && kept->size(0) == tokens &&
                                        (kept->size(1) == columns ||
                                         (kept->size(1) < columns && kept->size(1) % 256 == 0 && hidden.size(1) > 256))),
                  "kept must be [T, columns], or hold whole tiles of 256 of the first ones (H above 256)");
  Rows rows = rows_of(targets, temperatures, start, columns, tokens);
  leaves_of(rows, stats, tokens);
  active_of(rows, active, skipped);
  rows.target_logit = floats(target_logit, "target_logit");
  statistics(matrix(hidden, "hidden"), matrix(weight, "weight"), rows, kept.has_value() ? matrix(*kept, "kept") : Matrix{},
             counter_of(counter), stream_of(hidden));
}

void gradient_op(Tensor kept, Tensor stats, Tensor targets, Maybe temperatures, int64_t start, Tensor results, Maybe grad_logp,
                 Maybe grad_lse, Maybe grad_entropy, Tensor order, Maybe active, int64_t skipped) {
  const torch::stable::accelerator::DeviceGuard guard(kept.get_device_index());
  const int64_t tokens = kept.size(0);
  Rows rows = rows_of(targets, temperatures, start, kept.size(1), tokens);
  leaves_of(rows, stats, tokens);
  active_of(rows, active, skipped);
  Upstream upstream = upstream_of(results, grad_logp, grad_lse, grad_entropy);
  STD_TORCH_CHECK(order.numel() == tokens, "order must have one value a slot");
  upstream.order = data<int64_t>(order, "order", ScalarType::Long);
  gradient_in_place(rows, upstream, matrix(kept, "kept"), stream_of(kept));
}

void place_op(Tensor values, Tensor place, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(values.get_device_index());
  STD_TORCH_CHECK(out.dim() == 2 && out.size(1) % 8 == 0 && values.dim() == 2 && values.size(1) == out.size(1) &&
                      place.numel() == out.size(0) && out.is_contiguous(),
                  "out must be [T, H] with H a multiple of 8, like values");
  place_rows(floats(values, "values"), data<int>(place, "place", ScalarType::Int), matrix(out, "out"), stream_of(values));
}

void backward_op(Tensor dlogits, Tensor weight, Tensor hidden, Tensor counter, int64_t first_column, int64_t columns, Maybe dh,
                 Maybe order, Maybe dw, Maybe dw_init, Maybe active, int64_t skipped) {
  const torch::stable::accelerator::DeviceGuard guard(hidden.get_device_index());
  Backward task;
  task.dlogits = matrix(dlogits, "dlogits");
  task.weight = matrix(weight, "weight");
  task.hidden = matrix(hidden, "hidden");
  task.first_column = first_column;
  task.columns = columns;
  STD_TORCH_CHECK(first_column >= 0 && columns > 0 && first_column + columns <= dlogits.size(1) &&
                      (columns % 64 == 0 || first_column + columns == dlogits.size(1)),
                  "a segment of columns must be a multiple of 64 or reach the end");
  task.dh = floats(dh, "dh");
  task.order = data<int>(order, "order", ScalarType::Int);
  STD_TORCH_CHECK(!dh.has_value() || (order.has_value() &&
                                      order->numel() >= (hidden.size(0) + 255) / 256 * ((hidden.size(1) + 255) / 256) * 4),
                  "order must hold 4 zeros for each 256 x 256 of dh");
  if (dw.has_value()) {
    const bool wide = dw->scalar_type() == ScalarType::Float;
    task.dw = wide ? static_cast<void*>(floats(*dw, "dw")) : data<void>(*dw, "dw", ScalarType::BFloat16);
    task.dw_output = wide ? 1 : 0;
  }
  task.dw_init = floats(dw_init, "dw_init");
  task.active = data<int>(active, "active", ScalarType::Int);
  task.skipped = static_cast<int>(skipped);
  backward(task, counter_of(counter), stream_of(hidden));
}

void merge_op(Tensor stats, Tensor target_logit, Maybe active, int64_t skipped, Maybe order, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(stats.get_device_index());
  Rows rows;
  leaves_of(rows, stats, stats.size(1));
  active_of(rows, active, skipped);
  rows.target_logit = floats(target_logit, "target_logit");
  STD_TORCH_CHECK(out.dim() == 2 && out.size(0) == 5, "out must be [5, T]");
  merge(rows, stats.size(1), data<int64_t>(order, "order", ScalarType::Long), floats(out, "out"), out.size(1),
        stream_of(stats));
}

void nodes_op(Tensor stats, Tensor m, Tensor ranges, Tensor nodes) {
  const torch::stable::accelerator::DeviceGuard guard(stats.get_device_index());
  Rows rows;
  leaves_of(rows, stats, stats.size(1));
  const int count = static_cast<int>(ranges.size(0));
  STD_TORCH_CHECK(nodes.size(0) >= count, "nodes must have a slot for each range");
  tree_nodes(rows, floats(m, "m"), data<int>(ranges, "ranges", ScalarType::Int), count, floats(nodes, "nodes"), stats.size(1),
             stream_of(stats));
}

void finish_op(Tensor nodes, Tensor merges, int64_t root, Tensor m, Tensor target_logit, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(nodes.get_device_index());
  const int count = static_cast<int>(merges.size(0));
  finish(floats(nodes, "nodes"), static_cast<int>(nodes.size(0)) - count, data<int>(merges, "merges", ScalarType::Int), count,
         static_cast<int>(root), floats(m, "m"), floats(target_logit, "target_logit"), floats(out, "out"), nodes.size(2),
         stream_of(nodes));
}

void logits_op(Tensor logits, Maybe targets, Maybe temperatures, int64_t columns, Tensor stats, Maybe target_logit) {
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  const int64_t tokens = logits.size(0);
  Rows rows = rows_of(targets, temperatures, 0, columns, tokens);
  leaves_of(rows, stats, tokens);
  rows.target_logit = floats(target_logit, "target_logit");
  STD_TORCH_CHECK(rows.targets == nullptr || rows.target_logit != nullptr, "targets need target_logit");
  logits_statistics(rows, matrix(logits, "logits", ScalarType::Float), stream_of(logits));
}

void few_rows_op(Tensor x, Tensor w, int64_t segments, int64_t rows, int64_t per_processor, bool dependent, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const bool wide = out.scalar_type() == ScalarType::Float;
  void* to = wide ? static_cast<void*>(floats(out, "out")) : data<void>(out, "out", ScalarType::BFloat16);
  STD_TORCH_CHECK(
      x.size(0) <= 128 && x.size(1) == w.size(1) && out.size(0) == x.size(0) && out.size(1) == w.size(0) && w.size(0) % 8 == 0,
      "few_rows: x [M, K] with M up to 128, w [N, K], out [M, N], N a multiple of 8");
  STD_TORCH_CHECK(
      (segments == 1 || segments == 2 || segments == 4 || segments == 8) && x.size(1) > 0 && x.size(1) % (segments * 256) == 0,
      "few_rows: 1, 2, 4 or 8 segments, each a multiple of 256");
  STD_TORCH_CHECK((rows == 32 || (rows == 64 && segments == 1)) && (per_processor == 1 || per_processor == 2),
                  "few_rows: 32 rows of w a tile (64 for one segment too), 1 or 2 blocks a processor");
  few_rows(matrix(x, "x"), matrix(w, "w"), static_cast<int>(segments), to, wide,
           {static_cast<int>(rows), static_cast<int>(per_processor), dependent}, stream_of(x));
}

void library_op(Tensor x, Tensor w, int64_t id, int64_t tile, int64_t swizzle, int64_t custom, int64_t stages, int64_t inner,
                int64_t cluster, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  void* to = data<void>(out, "out", ScalarType::BFloat16);
  STD_TORCH_CHECK(x.dim() == 2 && w.dim() == 2 && out.dim() == 2 && x.size(1) == w.size(1) && out.size(0) == x.size(0) &&
                      out.size(1) == w.size(0) && out.numel() > 0 && x.size(1) > 0,
                  "library: x [M, K], w [N, K], out [M, N], none of them empty");
  const auto value = [](int64_t attribute) { return static_cast<uint32_t>(attribute); };
  library_product(
      matrix(x, "x"), matrix(w, "w"), to,
      {static_cast<int>(id), value(tile), value(swizzle), value(custom), value(stages), value(inner), value(cluster)},
      static_cast<int>(x.get_device_index()), stream_of(x));
}

void segments_op(Tensor a, Tensor b, bool transposed, int64_t count, int64_t parts, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  const bool wide = out.scalar_type() == ScalarType::Float;
  void* to = wide ? static_cast<void*>(floats(out, "out")) : data<void>(out, "out", ScalarType::BFloat16);
  const int64_t depth = b.size(transposed ? 0 : 1), columns = b.size(transposed ? 1 : 0);
  STD_TORCH_CHECK(
      a.size(1) == depth && out.dim() == 2 && out.size(0) == a.size(0) && out.size(1) == columns && columns % 8 == 0,
      "segments: a [M, K], b [N, K] or transposed [K, N], out [M, N], N a multiple of 8");
  STD_TORCH_CHECK((count == 2 || count == 4 || count == 8) && parts >= 1 && depth > 0 && depth % (count * parts * 64) == 0,
                  "segments: 2, 4 or 8 segments, whose slice of each part is a multiple of 64");
  segments(matrix(a, "a"), matrix(b, "b"), transposed, static_cast<int>(count), static_cast<int>(parts), to, wide,
           stream_of(a));
}

void exp_op(Tensor x, Tensor y) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  elementwise(floats(x, "x"), floats(y, "y"), x.numel(), false, stream_of(x));
}

void log_op(Tensor x, Tensor y) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  elementwise(floats(x, "x"), floats(y, "y"), x.numel(), true, stream_of(x));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rlk, m) {
  m.def(
      "sm90_prepare(Tensor hidden, Tensor targets, Tensor? temperatures, int ignore, float absent, Tensor(a!) active,"
      " Tensor(b!) order, Tensor(c!) picked_targets, Tensor(d!) place, Tensor(e!)? picked_temperatures,"
      " Tensor(f!) target_logit, Tensor(g!) picked, Tensor(h!) out) -> ()");
  m.def(
      "sm90_statistics(Tensor hidden, Tensor weight, Tensor targets, Tensor? temperatures, int start, int columns,"
      " Tensor? active, int skipped, Tensor(a!) counter, Tensor(b!) stats, Tensor(c!) target_logit,"
      " Tensor(d!)? kept) -> ()");
  m.def(
      "sm90_gradient_(Tensor(a!) kept, Tensor stats, Tensor targets, Tensor? temperatures, int start, Tensor results,"
      " Tensor? grad_logp, Tensor? grad_lse, Tensor? grad_entropy, Tensor order, Tensor? active, int skipped) -> ()");
  m.def("sm90_place(Tensor values, Tensor place, Tensor(a!) out) -> ()");
  m.def(
      "sm90_backward(Tensor dlogits, Tensor weight, Tensor hidden, Tensor(a!) counter, int first_column, int columns,"
      " Tensor(b!)? dh, Tensor(c!)? order, Tensor(d!)? dw, Tensor? dw_init, Tensor? active, int skipped) -> ()");
  m.def(
      "sm90_merge(Tensor stats, Tensor target_logit, Tensor? active, int skipped, Tensor? order, Tensor(a!) out)"
      " -> ()");
  m.def("sm90_tree_nodes(Tensor stats, Tensor m, Tensor ranges, Tensor(a!) nodes) -> ()");
  m.def("sm90_finish(Tensor(a!) nodes, Tensor merges, int root, Tensor m, Tensor target_logit, Tensor(b!) out) -> ()");
  m.def(
      "sm90_logits_statistics(Tensor logits, Tensor? targets, Tensor? temperatures, int columns, Tensor(a!) stats,"
      " Tensor(b!)? target_logit) -> ()");
  m.def(
      "sm90_few_rows(Tensor x, Tensor w, int segments, int rows, int per_processor, bool dependent, Tensor(a!) out)"
      " -> ()");
  m.def(
      "sm90_library(Tensor x, Tensor w, int id, int tile, int swizzle, int custom, int stages, int inner, int cluster,"
      " Tensor(a!) out) -> ()");
  m.def("sm90_segments(Tensor a, Tensor b, bool transposed, int segments, int parts, Tensor(a!) out) -> ()");
  m.def("sm90_exp(Tensor x, Tensor(a!) y) -> ()");
  m.def("sm90_log(Tensor x, Tensor(a!) y) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rlk, CUDA, m) {
  m.impl("sm90_prepare", TORCH_BOX(&prepare_op));
  m.impl("sm90_place", TORCH_BOX(&place_op));
  m.impl("sm90_statistics", TORCH_BOX(&statistics_op));
  m.impl("sm90_gradient_", TORCH_BOX(&gradient_op));
  m.impl("sm90_backward", TORCH_BOX(&backward_op));
  m.impl("sm90_merge", TORCH_BOX(&merge_op));
  m.impl("sm90_logits_statistics", TORCH_BOX(&logits_op));
  m.impl("sm90_tree_nodes", TORCH_BOX(&nodes_op));
  m.impl("sm90_finish", TORCH_BOX(&finish_op));
  m.impl("sm90_few_rows", TORCH_BOX(&few_rows_op));
  m.impl("sm90_library", TORCH_BOX(&library_op));
  m.impl("sm90_segments", TORCH_BOX(&segments_op));
  m.impl("sm90_exp", TORCH_BOX(&exp_op));
  m.impl("sm90_log", TORCH_BOX(&log_op));
}

}  // namespace rlk::sm90

// An empty module: importing rl_kernel._C_gpu loads the library, which registers the operators above.
extern "C" PyMODINIT_FUNC PyInit__C_gpu(void) {
  static struct PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C_gpu", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
