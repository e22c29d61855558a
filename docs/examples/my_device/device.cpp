// A device for tests and guides, as a backend of torch's PrivateUse1. Its memory is host memory from
// an allocator of its own, and its kernels are the CPU's (at::native::cpu_fallback). It registers
// nothing for autocast: see __init__.py and docs/guide/accelerators.md.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_copy_from_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/python_headers.h>
#include <torch/library.h>

#include <atomic>

namespace {

constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

// Memory: host memory, up to a limit.

std::atomic<int64_t> num_bytes_in_use{0};
std::atomic<int64_t> max_num_bytes{int64_t(1) << 40};

struct Block {
  c10::DataPtr memory;
  int64_t num_bytes;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  num_bytes_in_use -= block->num_bytes;
  delete block;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    const auto size = static_cast<int64_t>(num_bytes);
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        num_bytes_in_use + size <= max_num_bytes,
        "my_device is out of memory: ", size, " bytes were requested");
    auto* block = new Block{c10::GetCPUAllocator()->allocate(num_bytes), size};
    num_bytes_in_use += size;
    return {block->memory.get(), block, &free_block, c10::Device(DEVICE, 0)};
  }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    std::memcpy(to, from, num_bytes);
  }
};

DeviceAllocator allocator;
REGISTER_ALLOCATOR(DEVICE, &allocator)

// One device, with one stream, on which nothing runs later than it was called.

struct GuardImpl final : c10::impl::NoOpDeviceGuardImpl<DEVICE> {
  c10::Device getDevice() const override {
    return {DEVICE, 0};
  }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, getDevice());
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetCPUAllocator();
  }
  // Random numbers come from the CPU's kernels, and so from the CPU's generator.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    auto data = allocator.allocate(num_bytes);
    std::memcpy(data.get(), storage.data(), std::min(storage.nbytes(), num_bytes));
    storage.set_data_ptr(std::move(data));
    storage.set_nbytes(num_bytes);
  }
};

// Ops: new tensors, copies and views. All others run on the CPU.

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const auto scalar_type = c10::dtype_or_default(dtype);
  return at::detail::empty_strided_generic(size, stride, &allocator, KEYS, scalar_type);
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) {
    return tensor;
  }
  const auto options = tensor.options().device(at::kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  return copy_from(from, to.resize_(from.sizes()), false);
}

void call_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

void call_cpu_op(const char* name, torch::jit::Stack* stack) {
  call_cpu(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), stack);
}

void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  call_cpu_op("aten::convolution", stack);
}

void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  stack->insert(stack->end() - 7, c10::IValue());  // the sizes of the bias, which may be None
  call_cpu_op("aten::convolution_backward", stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&call_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using torch::CppFunction;
  m.impl("convolution_overrideable", CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl(
      "convolution_backward_overrideable",
      CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view", at::native::view);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("view_as_real", at::native::view_as_real);
}

PyObject* limit_memory(PyObject*, PyObject* num_bytes) {
  max_num_bytes = PyLong_AsLongLong(num_bytes);
  return PyLong_FromLongLong(num_bytes_in_use);
}

PyMethodDef methods[] = {{"limit_memory", limit_memory, METH_O, nullptr}, {}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "my_device_cpp", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_my_device_cpp() {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return PyModule_Create(&definition);
}
