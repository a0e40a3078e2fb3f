// The simulated devices: their memory, current device and stream of each thread, and generators.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>

#include "checker.h"

namespace simulated {

c10::DeviceType device_type();
c10::DispatchKey dispatch_key();

int device_count();
void set_device_count(int count);
int current_device();
int set_current_device(int device);  // returns the one before
int64_t current_stream(int device);
void set_current_stream(int device, int64_t id);

struct MemoryState {
  size_t allocated = 0, allocated_peak = 0;
  size_t reserved = 0, reserved_peak = 0;
  size_t capacity = size_t(1) << 34;
};
MemoryState& memory_of(int device);
c10::DeviceAllocator* device_allocator();
c10::Allocator* pinned_allocator();

at::Generator& default_generator(int device);
// Runs `function` with the host's generator in the state of this one, and keeps the new state.
class BorrowedGenerator {
 public:
  explicit BorrowedGenerator(int device);
  ~BorrowedGenerator();

 private:
  int device_;
  c10::intrusive_ptr<c10::TensorImpl> host_state_;
};
at::Generator host_generator_of(const at::Generator& generator);

}  // namespace simulated
