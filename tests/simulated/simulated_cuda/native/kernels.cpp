// Kernels: the CPU's on the same memory, with each launch told to the checker.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "device.h"

namespace simulated {
namespace {

bool is_ours(const at::Tensor& tensor) { return tensor.device().type() == device_type(); }

const void* start_of_storage(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->storage().data();
}

// Address of the first element, and the bytes from there to the end of the last.
std::pair<const char*, size_t> extent(const at::Tensor& tensor) {
  size_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); dim++)
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const char* first = static_cast<const char*>(start_of_storage(tensor)) +
                      tensor.storage_offset() * tensor.element_size();
  return {first, (last + 1) * tensor.element_size()};
}

void touch_locked(const at::Tensor& tensor, Stream stream, bool writes, const std::string& by) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return;
  Block* block = checker().block_locked(start_of_storage(tensor));
  if (block == nullptr) return;
  auto [first, nbytes] = extent(tensor);
  size_t begin = first - block->base;
  checker().access_locked(block, begin, begin + nbytes, stream, writes, by);
}

// A CPU tensor of the same memory; whoever uses it keeps the original alive.
at::Tensor on_host(const at::Tensor& tensor) {
  auto& of = tensor.unsafeGetTensorImpl()->storage();
  c10::DataPtr data(const_cast<void*>(of.data()), c10::Device(c10::DeviceType::CPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), of.nbytes(), std::move(data), nullptr,
                       false);
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  return result;
}

at::Tensor empty_on(int device, at::IntArrayRef size, at::IntArrayRef stride,
                    at::ScalarType dtype) {
  c10::DeviceGuard guard(c10::Device(device_type(), static_cast<c10::DeviceIndex>(device)));
  return at::detail::empty_strided_generic(size, stride, device_allocator(),
                                           c10::DispatchKeySet(dispatch_key()), dtype);
}

at::Tensor copied_to_device(const at::Tensor& tensor, int device) {
  at::Tensor result = empty_on(device, tensor.sizes(), tensor.strides(), tensor.scalar_type());
  if (size_t nbytes = result.storage().nbytes(); nbytes > 0 && tensor.numel() > 0)
    std::memcpy(result.storage().mutable_data(), tensor.const_data_ptr(), nbytes);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    result.unsafeGetTensorImpl()->set_wrapped_number(true);
  return result;
}

// Kernels of the CPU call other operators: these are no operators of the model.
struct BelowEverything {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_python{c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  at::DisableRecordFunctionGuard no_callbacks;
};

// The sizes of their results depend on values, or their result is a number of the host.
bool waits_for_the_device(const std::string& name) {
  static const std::set<std::string> names{
      "aten::_local_scalar_dense", "aten::nonzero",          "aten::masked_select",
      "aten::equal",               "aten::_unique2",         "aten::unique_dim",
      "aten::unique_consecutive",  "aten::repeat_interleave.Tensor", "aten::repeat_interleave",
      "aten::bincount",            "aten::is_nonzero"};
  return names.count(name) > 0;
}

bool takes_several_devices(const std::string& name) {
  static const std::set<std::string> names{"aten::copy_",      "aten::_index_put_impl_",
                                           "aten::index",      "aten::index_put_",
                                           "aten::set_",       "aten::_copy_from",
                                           "aten::_foreach_copy_"};
  return names.count(name) > 0;
}

// One call of an operator: swaps its tensors of the device for aliases of the host, and back.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : schema_(op.schema()), name_(schema_.name()), stack_(stack) {}

  void run(const c10::OperatorHandle& op) {
    swap_arguments();
    if (device_ < 0) device_ = current_device();
    refuse_mixed_devices();
    const std::string by = described(name_);
    {
      std::lock_guard<std::mutex> lock(checker().mutex);
      stream_ = checker().launch_locked(device_, current_stream(device_));
      checker().kernels[name_]++;
      for (const Swapped& one : swapped_) touch_locked(one.original, stream_, one.writes, by);
    }
    {
      std::optional<BorrowedGenerator> generator;
      if (draws_ || op.hasTag(at::Tag::nondeterministic_seeded)) generator.emplace(device_);
      BelowEverything guard;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    }
    swap_results(by);
    if (waits_for_the_device(name_)) {
      Clock clock;
      {
        std::lock_guard<std::mutex> lock(checker().mutex);
        clock = checker().streams[stream_].clock;
      }
      checker().host_waits_for(clock, name_, python_lines(), true);
    }
  }

