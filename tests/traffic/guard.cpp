// What torch asks of CUDA, answered on a machine without a driver: one device with streams and events.
//
// FakeTensorMode brings along a device guard that does nothing. The autograd engine asks more: for
// the device's current stream, and CUDA's hooks whether it has a context; both fail without a
// driver. The executor of CUDA's code (tests/cuda) also records events and pins memory.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstring>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

// Whether another thread captures a CUDA graph in the mode "global". The driver then refuses to be asked
// for an event, and to pin memory, and the capture fails.
std::atomic<bool> captures_elsewhere{false};
void refuse_during_captures() {
  TORCH_CHECK(!captures_elsewhere, "CUDA error: operation not permitted when stream is capturing");
}

// One device with streams and events. Kernels run at once, so that every event has happened.
struct HostDevice final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Stream& current() {
    thread_local Stream stream(Stream::DEFAULT, Device(DeviceType::CUDA, 0));
    return stream;
  }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const noexcept override { return current(); }
  Stream getDefaultStream(Device) const override {
    return Stream(Stream::DEFAULT, getDevice());
  }
  Stream getNewStream(Device, int = 0) const override {
    static std::atomic<c10::StreamId> next{1};
    return Stream(Stream::UNSAFE, getDevice(), next++);
  }
  Stream exchangeStream(Stream stream) const noexcept override {
    std::swap(current(), stream);
    return stream;
  }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override {
    refuse_during_captures();
    return true;
  }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};

// What the rest of torch asks of CUDA. Memory that is pinned for it is like any other of the host's.
struct HostHooks final : at::CUDAHooksInterface {
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
  long versionCuDNN() const override { return 91000; }
  long versionRuntimeCuDNN() const override { return 91000; }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override {
    refuse_during_captures();
    return c10::GetCPUAllocator();
  }
};

} // namespace

extern "C" void amp_fx_install_guard() {
  static HostDevice device;
  static HostHooks hooks;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&device);
  // The hooks are made once and handed out by reference. They have no data members, so that another
  // class of them is another table of virtual functions.
  auto& installed = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  std::memcpy(reinterpret_cast<void*>(&installed), reinterpret_cast<void*>(&hooks), sizeof(void*));
}

extern "C" void amp_fx_capture_elsewhere(bool is_under_way) {
  captures_elsewhere = is_under_way;
}
