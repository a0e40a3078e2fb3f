#include "checker.h"

#include <Python.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <sstream>

namespace simulated {
namespace {

constexpr int kLines = 6;  // Python lines per description

void join(Clock& clock, const Clock& other) {
  if (other.size() > clock.size()) clock.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

bool covers(const Clock& clock, Stream stream, uint64_t time) {
  return stream < clock.size() && clock[stream] >= time;
}

bool covers(const Clock& clock, const Clock& other) {
  for (Stream stream = 0; stream < other.size(); stream++)
    if (other[stream] && !covers(clock, stream, other[stream])) return false;
  return true;
}

// Not torch's, nor Python's own, nor this simulator's.
bool is_of_the_program(const char* file) {
  if (file == nullptr || file[0] == '<') return false;
  const bool is_installed = std::strstr(file, "/site-packages/") != nullptr;
  if (!is_installed) return std::strstr(file, "/lib/python") == nullptr &&
                            std::strstr(file, "/simulated_cuda/") == nullptr;
  return std::strstr(file, "/site-packages/torch/") == nullptr &&
         std::strstr(file, "/site-packages/typing_extensions") == nullptr;
}

const char* verb(bool writes) { return writes ? "write" : "read"; }

}  // namespace

Checker& checker() {
  static auto* instance = new Checker();  // outlives everything that frees memory at exit
  return *instance;
}

std::string python_lines(bool wait_for_interpreter) {
  if (!Py_IsInitialized() || (!wait_for_interpreter && !PyGILState_Check()))
    return "no line of the program";
  PyGILState_STATE state = PyGILState_Ensure();
  std::string lines;
  int count = 0;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame != nullptr && count < kLines) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    if (is_of_the_program(file)) {
      const char* slash = std::strrchr(file, '/');
      lines += (count++ ? " < " : "") + std::string(slash ? slash + 1 : file) + ":" +
               std::to_string(PyFrame_GetLineNumber(frame));
    }
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  PyGILState_Release(state);
  return lines.empty() ? "no line of the program" : lines;
}

std::string described(const std::string& what) { return what + " {" + python_lines() + "}"; }

// -- streams and events ---------------------------------------------------------------------------

Stream Checker::stream_locked(int device, int64_t id) {
  auto [at, is_new] = numbers_.try_emplace({device, id}, streams.size());
  if (is_new) streams.push_back({device, id, {}});
  return at->second;
}

std::string Checker::name_of(Stream stream) const {
  return "device " + std::to_string(streams[stream].device) + "'s stream " +
         std::to_string(streams[stream].id);
}

Stream Checker::launch_locked(int device, int64_t id) {
  Stream stream = stream_locked(device, id);
  Clock& clock = streams[stream].clock;
  join(clock, host_);
  if (clock.size() <= stream) clock.resize(stream + 1, 0);
  clock[stream]++;
  launches++;
  return stream;
}

void Checker::record(EventState& event, int device, int64_t id) {
  std::lock_guard<std::mutex> lock(mutex);
  event.clock = streams[launch_locked(device, id)].clock;
  event.device = device;
  event.recorded = true;
  event.denied = 0;
  event.time_s =
      std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Checker::wait(int device, int64_t id, const EventState& event) {
  std::lock_guard<std::mutex> lock(mutex);
  Stream stream = launch_locked(device, id);
  join(streams[stream].clock, event.clock);
}

bool Checker::is_done(EventState& event) {
  std::lock_guard<std::mutex> lock(mutex);
  if (covers(host_, event.clock)) return true;
  if (event.denied++ < denials) return false;
  join(host_, event.clock);  // the host has seen that it is done, and acts later
  return true;
}

bool Checker::host_knows(const EventState& event) {
  std::lock_guard<std::mutex> lock(mutex);
  return covers(host_, event.clock);
}

void Checker::host_waits_for(const Clock& clock, const std::string& what,
                             const std::string& where, bool raises) {
  if (raises && sync_debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation (", what, ")");
  TORCH_CHECK(!(raises && sync_debug_mode == 2), "called a synchronizing CUDA operation (", what, ")");
  std::lock_guard<std::mutex> lock(mutex);
  join(host_, clock);
  waits[what + " | " + where]++;
}

void Checker::host_waits_for_stream(int device, int64_t id) {
  std::string where = python_lines();
  Clock clock;
  {
    std::lock_guard<std::mutex> lock(mutex);
    clock = streams[stream_locked(device, id)].clock;
  }
  host_waits_for(clock, "stream", where, true);
}

void Checker::host_waits_for_device(int device) {
  std::string where = python_lines();
  Clock clock;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto& stream : streams)
      if (stream.device == device) join(clock, stream.clock);
  }
  host_waits_for(clock, "device", where, true);
}

// -- memory ---------------------------------------------------------------------------------------

void Checker::add(std::unique_ptr<Block> block) {
  std::lock_guard<std::mutex> lock(mutex);
  if (block->device == kPinned) {
    pinned_++;
  } else {
    // A caching allocator hands out what was freed on the same stream, where earlier kernels may
    // still use it. Other streams must come after all that this stream was given so far.
    Clock& clock = streams[block->owner].clock;
    if (block->owner < clock.size() && clock[block->owner] > 0)
      block->accesses.push_back({0, block->nbytes, block->owner, clock[block->owner], true,
                                 "kernels before its allocation"});
  }
  char* base = block->base;
  blocks_[base] = std::move(block);
}

std::unique_ptr<Block> Checker::remove(void* base, const std::string& where) {
  std::lock_guard<std::mutex> lock(mutex);
  auto at = blocks_.find(static_cast<char*>(base));
  if (at == blocks_.end()) return nullptr;
  std::unique_ptr<Block> block = std::move(at->second);
  blocks_.erase(at);
  if (block->device == kPinned) {
    // torch's allocator of pinned memory itself waits for the copies that use a block
    pinned_--;
    return block;
  }
  if (!enabled) return block;
  // the next allocation of the owner's stream may have this memory at once
  Clock now = streams[block->owner].clock;
  join(now, host_);
  for (const Access& access : block->accesses) {
    if (access.stream == block->owner || covers(now, access.stream, access.time) ||
        block->recorded.count(access.stream))
      continue;
    std::ostringstream text;
    text << "a block of " << block->nbytes << " bytes from " << block->born << " on "
         << name_of(block->owner) << " is freed by {" << where << "} while the "
         << verb(access.writes) << " by " << access.by << " on " << name_of(access.stream)
         << " may still run";
    report_locked("freed early", text.str(), block->born + access.by + where);
  }
  return block;
}

Block* Checker::block_locked(const void* address) {
  auto* wanted = static_cast<char*>(const_cast<void*>(address));
  auto at = blocks_.upper_bound(wanted);
  if (at == blocks_.begin()) return nullptr;
  Block* block = (--at)->second.get();
  return wanted < block->base + std::max<size_t>(block->nbytes, 1) ? block : nullptr;
}

bool Checker::is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  Block* block = block_locked(address);
  return block != nullptr && block->device == kPinned;
}

