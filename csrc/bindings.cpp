// Schemas of the compiled operators. Implementations live in csrc/cpu, csrc/gpu and csrc/sm90 and register themselves
// with STABLE_TORCH_LIBRARY_IMPL. The stable ABI keeps one binary loadable on every torch from 2.11 on.
#include <Python.h>
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(rlk, m) {
  // primitives
  m.def("exp(Tensor x) -> Tensor");
  m.def("log(Tensor x) -> Tensor");
  m.def("tree(Tensor x) -> Tensor");
  // collectives
  m.def("collectives_reduce_parts(Tensor parts, Tensor(a!) out) -> ()");
  // logp
  m.def("logp_leaf_stats(Tensor logits, Tensor temperature, int columns, Tensor(a!) stats) -> ()");
  m.def("logp_whole_rows(Tensor stats, Tensor z_target, Tensor(a!) out) -> ()");
  m.def("logp_tree_nodes(Tensor stats, Tensor m, Tensor ranges, Tensor(a!) nodes) -> ()");
  m.def("logp_finish(Tensor nodes, Tensor merges, int first_slot, Tensor m, Tensor z_target, Tensor(a!) out) -> ()");
  m.def(
      "logp_dlogits(Tensor logits, Tensor temperature, Tensor targets, Tensor state, Tensor grads, int columns, Tensor(a!) "
      "out) -> ()");
  m.def("logp_log_softmax(Tensor logits, Tensor temperature, Tensor state, int columns, Tensor(a!) out) -> ()");
  // linear_logp
  m.def(
      "linear_logp_leaf_stats(Tensor hidden, Tensor weight, Tensor temperature, Tensor targets, int columns, Tensor(a!) stats, "
      "Tensor(b!) z_target) -> ()");
  m.def(
      "linear_logp_backward(Tensor hidden, Tensor weight, Tensor temperature, Tensor targets, Tensor state, Tensor grads, "
      "Tensor segments, Tensor(a!) dh, Tensor(b!) dw) -> ()");
  // linear
  m.def("linear_forward(Tensor x, Tensor weight, int segments, ScalarType? out_dtype) -> Tensor");
  m.def("linear_dgrad(Tensor dy, Tensor weight, int segments, int parts, ScalarType? out_dtype) -> Tensor");
  m.def("linear_wgrad(Tensor dy, Tensor x, ScalarType? out_dtype) -> Tensor");
  // rms_norm, rope, swiglu, embedding
  m.def("rms_norm_forward(Tensor x, Tensor weight, float eps, Tensor? residual) -> (Tensor, Tensor, Tensor)");
  m.def("rms_norm_backward(Tensor dy, Tensor? dres, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor)");
  m.def("rope(Tensor x, Tensor positions, Tensor cache, bool inverse) -> Tensor");
  m.def("swiglu_forward(Tensor gate_up) -> Tensor");
  m.def("swiglu_backward(Tensor dy, Tensor gate_up) -> Tensor");
  m.def("embedding_forward(Tensor ids, Tensor weight, int vocab_start_index) -> Tensor");
  m.def("embedding_backward(Tensor dy, Tensor ids, int num_rows, int vocab_start_index) -> Tensor");
  // attention
  m.def("attention_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, float scale) -> (Tensor, Tensor)");
  m.def(
      "attention_varlen_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_q, Tensor cu_k, "
      "float scale) -> (Tensor, Tensor, Tensor)");
  m.def(
      "attention_paged_forward(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor cu_q, Tensor seq_lens, "
      "float scale) -> Tensor");
}

// An empty module: importing rl_kernel._C loads the library, which registers the operators above.
extern "C" PyMODINIT_FUNC PyInit__C(void) {
  static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