 private:
  struct Swapped {
    at::Tensor original, alias;
    bool writes;
    bool is_output;  // an out= argument without elements, which the kernel resizes
  };

  void swap_arguments() {
    const auto& arguments = schema_.arguments();
    const size_t first = stack_->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); i++) {
      c10::IValue& value = (*stack_)[first + i];
      const auto* alias = arguments[i].alias_info();
      const bool writes = alias != nullptr && alias->isWrite();
      if (value.isTensor()) {
        value = swapped(value.toTensor(), writes);
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& tensor : value.toTensorVector())
          list.push_back(swapped(tensor, writes));
        value = list;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
          list.push_back(tensor ? std::optional<at::Tensor>(swapped(*tensor, writes)) : tensor);
        value = list;
      } else if (value.isDevice() && value.toDevice().type() == device_type()) {
        if (device_ < 0)
          device_ = value.toDevice().has_index() ? value.toDevice().index() : current_device();
        value = c10::Device(c10::DeviceType::CPU);
      } else if (value.isGenerator()) {
        draws_ = true;
        at::Generator generator = value.toGenerator();
        if (generator.defined() && generator.device().type() == device_type())
          value = host_generator_of(generator);
      }
    }
  }

  at::Tensor swapped(const at::Tensor& tensor, bool writes) {
    if (!tensor.defined()) return tensor;
    if (!is_ours(tensor)) {
      on_host_.push_back(tensor);
      return tensor;
    }
    TORCH_CHECK(device_ < 0 || device_ == tensor.get_device() || takes_several_devices(name_),
                "Expected all tensors to be on the same device, but found devices ", device_,
                " and ", tensor.get_device(), " (", name_, ")");
    if (device_ < 0) device_ = tensor.get_device();
    for (Swapped& known : swapped_)
      if (known.original.is_same(tensor)) {
        known.writes |= writes;
        return known.alias;
      }
    TORCH_CHECK(tensor.layout() == at::kStrided, name_, ": this layout is not simulated");
    const bool is_output = writes && tensor.numel() == 0 &&
                           schema_.overload_name().find("out") != std::string::npos;
    at::Tensor alias = is_output ? at::empty({0}, at::TensorOptions().dtype(tensor.dtype()))
                                 : on_host(tensor);
    swapped_.push_back({tensor, alias, writes, is_output});
    return alias;
  }

  void refuse_mixed_devices() const {
    if (swapped_.empty() || takes_several_devices(name_)) return;
    for (const at::Tensor& tensor : on_host_)
      TORCH_CHECK(tensor.dim() == 0,
                  "Expected all tensors to be on the same device, but found at least two devices, "
                  "the simulated device ",
                  device_, " and cpu! (", name_, ", argument of shape ", tensor.sizes(), ")");
  }

  void swap_results(const std::string& by) {
    const size_t first = stack_->size() - schema_.returns().size();
    for (size_t i = 0; i < schema_.returns().size(); i++) {
      c10::IValue& value = (*stack_)[first + i];
      if (value.isTensor()) {
        value = swapped_back(value.toTensor(), by);
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& tensor : value.toTensorVector())
          list.push_back(swapped_back(tensor, by));
        value = list;
      }
    }
  }

  at::Tensor swapped_back(const at::Tensor& tensor, const std::string& by) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    for (const at::Tensor& known : on_host_)
      if (known.is_same(tensor)) return tensor;
    at::Tensor result;
    for (const Swapped& one : swapped_) {
      if (!one.alias.is_same(tensor)) continue;
      if (!one.is_output || tensor.numel() == 0) return one.original;
      result = one.original;
      result.resize_(tensor.sizes());
      std::memcpy(const_cast<void*>(start_of_storage(result)), tensor.const_data_ptr(),
                  tensor.nbytes());
    }
    if (!result.defined()) result = copied_to_device(tensor, device_);
    std::lock_guard<std::mutex> lock(checker().mutex);
    touch_locked(result, stream_, true, by);
    return result;
  }

  const c10::FunctionSchema& schema_;
  const std::string name_;
  torch::jit::Stack* stack_;
  std::vector<Swapped> swapped_;
  std::vector<at::Tensor> on_host_;
  int device_ = -1;
  Stream stream_ = 0;
  bool draws_ = false;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run(op);
}

