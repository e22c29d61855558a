// Tensors of one device over memory of another: CUDA tensors that lie in the host's memory.
//
// A storage made here holds the storage whose bytes it shows, and nothing else refers to it. Reading
// the address asks for no pointer to write through, so that no watch of a storage takes it for a
// write; `note_write` asks for one.

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceType;

// Owners of the bytes that CUDA storages show, by address. They are not the contexts of the pointers,
// which are the addresses: so the pointers look like those of CUDA's own allocator.
std::mutex& owners_mutex() {
  static auto* mutex = new std::mutex();
  return *mutex;
}
std::unordered_map<void*, std::vector<c10::Storage>>& owners() {
  static auto* map = new std::unordered_map<void*, std::vector<c10::Storage>>();
  return *map;
}

void release_address(void* address) {
  c10::Storage owner; // goes behind the lock: it may be the last of others
  std::lock_guard<std::mutex> guard(owners_mutex());
  auto found = owners().find(address);
  owner = std::move(found->second.back());
  found->second.pop_back();
  if (found->second.empty()) {
    owners().erase(found);
  }
}

void release_owner(void* owner) {
  delete static_cast<c10::Storage*>(owner);
}

c10::Storage storage_over(void* address, size_t num_bytes, void* context, c10::DeleterFnPtr release,
                          Device device) {
  return c10::Storage(
      c10::Storage::use_byte_size_t(), num_bytes,
      c10::DataPtr(address, context, release, device), nullptr, false);
}

at::Tensor tensor_of(c10::Storage storage, const at::Tensor& like, c10::DispatchKey key) {
  auto found = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* made = found.unsafeGetTensorImpl();
  made->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  made->_set_conj(like.is_conj());
  made->_set_neg(like.is_neg());
  return found;
}

at::Tensor on_cuda(const at::Tensor& tensor) {
  auto* address = const_cast<void*>(tensor.storage().data());
  if (address != nullptr) {
    std::lock_guard<std::mutex> guard(owners_mutex());
    owners()[address].push_back(tensor.storage());
  }
  auto storage = storage_over(
      address, tensor.storage().nbytes(), address, &release_address, Device(DeviceType::CUDA, 0));
  return tensor_of(std::move(storage), tensor, c10::DispatchKey::CUDA);
}

at::Tensor on_host(const at::Tensor& tensor) {
  auto* address = const_cast<void*>(tensor.storage().data());
  auto storage = storage_over(
      address, tensor.storage().nbytes(), new c10::Storage(tensor.storage()), &release_owner,
      Device(DeviceType::CPU));
  return tensor_of(std::move(storage), tensor, c10::DispatchKey::CPU);
}

// What a kernel does that asks a tensor for a pointer to write through.
void note_write(const at::Tensor& tensor) {
  tensor.storage().mutable_data();
}

bool is_same_memory(const at::Tensor& left, const at::Tensor& right) {
  return left.storage().data() == right.storage().data();
}

} // namespace

TORCH_LIBRARY(amp_fx_host_memory, library) {
  library.def("on_cuda(Tensor tensor) -> Tensor", &on_cuda);
  library.def("on_host(Tensor tensor) -> Tensor", &on_host);
  library.def("note_write(Tensor tensor) -> ()", &note_write);
  library.def("is_same_memory(Tensor left, Tensor right) -> bool", &is_same_memory);
}

// What is only looked at need not be conjugated or negated first.
TORCH_LIBRARY_IMPL(amp_fx_host_memory, Conjugate, library) {
  library.impl("on_host", torch::CppFunction::makeFallthrough());
  library.impl("on_cuda", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(amp_fx_host_memory, Negative, library) {
  library.impl("on_host", torch::CppFunction::makeFallthrough());
  library.impl("on_cuda", torch::CppFunction::makeFallthrough());
}
