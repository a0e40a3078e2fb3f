// Streams, events, generators and hooks: what torch asks of a device.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstdlib>

namespace simulated {
namespace {

int g_device_count = 1;
thread_local int t_device = 0;
thread_local std::map<int, int64_t> t_streams;

// -- streams and events ---------------------------------------------------------------------------

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return device_type(); }
  c10::Device getDevice() const override { return device(t_device); }
  c10::Device exchangeDevice(c10::Device wanted) const override {
    c10::Device before = getDevice();
    setDevice(wanted);
    return before;
  }
  void setDevice(c10::Device wanted) const override {
    if (wanted.index() >= 0) set_current_device(wanted.index());
  }
  void uncheckedSetDevice(c10::Device wanted) const noexcept override {
    if (wanted.index() >= 0) t_device = wanted.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(g_device_count);
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return c10::DeviceCapability();
  }

  c10::Stream getStream(c10::Device of) const override {
    return stream(index(of), current_stream(index(of)));
  }
  c10::Stream getDefaultStream(c10::Device of) const override { return stream(index(of), 0); }
  c10::Stream getNewStream(c10::Device of, int) const override {
    std::lock_guard<std::mutex> lock(checker().mutex);
    int64_t id = 1;
    for (const StreamState& known : checker().streams)
      if (known.device == index(of)) id = std::max(id, known.id + 1);
    checker().stream_locked(index(of), id);
    return stream(index(of), id);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override {
    return getNewStream(of, 0);
  }
  c10::Stream exchangeStream(c10::Stream wanted) const override {
    c10::Stream before = getStream(wanted.device());
    set_current_stream(wanted.device_index(), wanted.id());
    return before;
  }
  bool queryStream(const c10::Stream& of) const override {
    EventState event;
    checker().record(event, of.device_index(), of.id());
    return checker().is_done(event);
  }
  void synchronizeStream(const c10::Stream& of) const override {
    checker().host_waits_for_stream(of.device_index(), of.id());
  }
  void synchronizeDevice(const c10::DeviceIndex of) const override {
    checker().host_waits_for_device(of < 0 ? t_device : of);
  }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new EventState();
    checker().record(*static_cast<EventState*>(*event), on.device_index(), on.id());
  }
  void block(void* event, const c10::Stream& on) const override {
    if (event != nullptr)
      checker().wait(on.device_index(), on.id(), *static_cast<EventState*>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || checker().is_done(*static_cast<EventState*>(event));
  }
  void synchronizeEvent(void* event) const override {
    // torch's sync debug mode does not look at events
    if (event != nullptr)
      checker().host_waits_for(static_cast<EventState*>(event)->clock, "event", python_lines(),
                               false);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    auto *from = static_cast<EventState*>(start), *to = static_cast<EventState*>(end);
    TORCH_CHECK(from && to && from->recorded && to->recorded,
                "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(from->device == to->device, "CUDA error: invalid resource handle");
    TORCH_CHECK(checker().host_knows(*from) && checker().host_knows(*to),
                "Both events must be completed before calculating elapsed time.");
    return (to->time_s - from->time_s) * 1e3;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    device_allocator()->recordStream(data, on);
  }

 private:
  static c10::Device device(int index) {
    return {device_type(), static_cast<c10::DeviceIndex>(index)};
  }
  static c10::Stream stream(int device_index, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, device(device_index), id);
  }
  static int index(c10::Device of) { return of.index() >= 0 ? of.index() : t_device; }
};

// -- random numbers -------------------------------------------------------------------------------

// A generator whose numbers are those of a generator of the CPU.
class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(int device)
      : c10::GeneratorImpl(c10::Device(device_type(), static_cast<c10::DeviceIndex>(device)),
                           c10::DispatchKeySet(dispatch_key())),
        host(at::detail::createCPUGenerator(device + 1)) {}

  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  c10::GeneratorImpl* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->host = host.clone();
    return copy;
  }

  at::Generator host;
};

// -- hooks ----------------------------------------------------------------------------------------

// What the hooks of all kinds of devices have.
template <class Interface>
class CommonHooks : public Interface {
 public:
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(g_device_count);
  }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(t_device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return static_cast<c10::DeviceIndex>(set_current_device(index));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return static_cast<c10::DeviceIndex>(index < 0 ? t_device : set_current_device(index));
  }
  bool isPinnedPtr(const void* data) const override { return checker().is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* data) const override {
    return {device_type(), static_cast<c10::DeviceIndex>(checker().device_of(data))};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index < 0 ? t_device : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index < 0 ? t_device : index);
  }
};

class Hooks final : public CommonHooks<at::CUDAHooksInterface> {
 public:
  explicit Hooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  int getNumGPUs() const override { return g_device_count; }
  void deviceSynchronize(c10::DeviceIndex index) const override {
    Guard().synchronizeDevice(index);
  }
  std::string showConfig() const override { return "simulated"; }
};

class OtherHooks final : public CommonHooks<at::PrivateUse1HooksInterface> {};

struct Registration {
  Registration() {
    static Guard guard;
    c10::impl::device_guard_impl_registry[static_cast<size_t>(device_type())].store(&guard);
    if (device_type() == c10::DeviceType::PrivateUse1) {
      static OtherHooks other;
      at::RegisterPrivateUse1HooksInterface(&other);
      return;
    }
    // torch asks for these once, while it is imported
    at::CUDAHooksRegistry()->Register(
        "CUDAHooks", [](at::CUDAHooksArgs args) -> std::unique_ptr<at::CUDAHooksInterface> {
          return std::make_unique<Hooks>(args);
        });
  }
} g_registration;

}  // namespace

// -- the devices ----------------------------------------------------------------------------------

// By default CUDA's; else torch's place for devices that it does not know.
c10::DeviceType device_type() {
  static const bool is_other = std::getenv("SIMULATED_DEVICE_NAME") != nullptr;
  return is_other ? c10::DeviceType::PrivateUse1 : c10::DeviceType::CUDA;
}
c10::DispatchKey dispatch_key() {
  return device_type() == c10::DeviceType::CUDA ? c10::DispatchKey::CUDA
                                                : c10::DispatchKey::PrivateUse1;
}

int device_count() { return g_device_count; }
void set_device_count(int count) { g_device_count = count; }
int current_device() { return t_device; }

int set_current_device(int device) {
  TORCH_CHECK(device < g_device_count, "CUDA error: invalid device ordinal");
  int before = t_device;
  if (device >= 0) t_device = device;
  return before;
}

int64_t current_stream(int device) {
  auto at = t_streams.find(device);
  return at == t_streams.end() ? 0 : at->second;
}

void set_current_stream(int device, int64_t id) { t_streams[device] = id; }

at::Generator& default_generator(int device) {
  static auto* generators = new std::map<int, at::Generator>();
  auto at = generators->find(device);
  if (at == generators->end())
    at = generators->emplace(device, at::make_generator<DeviceGenerator>(device)).first;
  return at->second;
}

at::Generator host_generator_of(const at::Generator& generator) {
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

BorrowedGenerator::BorrowedGenerator(int device) : device_(device) {
  auto* host = at::detail::getDefaultCPUGenerator().unsafeGetGeneratorImpl();
  host_state_ = host->get_state();
  host->set_state(*default_generator(device_).unsafeGetGeneratorImpl()->get_state());
}

BorrowedGenerator::~BorrowedGenerator() {
  auto* host = at::detail::getDefaultCPUGenerator().unsafeGetGeneratorImpl();
  default_generator(device_).unsafeGetGeneratorImpl()->set_state(*host->get_state());
  host->set_state(*host_state_);
}

}  // namespace simulated
