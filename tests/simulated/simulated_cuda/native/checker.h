// Finds work that is not ordered although it should be: vector clocks over byte ranges.
//
// Each stream, the host, and each event have a clock. A clock maps every stream to the number of
// kernels of that stream that are known to be done. Kernel A comes before kernel B if B's clock
// covers A. Kernels run at once, so numbers are always right; the clocks tell what a real device
// would have been free to reorder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace simulated {

using Stream = size_t;                 // position in Checker::streams
using Clock = std::vector<uint64_t>;   // by stream; missing entries are 0
constexpr int kPinned = -1;            // "device" of pinned host memory

struct Access {
  size_t begin, end;  // bytes of the block
  Stream stream;
  uint64_t time;      // of that stream
  bool writes;
  std::string by;     // operator and Python lines
};

struct Block {
  char* base;
  size_t nbytes;
  int device;         // or kPinned
  Stream owner;       // the stream for which it was allocated
  std::string born;   // operator and Python lines
  std::vector<Access> accesses;
  std::set<Stream> recorded;  // by record_stream
};

struct StreamState {
  int device;
  int64_t id;
  Clock clock;
};

struct EventState {
  Clock clock;
  int device = 0;
  double time_s = 0;
  bool recorded = false;
  int denied = 0;     // queries that were answered "not yet"
};

struct Finding {
  std::string kind;   // "race", "freed early", "recycled", "host race"
  std::string text;
};

class Checker {
 public:
  // Every method with a name that ends in _locked needs this mutex held; the others take it.
  std::mutex mutex;

  // -- streams and events
  Stream stream_locked(int device, int64_t id);
  Stream launch_locked(int device, int64_t id);  // the next kernel of a stream; after the host
  void record(EventState& event, int device, int64_t id);
  void wait(int device, int64_t id, const EventState& event);
  bool is_done(EventState& event);
  void host_waits_for(const Clock& clock, const std::string& what, const std::string& where,
                      bool raises);
  void host_waits_for_stream(int device, int64_t id);
  void host_waits_for_device(int device);
  bool host_knows(const EventState& event);

  // -- memory
  void add(std::unique_ptr<Block> block);
  std::unique_ptr<Block> remove(void* base, const std::string& where);
  Block* block_locked(const void* address);
  bool is_pinned(const void* address);
  int device_of(const void* address);
  void record_stream(const void* address, int device, int64_t id);
  bool has_pinned_memory() const { return pinned_ > 0; }

  // -- accesses
  void access_locked(Block* block, size_t begin, size_t end, Stream stream, bool writes,
                     const std::string& by);
  void host_access(const void* address, size_t nbytes, bool writes, const std::string& by);

  // -- results
  std::vector<Finding> findings;
  std::map<std::string, int64_t> waits;     // "what | lines" -> times
  std::map<std::string, int64_t> kernels;   // operator -> times
  uint64_t launches = 0;
  void clear();

  // -- options
  bool enabled = true;        // look for findings
  int64_t sync_debug_mode = 0;  // of torch.cuda: 1 warns, 2 raises
  int denials = 0;            // queries of an event that are answered "not yet"

  std::string name_of(Stream stream) const;
  std::vector<StreamState> streams;

 private:
  void report_locked(const std::string& kind, const std::string& text, const std::string& key);

  Clock host_;
  std::map<std::pair<int, int64_t>, Stream> numbers_;
  std::map<char*, std::unique_ptr<Block>> blocks_;
  std::set<std::string> reported_;
  size_t pinned_ = 0;
};

Checker& checker();

// The Python lines of the calling thread that are not torch's, innermost first. What frees memory
// must not wait for the interpreter's lock, and may lack it.
std::string python_lines(bool wait_for_interpreter = true);
std::string described(const std::string& what);  // with Python lines

}  // namespace simulated
