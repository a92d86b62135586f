// linear_logp on Hopper as two operators, one for each direction: what they allocate and launch, without Python between.
#include "tensors.h"
#include "token_loss.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

namespace rlk::sm90 {
namespace {

constexpr int64_t kCounters = 64, kLeafColumns = 128, kTileColumns = 256;
constexpr int64_t kBlockColumns = 16384;  // a block of the chains of dh
constexpr int64_t kSeparate = 1320;                       // 20 rounds of the 66 clusters of an H100 or H200

int64_t up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// The rows that take part ("slots"), as the memory of both operators holds them:
//   ints  [64 + T]: the number of rows that take part, zeros (counters of launches); slot of each row or -1
//   longs [2, T]:   row of each slot; its target
//   reals [10, T]:  8 values a slot for gradients of logits (row_table); temperature; z of the target
struct Slots {
  int64_t tokens;
  int *active, *place;
  int64_t *order, *targets;
  float *table, *temperatures, *target_logit;

  Slots(const Tensor& ints, const Tensor& longs, const Tensor& reals, int64_t tokens, bool tempered) : tokens(tokens) {
    STD_TORCH_CHECK(ints.numel() == kCounters + tokens && longs.numel() == 2 * tokens && reals.numel() == 10 * tokens,
                    "slots: sizes do not fit ", tokens, " tokens");
    active = data<int>(ints, "ints", ScalarType::Int);
    place = active + kCounters;
    order = data<int64_t>(longs, "longs", ScalarType::Long);
    targets = order + tokens;
    table = floats(reals, "reals");
    temperatures = tempered ? table + 8 * tokens : nullptr;
    target_logit = table + 9 * tokens;
  }

  Rows rows(int64_t start, int64_t columns) const {
    Rows rows;
    rows.targets = targets;
    rows.temperatures = temperatures;
    rows.start = start;
    rows.columns = static_cast<int>(columns);
    rows.target_logit = target_logit;
    rows.table = table;
    rows.active = active;
    return rows;
  }
};

Matrix first_rows(Matrix matrix, int64_t first, int64_t count) {
  matrix.data = static_cast<char*>(matrix.data) + first * matrix.stride * 2;
  matrix.rows = count;
  return matrix;
}

Matrix first_columns(Matrix matrix, int64_t first, int64_t count) {
  matrix.data = static_cast<char*>(matrix.data) + first * 2;
  matrix.cols = count;
  return matrix;
}

// out [5, T] (logp, lse, entropy, m, log l; the last step only with `whole`, where all of the vocabulary is here),
// ints, longs, reals (Slots), hidden states by slot [T, H] (not written where all rows take part: `hidden` is read instead,
// here and in the backward operator), leaf statistics [3, T, L], and bf16 exp(z - m_leaf) of the first `keep` columns [T, keep
// rounded up to 8], for 0 of them [0, 0].
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward_op(Tensor hidden, Tensor weight, Tensor targets,
                                                                              Maybe temperatures, int64_t start,
                                                                              int64_t columns, int64_t ignore, double absent,
                                                                              int64_t keep, bool whole) {
  const torch::stable::accelerator::DeviceGuard guard(hidden.get_device_index());
  const int64_t tokens = hidden.size(0), width = hidden.size(1), leaves = up(columns, kLeafColumns) / kLeafColumns;
  Matrix head = matrix(weight, "weight");
  STD_TORCH_CHECK(width % 8 == 0 && head.cols == width && columns >= 0 && columns <= head.rows,
                  "hidden must be [T, H] and weight [>= columns, H] with H a multiple of 8");
  STD_TORCH_CHECK(keep == columns || keep == 0 || (keep > 0 && keep < columns && keep % kTileColumns == 0 && width > 256),
                  "keep: all columns, none, or whole tiles of 256 of the first ones (H above 256)");
  STD_TORCH_CHECK(targets.numel() == tokens, "targets must have one value a row");
  STD_TORCH_CHECK(!temperatures.has_value() || temperatures->numel() == tokens, "temperatures: one value a row");
  const int32_t real = aoti_torch_dtype_float32(), half = aoti_torch_dtype_bfloat16();
  Tensor ints = new_tensor(hidden, aoti_torch_dtype_int32(), {kCounters + tokens});
  Tensor longs = new_tensor(hidden, aoti_torch_dtype_int64(), {2, tokens});
  Tensor reals = new_tensor(hidden, real, {10, tokens});
  Tensor picked = new_tensor(hidden, half, {tokens, width});
  Tensor out = new_tensor(hidden, real, {5, tokens});
  const Slots slots(ints, longs, reals, tokens, temperatures.has_value());
  const cudaStream_t stream = stream_of(hidden);

  Prepare task;
  task.hidden = matrix(hidden, "hidden");
  task.tokens = tokens;
  task.ignore = ignore;
  task.absent = static_cast<float>(absent);
  task.targets = data<int64_t>(targets, "targets", ScalarType::Long);
  task.temperatures = floats(temperatures, "temperatures");
  task.active = slots.active;
  task.counters = static_cast<int>(kCounters);
  task.order = slots.order;
  task.picked_targets = slots.targets;
  task.place = slots.place;
  task.picked_temperatures = slots.temperatures;
  task.target_logit = slots.target_logit;
  task.picked = picked.data_ptr();
  task.whole = true;
  task.out = floats(out, "out");
  prepare(task, stream);

  // The GPU works on the first kernel while the large tensors are allocated.
  Tensor stats = new_tensor(hidden, real, {3, tokens, leaves});
  Tensor kept = new_tensor(hidden, half, {keep > 0 ? tokens : 0, up(keep, 8)});
  Rows rows = slots.rows(start, columns);
  rows.whole = task.hidden;
  leaves_of(rows, stats, tokens);
  head.rows = columns;
  Matrix values{};
  if (keep > 0) values = {kept.data_ptr(), tokens, keep, up(keep, 8)};
  statistics({picked.data_ptr(), tokens, width, width}, head, rows, values, slots.active + 1, stream);
  if (whole) merge(rows, tokens, slots.order, floats(out, "out"), tokens, stream);
  return {out, ints, longs, reals, picked, stats, kept};
}

// Balanced tree of sums [T, H] that arrive in order.
class Tree {
 public:
  explicit Tree(cudaStream_t stream) : stream_(stream) {}