// -- copies ---------------------------------------------------------------------------------------

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const bool to_device = is_ours(self), from_device = is_ours(source);
  const int device = to_device ? self.get_device() : source.get_device();
  const bool between = to_device && from_device && self.get_device() != source.get_device();
  const std::string name = to_device == from_device ? "aten::copy_"
                           : to_device              ? "copy to the device"
                                                    : "copy to the host";
  const std::string by = described(name);
  Clock clock;
  bool host_waits = false;
  {
    std::lock_guard<std::mutex> lock(checker().mutex);
    Stream stream = checker().launch_locked(device, current_stream(device));
    if (between) {
      // torch orders the current streams of both devices around a copy between them
      int other = source.get_device();
      Stream there = checker().launch_locked(other, current_stream(other));
      Clock& here_clock = checker().streams[stream].clock;
      Clock& there_clock = checker().streams[there].clock;
      here_clock.resize(std::max(here_clock.size(), there_clock.size()), 0);
      there_clock.resize(here_clock.size(), 0);
      for (size_t i = 0; i < here_clock.size(); i++)
        here_clock[i] = there_clock[i] = std::max(here_clock[i], there_clock[i]);
    }
    checker().kernels[name]++;
    touch_locked(source, stream, false, by);
    touch_locked(self, stream, true, by);
    if (to_device != from_device) {
      Block* block = checker().block_locked(start_of_storage(to_device ? source : self));
      const bool is_pinned = block != nullptr && block->device == kPinned;
      // a copy from pageable memory is staged; one to pageable memory ends before the call does
      host_waits = !non_blocking || (from_device && !is_pinned);
    }
    clock = checker().streams[stream].clock;
  }
  at::Tensor target = to_device ? on_host(self) : self;
  at::Tensor values = from_device ? on_host(source) : source;
  {
    BelowEverything guard;
    target.copy_(values);
  }
  if (host_waits) checker().host_waits_for(clock, name, python_lines(), !non_blocking);
  return self;
}

// -- what makes and shapes tensors ----------------------------------------------------------------

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(device_type())));
  return at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(dispatch_key()),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  int index = device && device->has_index() ? device->index() : current_device();
  return empty_on(index, size, stride, c10::dtype_or_default(dtype));
}

