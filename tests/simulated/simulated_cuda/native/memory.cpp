// Device memory and pinned memory: host memory that the checker knows.
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "device.h"

namespace simulated {
namespace {

constexpr size_t kRounding = 512;           // as torch's caching allocator
constexpr size_t kSegment = size_t(2) << 20;  // what it reserves at a time
constexpr int kPoison = 0xFF;      // NaN in every floating-point type
constexpr int kMostDevices = 64;

size_t rounded(size_t nbytes, size_t to = kRounding) { return (nbytes + to - 1) / to * to; }

char* poisoned(size_t nbytes) {
  auto* base = static_cast<char*>(std::aligned_alloc(kRounding, rounded(nbytes)));
  TORCH_CHECK(base != nullptr, "the host has no ", nbytes, " bytes for a simulated device");
  std::memset(base, kPoison, rounded(nbytes));
  return base;
}

void free_block(void* base) {
  if (base == nullptr) return;
  std::string where = python_lines(false);
  std::unique_ptr<Block> block = checker().remove(base, where);
  if (block == nullptr) return;
  if (block->device != kPinned) {
    std::lock_guard<std::mutex> lock(checker().mutex);
    memory_of(block->device).allocated -= rounded(block->nbytes);
  }
  std::memset(block->base, kPoison, rounded(block->nbytes));
  std::free(block->base);
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    int index = current_device();
    c10::Device device(device_type(), static_cast<c10::DeviceIndex>(index));
    if (nbytes == 0) return {nullptr, nullptr, &free_block, device};
    std::string born = described("allocation");
    auto block = std::make_unique<Block>();
    {
      std::lock_guard<std::mutex> lock(checker().mutex);
      MemoryState& memory = memory_of(index);
      size_t free = memory.capacity - std::min(memory.capacity, memory.allocated);
      if (rounded(nbytes) > free)
        C10_THROW_ERROR(
            OutOfMemoryError,
            c10::str("CUDA out of memory. Tried to allocate ", nbytes / 1048576.0, " MiB. GPU ",
                     index, " has a total capacity of ", memory.capacity / 1073741824.0,
                     " GiB of which ", free / 1048576.0, " MiB is free."));
      memory.allocated += rounded(nbytes);
      memory.allocated_peak = std::max(memory.allocated_peak, memory.allocated);
      memory.reserved = std::max(memory.reserved, rounded(memory.allocated, kSegment));
      memory.reserved_peak = std::max(memory.reserved_peak, memory.reserved);
      block->owner = checker().stream_locked(index, current_stream(index));
    }
    char* base = poisoned(nbytes);
    block->base = base;
    block->nbytes = nbytes;
    block->device = index;
    block->born = std::move(born);
    checker().add(std::move(block));
    return {base, base, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::mutex> lock(checker().mutex);
    for (int index = 0; index < device_count(); index++)
      memory_of(index).reserved = rounded(memory_of(index).allocated, kSegment);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    checker().record_stream(data.get(), stream.device_index(), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    const MemoryState& memory = memory_of(index);
    stats.allocated_bytes[0].current = static_cast<int64_t>(memory.allocated);
    stats.allocated_bytes[0].peak = static_cast<int64_t>(memory.allocated_peak);
    stats.reserved_bytes[0].current = static_cast<int64_t>(memory.reserved);
    stats.reserved_bytes[0].peak = static_cast<int64_t>(memory.reserved_peak);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> lock(checker().mutex);
    memory_of(index).allocated_peak = memory_of(index).allocated;
    memory_of(index).reserved_peak = memory_of(index).reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    const MemoryState& memory = memory_of(index);
    return {memory.capacity - std::min(memory.capacity, memory.reserved), memory.capacity};
  }
};

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    c10::Device host(c10::DeviceType::CPU);
    if (nbytes == 0) return {nullptr, nullptr, &free_block, host};
    auto block = std::make_unique<Block>();
    char* base = poisoned(nbytes);
    block->base = base;
    block->nbytes = nbytes;
    block->device = kPinned;
    block->owner = 0;
    block->born = described("pinned allocation");
    checker().add(std::move(block));
    return {base, base, &free_block, host};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }
};

DeviceMemory g_device_memory;
PinnedMemory g_pinned_memory;

struct Registration {
  Registration() { c10::SetAllocator(device_type(), &g_device_memory, 100); }
} g_registration;

}  // namespace

MemoryState& memory_of(int device) {
  static auto* states = new std::vector<MemoryState>(kMostDevices);
  return states->at(device);
}

c10::DeviceAllocator* device_allocator() { return &g_device_memory; }
c10::Allocator* pinned_allocator() { return &g_pinned_memory; }

}  // namespace simulated
