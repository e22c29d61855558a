// Device guards that do nothing, for fake tensors on devices that this build of torch lacks.
//
// Indexing and other methods of tensors set the current device, and raise an error if no library
// registered a guard for its type. CUDA builds of torch have one, also without a GPU.

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::DeviceType;

template <DeviceType type>
struct NoGuard final : c10::impl::NoOpDeviceGuardImpl<type> {
  // The autograd engine starts a thread for each device.
  c10::DeviceIndex deviceCount() const noexcept override { return 0; }
};

template <DeviceType type>
void add() {
  static NoGuard<type> guard;
  const c10::impl::DeviceGuardImplInterface* none = nullptr;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(type)].compare_exchange_strong(none, &guard);
}

} // namespace

extern "C" void amp_fx_add_guards() {
  add<DeviceType::CUDA>();
  add<DeviceType::XPU>();
  add<DeviceType::MPS>();
  add<DeviceType::MTIA>();
  add<DeviceType::MAIA>();
}
