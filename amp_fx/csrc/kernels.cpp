// Keeps a kernel that a Python kernel is about to replace reachable without the GIL.
//
// torch's autocast kernels take the mutex of the cache of casts, and whoever has that mutex may
// need the GIL to free what the cache held, or to cast a fake tensor. A Python kernel that calls
// the kernel it replaced by ``torch.library.get_kernel(...).call_boxed`` waits for the mutex
// with the GIL in its hands: two threads, and all stands still. ``OpOverload.redispatch`` lets go
// of the GIL, but finds only kernels that the dispatcher has under a key: hence this.

#include <Python.h>

#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <vector>

namespace {

class Kept : public c10::OperatorKernel {
 public:
  explicit Kept(c10::SafeKernelFunction kernel) : kernel_(std::move(kernel)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
    kernel_.callBoxed(op, keys, stack);
  }

 private:
  c10::SafeKernelFunction kernel_;
};

// keep(name, overload, key, standby): puts the kernel that an op has for a key under another,
// both given as the numbers of torch._C.DispatchKey.
PyObject* keep(PyObject*, PyObject* args) {
  const char *name = nullptr, *overload = nullptr;
  int key = 0, standby = 0;
  if (!PyArg_ParseTuple(args, "ssii", &name, &overload, &key, &standby)) {
    return nullptr;
  }
  // For the process, as the kernel that takes its place.
  static auto* kernels = new std::vector<c10::RegistrationHandleRAII>();
  try {
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    auto kernel = op.getComputedKernelForDispatchKey(static_cast<c10::DispatchKey>(key));
    kernels->push_back(c10::Dispatcher::singleton().registerImpl(
        op.operator_name(),
        static_cast<c10::DispatchKey>(standby),
        c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kept>(std::move(kernel))),
        std::nullopt,
        nullptr,
        "amp_fx"));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"keep", keep, METH_VARARGS, "Puts a kernel of an op under another key as well."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "amp_fx_kernels", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

} // namespace

PyMODINIT_FUNC PyInit_amp_fx_kernels() {
  return PyModule_Create(&definition);
}