int Checker::device_of(const void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  Block* block = block_locked(address);
  TORCH_CHECK(block != nullptr && block->device != kPinned, "not an address of a device");
  return block->device;
}

void Checker::record_stream(const void* address, int device, int64_t id) {
  std::lock_guard<std::mutex> lock(mutex);
  if (Block* block = block_locked(address)) block->recorded.insert(stream_locked(device, id));
}

// -- accesses -------------------------------------------------------------------------------------

void Checker::access_locked(Block* block, size_t begin, size_t end, Stream stream, bool writes,
                            const std::string& by) {
  if (!enabled || block == nullptr || end <= begin) return;
  const Clock& now = streams[stream].clock;
  size_t kept = 0;
  for (size_t i = 0; i < block->accesses.size(); i++) {
    Access& other = block->accesses[i];
    bool overlaps = other.begin < end && begin < other.end;
    bool is_ordered = covers(now, other.stream, other.time);
    if (overlaps && !is_ordered && (writes || other.writes)) {
      std::ostringstream text;
      text << "the " << verb(writes) << " by " << by << " on " << name_of(stream) << " of "
           << (block->device == kPinned ? "pinned" : "device") << " memory (bytes " << begin
           << " to " << end << " of " << block->nbytes << " from " << block->born
           << ") does not wait for the " << verb(other.writes) << " by " << other.by << " on "
           << name_of(other.stream);
      bool recycled = other.by == "kernels before its allocation";
      report_locked(recycled ? "recycled" : "race", text.str(),
                    by + other.by + name_of(stream) + name_of(other.stream));
    }
    // Later accesses need not look at one that is ordered before this one and covered by it.
    bool is_inside = begin <= other.begin && other.end <= end;
    bool is_superseded =
        is_ordered && is_inside && (writes || (!other.writes && other.stream == stream));
    if (is_superseded) continue;
    if (kept != i) block->accesses[kept] = std::move(other);
    kept++;
  }
  block->accesses.resize(kept);
  block->accesses.push_back({begin, end, stream, now[stream], writes, by});
}

void Checker::host_access(const void* address, size_t nbytes, bool writes, const std::string& by) {
  std::lock_guard<std::mutex> lock(mutex);
  Block* block = block_locked(address);
  if (!enabled || block == nullptr || block->device != kPinned || nbytes == 0) return;
  size_t begin = static_cast<const char*>(address) - block->base;
  for (const Access& access : block->accesses) {
    bool overlaps = access.begin < begin + nbytes && begin < access.end;
    if (!overlaps || !(writes || access.writes) || covers(host_, access.stream, access.time))
      continue;
    std::ostringstream text;
    text << "the host's " << verb(writes) << " by " << by << " of pinned memory from "
         << block->born << " does not wait for the " << verb(access.writes) << " by " << access.by
         << " on " << name_of(access.stream);
    report_locked("host race", text.str(), by + access.by);
  }
}

// -- results --------------------------------------------------------------------------------------

void Checker::report_locked(const std::string& kind, const std::string& text,
                            const std::string& key) {
  if (reported_.insert(kind + key).second) findings.push_back({kind, text});
}

void Checker::clear() {
  std::lock_guard<std::mutex> lock(mutex);
  findings.clear();
  waits.clear();
  kernels.clear();
  reported_.clear();
  launches = 0;
}

}  // namespace simulated
