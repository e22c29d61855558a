// What autograd asks of CUDA, answered for fake CUDA tensors on a machine without a driver.
//
// FakeTensorMode brings along a device guard that does nothing. The autograd engine asks more: for
// the device's current stream, and CUDA's hooks whether it has a context; both fail without a
// driver. Here is a guard of one device, and hooks that know of one without a context.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

struct OneDevice final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream exchangeStream(Stream) const noexcept override { return getStream(getDevice()); }
};

struct NoContext final : at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
};

} // namespace

extern "C" void amp_fx_install_guard() {
  static OneDevice guard;
  static NoContext hooks;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  // The hooks are made once and handed out by reference. They have no data members, so that another
  // class of them is another table of virtual functions.
  auto& installed = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  std::memcpy(reinterpret_cast<void*>(&installed), reinterpret_cast<void*>(&hooks), sizeof(void*));
}