void resize_bytes(c10::StorageImpl* storage, size_t nbytes) {
  c10::DeviceGuard guard(storage->device());
  if (nbytes == 0) {
    storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
    storage->set_nbytes(0);
    return;
  }
  c10::DataPtr fresh = device_allocator()->allocate(nbytes);
  if (storage->data() != nullptr && storage->nbytes() > 0) {
    size_t kept = std::min<size_t>(nbytes, storage->nbytes());
    std::memcpy(fresh.get(), storage->data(), kept);
    std::string by = described("resize_");
    std::lock_guard<std::mutex> lock(checker().mutex);
    int device = storage->device().index();
    Stream stream = checker().launch_locked(device, current_stream(device));
    checker().access_locked(checker().block_locked(storage->data()), 0, kept, stream, false, by);
    checker().access_locked(checker().block_locked(fresh.get()), 0, kept, stream, true, by);
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(nbytes);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size,
                          std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t needed = at::detail::computeStorageNbytesContiguous(size, self.element_size(),
                                                             self.storage_offset());
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) resize_bytes(storage, needed);
  if (format) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage_(at::Tensor& self, at::Storage source, int64_t offset,
                         at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr || stride.size() != size.size())
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_source_(at::Tensor& self, at::Storage source) {
  int64_t count = static_cast<int64_t>(source.nbytes()) / self.element_size();
  return set_storage_(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_nothing_(at::Tensor& self) {
  at::Storage storage(at::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, self.device()),
                      device_allocator(), true);
  return set_storage_(self, std::move(storage), 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

// -- the host's own reads and writes of pinned memory ---------------------------------------------

// Operators that take a tensor only for its shape, or hand it on.
bool reads_nothing(const std::string& name) {
  static const std::set<std::string> names{"aten::is_pinned",  "aten::_to_copy",
                                           "aten::empty_like", "aten::zeros_like",
                                           "aten::ones_like",  "aten::full_like",
                                           "aten::new_empty",  "aten::new_empty_strided",
                                           "aten::new_zeros",  "aten::resize_",
                                           "aten::set_",       "aten::_reshape_alias"};
  return names.count(name) > 0 || name.rfind("simulated::", 0) == 0;
}

std::unique_ptr<at::ObserverContext> look_at_host_operator(const at::RecordFunction& function) {
  if (!checker().has_pinned_memory()) return nullptr;
  auto schema = function.operator_schema();
  if (!schema.has_value() || reads_nothing(schema->name())) return nullptr;
  std::vector<std::pair<at::Tensor, bool>> touched;
  auto inputs = function.inputs();
  for (size_t i = 0; i < inputs.size() && i < schema->arguments().size(); i++) {
    const auto* alias = schema->arguments()[i].alias_info();
    if (alias != nullptr && !alias->isWrite()) continue;  // the result is a view of it
    const bool writes = alias != nullptr;
    std::vector<at::Tensor> tensors;
    if (inputs[i].isTensor()) tensors.push_back(inputs[i].toTensor());
    if (inputs[i].isTensorList()) tensors = inputs[i].toTensorVector();
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.defined() || !tensor.has_storage()) continue;
      if (is_ours(tensor)) return nullptr;  // a copy, which the device does
      if (tensor.device().is_cpu() && tensor.numel() > 0 &&
          checker().is_pinned(start_of_storage(tensor)))
        touched.emplace_back(tensor, writes);
    }
  }
  if (touched.empty()) return nullptr;
  std::string by = described(schema->name());
  for (const auto& [tensor, writes] : touched) {
    auto [first, nbytes] = extent(tensor);
    checker().host_access(first, nbytes, writes, by);
  }
  return nullptr;
}

// -- registration ---------------------------------------------------------------------------------

struct Registration {
  Registration()
      : any(torch::Library::IMPL, "_", dispatch_key(), __FILE__, __LINE__),
        aten(torch::Library::IMPL, "aten", dispatch_key(), __FILE__, __LINE__) {
    any.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
    aten.impl("empty.memory_format", &empty);
    aten.impl("empty_strided", &empty_strided);
    aten.impl("as_strided", &at::native::as_strided_tensorimpl);
    aten.impl("view", &at::native::view);
    aten.impl("_reshape_alias", &at::native::_reshape_alias);
    aten.impl("unfold", &at::native::unfold);
    aten.impl("resize_", &resize_);
    aten.impl("set_.source_Storage_storage_offset", &set_storage_);
    aten.impl("set_.source_Storage", &set_source_);
    aten.impl("set_", &set_nothing_);
    aten.impl("copy_", &copy_);
    aten.impl("record_stream", &record_stream);
    at::addGlobalCallback(at::RecordFunctionCallback(&look_at_host_operator)
                              .needsInputs(true)
                              .scopes({at::RecordScope::FUNCTION}));
  }
  torch::Library any, aten;
};
Registration& registration() {
  static auto* instance = new Registration();
  return *instance;
}
[[maybe_unused]] Registration& g_registration = registration();

// -- what Python asks -----------------------------------------------------------------------------

std::vector<std::string> findings() {
  std::lock_guard<std::mutex> lock(checker().mutex);
  std::vector<std::string> lines;
  for (const Finding& finding : checker().findings)
    lines.push_back(finding.kind + ": " + finding.text);
  return lines;
}

c10::Dict<std::string, int64_t> counts(const std::map<std::string, int64_t>& of) {
  std::lock_guard<std::mutex> lock(checker().mutex);
  c10::Dict<std::string, int64_t> result;
  for (const auto& [name, count] : of) result.insert(name, count);
  return result;
}

// A kernel of a library, such as NCCL, that reads and writes these tensors.
void launch(const std::string& what, int64_t device, int64_t stream_id, at::TensorList reads,
            at::TensorList writes) {
  std::string by = described(what);
  std::lock_guard<std::mutex> lock(checker().mutex);
  Stream stream = checker().launch_locked(static_cast<int>(device), stream_id);
  checker().kernels[what]++;
  for (const at::Tensor& tensor : reads) touch_locked(tensor, stream, false, by);
  for (const at::Tensor& tensor : writes) touch_locked(tensor, stream, true, by);
}

void resize_storage(const at::Tensor& tensor, int64_t nbytes) {
  resize_bytes(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(), nbytes);
}

TORCH_LIBRARY(simulated, m) {
  m.def("findings() -> str[]", &findings);
  m.def("waits() -> Dict(str, int)", [] { return counts(checker().waits); });
  m.def("kernels() -> Dict(str, int)", [] { return counts(checker().kernels); });
  m.def("launches() -> int", [] { return static_cast<int64_t>(checker().launches); });
  m.def("clear() -> ()", [] { checker().clear(); });
  m.def("set_enabled(bool on) -> ()", [](bool on) { checker().enabled = on; });
  m.def("set_sync_debug_mode(int mode) -> ()", [](int64_t mode) { checker().sync_debug_mode = mode; });
  m.def("set_denials(int count) -> ()",
        [](int64_t count) { checker().denials = static_cast<int>(count); });
  m.def("device_count() -> int", [] { return static_cast<int64_t>(device_count()); });
  m.def("set_device_count(int count) -> ()",
        [](int64_t count) { set_device_count(static_cast<int>(count)); });
  m.def("current_device() -> int", [] { return static_cast<int64_t>(current_device()); });
  m.def("exchange_device(int device) -> int", [](int64_t device) {
    return static_cast<int64_t>(set_current_device(static_cast<int>(device)));
  });
  m.def("set_stream(int device, int stream) -> ()", [](int64_t device, int64_t stream) {
    set_current_stream(static_cast<int>(device), stream);
  });
  m.def("memory(int device) -> int[]", [](int64_t device) {
    const MemoryState& memory = memory_of(static_cast<int>(device));
    auto number = [](size_t nbytes) { return static_cast<int64_t>(nbytes); };
    return std::vector<int64_t>{number(memory.allocated), number(memory.allocated_peak),
                                number(memory.reserved), number(memory.reserved_peak),
                                number(memory.capacity)};
  });
  m.def("set_capacity(int device, int nbytes) -> ()", [](int64_t device, int64_t nbytes) {
    memory_of(static_cast<int>(device)).capacity = static_cast<size_t>(nbytes);
  });
  m.def("reset_peak(int device) -> ()", [](int64_t device) {
    device_allocator()->resetPeakStats(static_cast<c10::DeviceIndex>(device));
  });
  m.def("empty_cache() -> ()", [] { device_allocator()->emptyCache({0, 0}); });
  m.def("default_generator(int device) -> Generator?", [](int64_t device) {
    return std::optional<at::Generator>(default_generator(static_cast<int>(device)));
  });
  m.def("on_host(Tensor tensor) -> Tensor");
  m.def("launch(str what, int device, int stream, Tensor[] reads, Tensor[] writes) -> ()");
  m.def("resize_storage(Tensor tensor, int nbytes) -> ()");
}

TORCH_LIBRARY_IMPL(simulated, CompositeExplicitAutograd, m) {
  m.impl("on_host", &on_host);
  m.impl("launch", &launch);
  m.impl("resize_storage", &resize_storage);
}

}  // namespace
}  // namespace simulated
