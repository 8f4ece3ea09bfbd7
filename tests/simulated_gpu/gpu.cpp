#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <map>
#include <mutex>

namespace {

c10::Device only() { return {c10::DeviceType::CUDA, 0}; }
c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, only()); }

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return only(); }
  c10::Device getDevice() const override { return only(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
};

struct Pinned final : c10::Allocator {
  static std::map<const char*, size_t>& blocks() {
    static auto* found = new std::map<const char*, size_t>;
    return *found;
  }
  static std::mutex& mutex() {
    static auto* found = new std::mutex;
    return *found;
  }
  static void add(const void* data, size_t size) {
    const std::lock_guard<std::mutex> held(mutex());
    blocks()[static_cast<const char*>(data)] = size;
  }
  static void remove(const void* data) {
    const std::lock_guard<std::mutex> held(mutex());
    blocks().erase(static_cast<const char*>(data));
  }
  static void release(void* data) {
    remove(data);
    std::free(data);
  }
  c10::DataPtr allocate(size_t size) override {
    void* data = std::aligned_alloc(64, (size / 64 + 1) * 64);
    add(data, size);
    return {data, data, release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return release; }
  void copy_data(void* target, const void* source, size_t count) const override { default_copy_data(target, source, count); }
  static bool holds(const void* data) {
    const std::lock_guard<std::mutex> held(mutex());
    auto next = blocks().upper_bound(static_cast<const char*>(data));
    if (next == blocks().begin()) return false;
    --next;
    return static_cast<const char*>(data) < next->first + next->second;
  }
};

struct Hooks final : at::CUDAHooksInterface {
  Hooks(at::CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  bool isPinnedPtr(const void* data) const override { return Pinned::holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static Pinned pinned;
    return &pinned;
  }
};

}  // namespace

// As cudaHostRegister and cudaHostUnregister: memory that somebody else has allocated.
extern "C" int register_pinned(const void* data, size_t size) {
  Pinned::add(data, size);
  return 0;
}
extern "C" int unregister_pinned(const void* data) {
  Pinned::remove(data);
  return 0;
}

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, ::Guard)
}
namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", ::Hooks)
}