  void push(Tensor sum, int64_t size = 1) {
    for (; !finished_.empty() && finished_.back().first == size; size *= 2) {
      Tensor left = take();
      accumulate(floats(left, "sum"), floats(sum, "sum"), left.numel(), stream_);
      sum = left;
    }
    finished_.emplace_back(size, sum);
  }
  Tensor take() {
    Tensor sum = finished_.back().second;
    finished_.pop_back();
    return sum;
  }

 private:
  cudaStream_t stream_;
  std::vector<std::pair<int64_t, Tensor>> finished_;
};

// Gradients. kept: as above, becomes the gradient of its columns' logits, with their statistics `stats` [3, T, leaves]. The
// logits of other columns are made again, a chunk of whole blocks of columns at a time: in the memory of `kept`, without it
// within `workspace` bytes. Kept columns end with a block of a segment or with a segment. The gradient of the hidden states
// is a tree over `segments` (a power of two) of `segment_columns` columns each, the last ones possibly cut off or empty. dw
// [>= columns, H] bf16, or fp32 to which the gradient is added; rows after `columns` are not written. Returns the gradient of
// the hidden states: fp32 sums by slot, or bf16 by row; [0] unless need_hidden.
Tensor backward_op(Tensor weight, Tensor picked, Maybe whole, Maybe kept, Maybe stats, Tensor ints, Tensor longs, Tensor reals,
                   Tensor out, Maybe grad_logp, Maybe grad_lse, Maybe grad_entropy, int64_t start, int64_t columns,
                   int64_t segments, int64_t segment_columns, bool tempered, bool need_hidden, bool by_row, Maybe dw,
                   int64_t workspace) {
  const torch::stable::accelerator::DeviceGuard guard(picked.get_device_index());
  const int64_t tokens = picked.size(0), width = picked.size(1);
  const Matrix head = matrix(weight, "weight"), hidden = matrix(picked, "picked");
  STD_TORCH_CHECK(tokens > 0 && columns > 0 && columns <= head.rows && head.cols == width && out.numel() == 5 * tokens,
                  "linear_logp backward: sizes do not fit");
  STD_TORCH_CHECK(!dw.has_value() || (dw->dim() == 2 && dw->size(0) >= columns && dw->size(1) == width),
                  "dw must be [>= columns, H]");
  STD_TORCH_CHECK(segments > 0 && (segments & (segments - 1)) == 0 && segment_columns * segments >= columns &&
                      (segments == 1 || segment_columns % kLeafColumns == 0),
                  "segments: a power of two of them, each a multiple of 128 columns, that cover all columns");
  const int32_t real = aoti_torch_dtype_float32(), half = aoti_torch_dtype_bfloat16();
  const Slots slots(ints, longs, reals, tokens, tempered);
  const cudaStream_t stream = stream_of(picked);
  const int64_t kept_columns = kept.has_value() ? std::min(kept->size(1), columns) : 0;
  const int64_t available = (workspace - 4 * tokens * width) / (2 * tokens);
  // As many as the memory holds: fewer than a block where kept columns end with a segment shorter than that.
  const int64_t step =
      kept.has_value() && kept_columns < kBlockColumns
          ? std::max<int64_t>(1, kept_columns)
          : std::max<int64_t>(1, (kept.has_value() ? kept_columns : available) / kBlockColumns) * kBlockColumns;
  const auto border = [&](int64_t segment) { return std::min(segment * segment_columns, columns); };
  // Where the chunk of a segment that starts with column `first` ends: kept columns are one chunk.
  const auto chunk_end = [&](int64_t first, int64_t segment_end) {
    return std::min(first < kept_columns ? kept_columns : first + step, segment_end);
  };
  int64_t chunks = 0;
  for (int64_t i = 0; i < segments; ++i) {
    for (int64_t first = border(i); first < border(i + 1); first = chunk_end(first, border(i + 1))) {
      STD_TORCH_CHECK(!need_hidden || (first - border(i)) % kBlockColumns == 0,
                      "kept columns must end with a block or a segment");
      ++chunks;
    }
  }
  // Gradients of kept logits are made beside the products of dh; those by entropy, which take a logarithm each, in front.
  const bool beside = kept_columns > 0 && need_hidden && !grad_entropy.has_value();
  const int64_t orders = 4 * (up(tokens, 256) / 256) * (up(width, 256) / 256);
  const int64_t jobs = beside ? kept_jobs(tokens, kept_columns) : 0;
  Tensor counters = new_tensor(picked, aoti_torch_dtype_int32(), {chunks * (4 + orders + jobs)});
  int* counter = data<int>(counters, "counters", ScalarType::Int);
  int* job_counts = counter + chunks * (4 + orders);

  Upstream upstream = upstream_of(out, grad_logp, grad_lse, grad_entropy);
  upstream.order = slots.order;
  upstream.zeros = counter;
  upstream.zero_count = chunks * (4 + orders);
  // A chain of blocks may end as bf16 by row, a tree of segments is rounded at the end.
  const bool direct = need_hidden && by_row && segments == 1 && rounds_directly(tokens, columns);
  Tensor rounded;
  if (direct) {
    rounded = new_tensor(picked, half, {tokens, width});
    upstream.zero_rows = matrix(rounded, "rounded");
    upstream.place = slots.place;
  }
  Rows rows = slots.rows(start, columns);
  if (whole.has_value()) {
    rows.whole = matrix(*whole, "whole");
    STD_TORCH_CHECK(rows.whole.rows == tokens && rows.whole.cols == width, "whole must be [T, H]");
  }
  Matrix buffer{};
  Tensor own_buffer;
  if (kept.has_value()) {
    STD_TORCH_CHECK(kept->size(0) == tokens && kept->size(1) == up(kept_columns, 8) && stats.has_value() && stats->dim() == 3 &&
                        stats->size(1) == tokens && stats->size(2) >= up(kept_columns, kLeafColumns) / kLeafColumns,
                    "kept logits must be [T, columns rounded up to 8], with [3, T, L] statistics");
    buffer = {data<void>(*kept, "kept", ScalarType::BFloat16), tokens, kept_columns, up(kept_columns, 8)};
    leaves_of(rows, *stats, tokens);
    rows.columns = static_cast<int>(kept_columns);
    if (!beside) gradient_in_place(rows, upstream, buffer, stream);
  }
  if (!beside && kept_columns < columns) {
    row_table(rows, upstream, tokens, slots.table, stream);
  }
  if (kept_columns < columns) {
    if (!kept.has_value()) {
      own_buffer = new_tensor(picked, half, {tokens * up(std::min({step, columns, segment_columns}), 8)});
      buffer.data = own_buffer.data_ptr();
    }
  }

  Backward task;
  task.hidden = hidden;
  task.whole = rows.whole;
  task.active = slots.active;
  const bool wide = dw.has_value() && dw->scalar_type() == ScalarType::Float;
  char* weight_gradient = !dw.has_value() ? nullptr
                          : wide          ? static_cast<char*>(static_cast<void*>(floats(*dw, "dw")))
                                          : data<char>(*dw, "dw", ScalarType::BFloat16);
  task.dw_output = wide ? 2 : 0;
  Rows part;
  Tree tree(stream);
  for (int64_t segment = 0; segment < segments; ++segment) {
    const int64_t begin = border(segment), end = border(segment + 1);
    // The right one of two neighbours is added to the left one by its product where it is a single block.
    const bool joins = need_hidden && segment % 2 == 1 && end > begin && end - begin <= std::min(kBlockColumns, step);
    Tensor total;
    float* sums = nullptr;
    if (need_hidden) {
      total = joins ? tree.take() : new_tensor(picked, real, {tokens, width});
      sums = floats(total, "dh");
      if (end == begin && cudaMemsetAsync(sums, 0, static_cast<size_t>(total.numel()) * 4, stream) != cudaSuccess) {
        throw std::runtime_error("linear_logp backward: memory could not be set to zero");
      }
    }
    for (int64_t first = begin, next; first < end; first = next, counter += 4 + orders) {
      next = chunk_end(first, end);
      const int64_t count = next - first;
      task.weight = first_rows(head, first, count);
      task.kept = nullptr;
      if (first < kept_columns) {
        task.dlogits = first_columns(buffer, first, count);
        if (beside) {
          part = rows;
          part.start = start + first;
          part.leaf_max = rows.leaf_max + first / kLeafColumns;
          task.kept = &part;
          task.upstream = &upstream;
          task.table = slots.table;
          task.jobs = job_counts;
          job_counts += jobs;
        }
      } else {
        STD_TORCH_CHECK(!kept.has_value() || up(count, 8) <= kept->size(1), "kept logits: no room for those made again");
        task.dlogits = {buffer.data, tokens, count, up(count, 8)};
        rows.start = start + first;
        rows.columns = static_cast<int>(count);
        recompute(hidden, task.weight, rows, task.dlogits, counter, stream);
      }
      char* own = weight_gradient == nullptr ? nullptr : weight_gradient + first * width * (wide ? 4 : 2);
      task.columns = count;
      task.dh_continues = joins || first > begin;
      task.rounded = direct && next == columns ? rounded.data_ptr() : nullptr;
      task.row_of = slots.order;
      task.order = counter + 4;
      // Few tiles of dh leave processors idle at the end: tiles of dw fill them. Many do not.
      if (sums != nullptr && own != nullptr && orders / 4 * ((count + kBlockColumns - 1) / kBlockColumns) > kSeparate) {
        task.dh = sums, task.dw = nullptr;
        backward(task, counter + 1, stream);
        task.kept = nullptr;
        task.dh = nullptr, task.dw = own;
        backward(task, counter + 2, stream);
      } else if (sums != nullptr || own != nullptr) {
        task.dh = sums, task.dw = own;
        backward(task, counter + 1, stream);
      }
      upstream.zero_count = 0;  // the first kernel in front has set the zeros of all chunks
      upstream.zero_rows = {};
    }
    if (need_hidden) tree.push(total, joins ? 2 : 1);
  }
  if (direct) return rounded;
  Tensor dh = need_hidden ? tree.take() : new_tensor(picked, real, {0, 0});
  if (!need_hidden || !by_row) return dh;
  rounded = new_tensor(picked, half, {tokens, width});
  place_rows(floats(dh, "dh"), slots.place, matrix(rounded, "rounded"), stream);
  return rounded;
}

// Of the clipped policy-gradient loss of out [5, T]: its value [], its gradients by logp [T] and, with entropy_weight, by
// entropy [T, else 0], and sums of metrics [5] (TokenTerms). normalizer: one fp32 value on the GPU, else `scale` divides,
// without either the number of rows that take part, up to 2^24 all exact in fp32. ints: of the forward operator.
std::tuple<Tensor, Tensor, Tensor, Tensor> token_loss_op(Tensor out, Tensor ints, Tensor targets, int64_t ignore,
                                                         Tensor old_logp, Tensor advantages, Maybe mask, Maybe normalizer,
                                                         std::optional<double> scale, double low, double high,
                                                         double entropy_weight) {
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  STD_TORCH_CHECK(out.dim() == 2 && out.size(0) == 5, "out must be [5, T]");
  const int64_t tokens = out.size(1);
  STD_TORCH_CHECK(tokens > 0 && ints.numel() == kCounters + tokens && targets.numel() == tokens && old_logp.numel() == tokens &&
                      advantages.numel() == tokens && (!mask.has_value() || mask->numel() == tokens),
                  "ints, targets, old_logp, advantages and mask must have one value a row, and there must be rows");
  STD_TORCH_CHECK(!normalizer.has_value() || normalizer->numel() == 1, "normalizer must be one value");
  STD_TORCH_CHECK(normalizer.has_value() || scale.has_value() || (!mask.has_value() && tokens <= (1 << 24)),
                  "a number of rows divides only where it is the sum of their weights, at most 2^24");
  const bool with_entropy = entropy_weight != 0.0;
  const int32_t real = aoti_torch_dtype_float32();
  Tensor total = new_tensor(out, real, {}), metrics = new_tensor(out, real, {kTokenMetrics});
  Tensor by_logp = new_tensor(out, real, {tokens}), by_entropy = new_tensor(out, real, {with_entropy ? tokens : 0});
  TokenLosses task;
  task.loss.low = static_cast<float>(low);
  task.loss.high = static_cast<float>(high);
  task.loss.entropy_weight = static_cast<float>(entropy_weight);
  task.loss.with_entropy = with_entropy;
  task.loss.by = static_cast<float>(scale.value_or(1.0));
  task.tokens = tokens;
  task.ignore = ignore;
  task.targets = data<int64_t>(targets, "targets", ScalarType::Long);
  task.logp = floats(out, "out");
  task.entropy = task.logp + 2 * tokens;
  task.old_logp = floats(old_logp, "old_logp");
  task.advantages = floats(advantages, "advantages");
  task.mask = floats(mask, "mask");
  task.normalizer = floats(normalizer, "normalizer");
  const int* active = data<int>(ints, "ints", ScalarType::Int);
  task.active = scale.has_value() ? nullptr : active;
  task.total = floats(total, "total");
  task.metrics = floats(metrics, "metrics");
  task.by_logp = floats(by_logp, "by_logp");
  task.by_entropy = with_entropy ? floats(by_entropy, "by_entropy") : nullptr;
  token_losses(task, stream_of(out));
  return {total, by_logp, by_entropy, metrics};
}

// Weights [T] of tokens: 0 where the target is `ignore`, elsewhere those of the mask, without one 1.
Tensor token_weights_op(Tensor targets, int64_t ignore, Maybe mask) {
  const torch::stable::accelerator::DeviceGuard guard(targets.get_device_index());
  const int64_t tokens = targets.numel();
  STD_TORCH_CHECK(!mask.has_value() || mask->numel() == tokens, "mask must have one value a target");
  Tensor weights = new_tensor(targets, aoti_torch_dtype_float32(), {tokens});
  token_weights(data<int64_t>(targets, "targets", ScalarType::Long), ignore, floats(mask, "mask"), floats(weights, "weights"),
                tokens, stream_of(targets));
  return weights;
}

void scale_op(Tensor x, Tensor y, Tensor factor) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  STD_TORCH_CHECK(factor.numel() == 1, "factor must be one value");
  scale(data<void>(x, "x", ScalarType::BFloat16), x.numel(), data<void>(y, "y", ScalarType::BFloat16), y.numel(),
        floats(factor, "factor"), stream_of(x));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rlk, m) {
  m.def(
      "sm90_linear_logp(Tensor hidden, Tensor weight, Tensor targets, Tensor? temperatures, int start, int columns,"
      " int ignore, float absent, int keep, bool whole)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "sm90_linear_logp_backward(Tensor weight, Tensor picked, Tensor? whole, Tensor(a!)? kept, Tensor? stats, Tensor ints,"
      " Tensor longs, Tensor(b!) reals, Tensor out, Tensor? grad_logp, Tensor? grad_lse, Tensor? grad_entropy,"
      " int start, int columns, int segments, int segment_columns, bool tempered, bool need_hidden, bool by_row,"
      " Tensor(c!)? dw, int workspace) -> Tensor");
  m.def(
      "sm90_token_loss(Tensor out, Tensor ints, Tensor targets, int ignore, Tensor old_logp, Tensor advantages,"
      " Tensor? mask, Tensor? normalizer, float? scale, float low, float high, float entropy_weight)"
      " -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("sm90_token_weights(Tensor targets, int ignore, Tensor? mask) -> Tensor");
  m.def("sm90_scale_(Tensor(a!) x, Tensor(b!) y, Tensor factor) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rlk, CUDA, m) {
  m.impl("sm90_linear_logp", TORCH_BOX(&forward_op));
  m.impl("sm90_linear_logp_backward", TORCH_BOX(&backward_op));
  m.impl("sm90_token_loss", TORCH_BOX(&token_loss_op));
  m.impl("sm90_token_weights", TORCH_BOX(&token_weights_op));
  m.impl("sm90_scale_", TORCH_BOX(&scale_op));
}

}  // namespace rlk::sm90
