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
  m.def("logp_tree_nodes(Tensor stats, Tensor m, Tensor ranges, Tensor(a!) nodes) -> ()");
  m.def("logp_finish(Tensor nodes, Tensor merges, int first_slot, Tensor m, Tensor z_target, Tensor(a!) out) -> ()");
  m.def("logp_dlogits(Tensor logits, Tensor temperature, Tensor targets, Tensor state, Tensor grads, int columns, Tensor(a!) out) -> ()");
  m.def("logp_log_softmax(Tensor logits, Tensor temperature, Tensor state, int columns, Tensor(a!) out) -> ()");
}

// An empty module: importing rl_kernel._C loads the library, which registers the operators above.
extern "C" PyMODINIT_FUNC PyInit__C(void) {
  static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
