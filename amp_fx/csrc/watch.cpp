// Detects writes to weights, and checks whether cached values computed from weights are fresh.
//
// A storage is watched through c10::StorageImpl::set_materializer, a hook of torch 2.13 that runs
// when code requests a mutable pointer. The hook does not change the storage, so any thread may
// set, run or clear it at any time.
//
// The Python interface:
//   CacheSlot   one cached value, and the state of its weights when it was computed
//   GraphCache  the cached values that one compiled graph uses
//   functions   on tensors and slots, at the end of the file
//
// The GIL protects everything except `records` and the atomic counters, which `on_write` changes on
// any thread without the GIL.
//
// torch/library.h and torch's headers with pybind11 take longer to compile than the rest of this
// file. The few declarations needed from them are repeated below.

#include <Python.h>
#include <structmember.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/COW.h>
#ifndef _WIN32
#include <pthread.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

// From torch/csrc/autograd/python_variable.h; `has_known_layout` checks the struct at import.
extern PyObject* THPVariableClass;
extern PyObject* ParameterClass;
PyObject* THPVariable_Wrap(const at::TensorBase&);
struct THPVariable {
  PyObject_HEAD
  at::Tensor cdata;
};

namespace {

using c10::StorageImpl;

bool is_tensor(PyObject* object) {
  return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

const at::Tensor& unpack(PyObject* object) {
  TORCH_CHECK_TYPE(is_tensor(object), "expected a tensor, got ", Py_TYPE(object)->tp_name);
  return reinterpret_cast<THPVariable*>(object)->cdata;
}

struct Decref {
  void operator()(PyObject* object) const {
    Py_DECREF(object);
  }
};
using Ref = std::unique_ptr<PyObject, Decref>; // an owned reference

Ref ref_to(PyObject* object) {
  return Ref(Py_XNewRef(object));
}

PyObject* result(bool value) {
  return PyBool_FromLong(value);
}
PyObject* result(PyObject* value) {
  return value;
}

// Wraps a function for Python: C++ exceptions become Python exceptions.
template <auto function>
PyObject* method(PyObject* self, PyObject* args) {
  try {
    if constexpr (std::is_void_v<decltype(function(self, args))>) {
      function(self, args);
      return Py_NewRef(Py_None);
    } else {
      return result(function(self, args));
    }
  } catch (const c10::TypeError& error) {
    PyErr_SetString(PyExc_TypeError, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* item(PyObject* tuple, Py_ssize_t i) {
  return PyTuple_GET_ITEM(tuple, i);
}

// ------------------------------------------------------------------------ writes to storages

thread_local const uint64_t this_thread = [] {
  static std::atomic<uint64_t> latest{0};
  return ++latest;
}();
std::atomic<int64_t> num_in_flight{0}; // running calls, which read cached values
thread_local int64_t num_in_flight_here = 0; // those of this thread

// Maximum duration of a write after its pointer was requested, as assumed by other threads.
constexpr int64_t write_ns = 50'000'000;
constexpr int64_t collective_ns = 1'000'000'000;
constexpr int64_t ns_per_byte = 10;
constexpr int64_t recent_writer_ns = 60'000'000'000;

int64_t now() { // nanoseconds
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

struct Write {
  uint64_t thread = 0; // 0: no write
  int64_t begin = 0, end = 0; // `end` is an upper bound
};

// Protects all records. Fork handlers hold it during a fork, because a child process lacks the
// thread that would unlock it. Never destroyed, because storages outlive static objects.
std::mutex& records_mutex() {
  static auto* mutex = new std::mutex();
  return *mutex;
}

// The writes to one storage. The weak reference prevents reuse of the storage's address.
class Record {
 public:
  explicit Record(const c10::intrusive_ptr<StorageImpl>& s)
      : storage(s), num_bytes_(static_cast<int64_t>(s->nbytes())) {}

  c10::weak_intrusive_ptr<StorageImpl> storage;
  uint64_t hooked_at = 0; // value of `writes` when the hook was set
  bool is_distrusted = false; // written without a signal, so every call recomputes its values
  std::atomic<uint64_t> writes{1}; // increases when a write begins; slots use 0 for "not computed"

  // Records a write by this thread. A collective on the storage is assumed to be complete then.
  void note_write() {
    {
      std::lock_guard<std::mutex> guard(records_mutex());
      if (latest_.thread != this_thread) {
        previous_ = latest_;
      }
      latest_ = {this_thread, now(), end_of(write_ns)};
      end_of_collective_ = 0;
    }
    writes++;
  }
  void note_collective() {
    {
      std::lock_guard<std::mutex> guard(records_mutex());
      end_of_collective_ = end_of(collective_ns);
    }
    writes++;
  }
  // Called if the hook was missing: the latest writers may be writing again without a signal.
  void expect_more_writes() {
    std::lock_guard<std::mutex> guard(records_mutex());
    for (Write* write : {&latest_, &previous_}) {
      const bool is_recent = write == &latest_ || now() - write->begin < recent_writer_ns;
      if (write->thread != 0 && write->thread != this_thread && is_recent) {
        write->end = end_of(write_ns);
      }
    }
  }
  // Returns true if another thread or a collective may still be writing.
  bool may_be_in_progress() {
    std::lock_guard<std::mutex> guard(records_mutex());
    const int64_t time = now();
    const auto is_running = [time](const Write& write) {
      return write.thread != this_thread && time < write.end;
    };
    return time < end_of_collective_ || is_running(latest_) || is_running(previous_);
  }

 private:
  int64_t end_of(int64_t duration) const {
    return now() + duration + ns_per_byte * num_bytes_;
  }
  int64_t num_bytes_;
  Write latest_, previous_; // the latest writes of the latest two threads
  int64_t end_of_collective_ = 0;
};
using RecordRef = std::shared_ptr<Record>;

std::unordered_map<StorageImpl*, RecordRef>& records() { // never destroyed, like the mutex
  static auto* map = new std::unordered_map<StorageImpl*, RecordRef>();
  return *map;
}

RecordRef find_record(StorageImpl* storage) {
  std::lock_guard<std::mutex> guard(records_mutex());
  auto it = records().find(storage);
  return it == records().end() ? nullptr : it->second;
}

RecordRef record_of(const c10::intrusive_ptr<StorageImpl>& storage) {
  std::lock_guard<std::mutex> guard(records_mutex());
  auto& map = records();
  auto existing = map.find(storage.get());
  if (existing != map.end() && !existing->second->storage.expired()) {
    return existing->second;
  }
  // Removes expired records if the size is a power of two: amortized constant cost per record.
  if ((map.size() & (map.size() - 1)) == 0) {
    for (auto it = map.begin(); it != map.end();) {
      it = it->second->storage.expired() ? map.erase(it) : std::next(it);
    }
  }
  auto record = std::make_shared<Record>(storage);
  map[storage.get()] = record;
  return record;
}

// Counts every request for a mutable pointer as a write. amp_fx's graphs read weights through
// aliases, whose storages are separate (`alias`).
void on_write(StorageImpl* storage) {
  if (RecordRef record = find_record(storage)) {
    record->note_write();
  }
}

// Accesses two private members of StorageImpl by explicit template instantiation, which ignores
// access rules: the hook, and the flag that makes torch call it. Threads that set and clear the
// hook concurrently can leave only one of the two set.
template <typename Tag, typename Tag::type member>
struct Reveal {
  friend typename Tag::type reveal(Tag) {
    return member;
  }
};
struct Hook {
  using type = c10::MaterializeFn StorageImpl::*;
  friend type reveal(Hook);
};
template struct Reveal<Hook, &StorageImpl::materialize_fn_>;
struct IsChecked {
  using type = bool StorageImpl::*;
  friend type reveal(IsChecked);
};
template struct Reveal<IsChecked, &StorageImpl::has_mutable_data_ptr_check_>;

bool is_hooked(const StorageImpl* storage) {
  return storage->*reveal(Hook{}) == &on_write && storage->*reveal(IsChecked{});
}

bool set_hook(StorageImpl* storage) {
  if (is_hooked(storage)) {
    return true;
  }
  if (storage->*reveal(Hook{}) == &on_write) {
    storage->clear_materializer();
  }
  if (storage->has_materializer()) {
    return false;
  }
  storage->set_materializer(&on_write);
  return true;
}

void remove_hook(StorageImpl* storage) {
  if (storage->*reveal(Hook{}) == &on_write) {
    storage->clear_materializer();
  }
}

// Sets the hook, which torch removes when it runs. If the hook is missing although no write was
// recorded, records one; writes by other threads may then be in progress without a signal.
bool watch_again(StorageImpl* storage, Record& record) {
  if (!is_hooked(storage)) {
    record.expect_more_writes();
    if (record.hooked_at == record.writes) {
      record.note_write();
    }
    if (!set_hook(storage)) {
      return false;
    }
    record.hooked_at = record.writes;
  }
  return true;
}

// Returns true if torch allocated the storage. NumPy or other processes may write to other memory.
bool is_own(const StorageImpl& storage) {
  return c10::impl::cow::has_simple_data_ptr(storage);
}

const at::Tensor* plain_tensor(PyObject* object) {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (type != THPVariableClass && type != ParameterClass) {
    return nullptr;
  }
  const at::Tensor& tensor = unpack(object);
  return tensor.has_storage() ? &tensor : nullptr;
}

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<int64_t>(tensor._version());
}

const char* data_of(const at::Tensor& tensor) { // does not run the hook
  const auto* impl = tensor.unsafeGetTensorImpl();
  StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  return static_cast<const char*>(storage->_mutable_data_ptr_no_checks().get()) +
      impl->storage_offset() * impl->itemsize();
}

// --------------------------------------------------------------------------- one cached value

// Number of elements that are sampled from each weight, at equal distances.
constexpr uint64_t num_sampled = 64;

uint64_t mixed(uint64_t x) { // splitmix64
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

// Enumerates the distinct elements of a strided tensor by address. Dimensions of size 1 and
// expanded dimensions are omitted. Dimensions that are adjacent in memory are merged, so a dense
// tensor of any layout has one dimension.
struct Elements {
  struct Dim {
    uint64_t size, stride; // bytes
  };
  c10::SmallVector<Dim, 4> dims; // outermost first
  uint64_t count = 0;

  explicit Elements() = default;
  explicit Elements(const at::Tensor& tensor) : count(tensor.numel() != 0) {
    for (int64_t i = 0; i < tensor.dim(); ++i) {
      if (tensor.size(i) > 1 && tensor.stride(i) != 0) {
        const auto size = static_cast<uint64_t>(tensor.size(i));
        dims.push_back({size, static_cast<uint64_t>(tensor.stride(i)) * tensor.element_size()});
        count *= size;
      }
    }
    std::stable_sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) {
      return a.stride > b.stride;
    });
    size_t last = 0;
    for (size_t i = 1; i < dims.size(); ++i) {
      if (dims[last].stride == dims[i].size * dims[i].stride) {
        dims[last] = {dims[last].size * dims[i].size, dims[i].stride};
      } else {
        dims[++last] = dims[i];
      }
    }
    dims.resize(std::min(dims.size(), last + 1));
  }
  uint64_t offset(uint64_t index) const { // in bytes; no division if there is one dimension
    uint64_t result = 0;
    for (size_t i = dims.size(); i-- > 0;) {
      result += (i == 0 ? index : index % dims[i].size) * dims[i].stride;
      index = i == 0 ? 0 : index / dims[i].size;
    }
    return result;
  }
};

// Elements of a weight in host memory, recorded when a value was computed.
struct Sample {
  std::vector<uint64_t> bits;
  Elements elements;
  uint64_t seed = 0;
  size_t item_size = 0;
  size_t turn = 0; // of the element that the next call compares
  const char* next = nullptr; // its address

  // Returns the address of a sampled element. Called for every weight in every call.
  const char* sampled_at(const char* data, size_t i) const {
    const uint64_t count = elements.count;
    if (count <= num_sampled) {
      return data + elements.offset(i);
    }
    const uint64_t from = i * count / num_sampled, to = (i + 1) * count / num_sampled;
    return data + elements.offset(from + ((mixed(seed + i) >> 32) * (to - from) >> 32));
  }
  uint64_t read(const char* address) const { // the first 8 bytes of larger elements
    uint64_t bytes = 0;
    std::memcpy(&bytes, address, std::min(item_size, sizeof(bytes)));
    return bytes;
  }
  void record(const at::Tensor& weight, const char* data) {
    elements = weight.is_cpu() ? Elements(weight) : Elements();
    item_size = weight.element_size();
    seed = mixed(seed + static_cast<uint64_t>(now()));
    bits.resize(std::min(num_sampled, elements.count));
    for (size_t i = 0; i < bits.size(); ++i) {
      bits[i] = read(sampled_at(data, i));
    }
    turn = turn < bits.size() ? turn : 0;
    next = bits.empty() ? nullptr : sampled_at(data, turn);
  }
  // Compares one element with its sample; each call compares the next element.
  bool agrees(const char* data) {
    if (next == nullptr) {
      return true;
    }
    const bool is_equal = read(next) == bits[turn];
    turn = turn + 1 < bits.size() ? turn + 1 : 0;
    next = sampled_at(data, turn);
    return is_equal;
  }
};

// State of one weight when a value was computed from it.
struct WeightState {
  RecordRef record;
  StorageImpl* storage = nullptr;
  const char* data = nullptr;
  at::DimVector sizes, strides;
  at::ScalarType type = at::kFloat;
  bool is_conj = false, is_neg = false;
  uint64_t seen = 0; // `record->writes` before the computation; 0: stale
  int64_t version = 0;
  uint64_t next_seen = 0; // `seen` and `version` of the computation in progress
  int64_t next_version = 0;
  Sample sample;
  bool is_suspect = false; // the latest sample differed

  void bind(const at::Tensor& weight) {
    const auto owner = weight.storage().getWeakStorageImpl().lock();
    *this = WeightState();
    record = record_of(owner);
    storage = owner.get();
    data = data_of(weight);
    sizes = at::DimVector(weight.sizes());
    strides = at::DimVector(weight.strides());
    type = weight.scalar_type();
    is_conj = weight.is_conj();
    is_neg = weight.is_neg();
  }
  // Loads what `is_fresh` and the sample read. Weights are rarely in the processor's cache, because
  // compiled code reads the values computed from them.
  void prefetch() const {
#ifdef __GNUC__
    __builtin_prefetch(sample.next);
    __builtin_prefetch(record.get());
    __builtin_prefetch(sample.bits.data() + sample.turn);
#endif
  }
  bool matches(const at::Tensor& weight) const {
    return weight.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == storage &&
        data_of(weight) == data && weight.scalar_type() == type && weight.sizes() == sizes &&
        weight.strides() == strides && weight.is_conj() == is_conj && weight.is_neg() == is_neg;
  }
  bool is_fresh(const at::Tensor& weight) const {
    return seen != 0 && seen == record->writes && !record->is_distrusted && is_hooked(storage) &&
        version_of(weight) == version;
  }
  // Records the sample before the computation, so that it detects all later writes.
  void start(const at::Tensor& weight) {
    watch_again(storage, *record);
    next_seen = record->writes;
    next_version = version_of(weight);
    sample.record(weight, data);
  }
  void finish() {
    seen = is_hooked(storage) && !record->may_be_in_progress() ? next_seen : 0;
    version = next_version;
    is_suspect = false;
  }
};

struct CacheSlot {
  PyObject_HEAD
  PyObject* value; // nullptr or None before the first computation and after eviction
  std::vector<WeightState>* states;
  char is_alias; // the value is an alias of the weight, so it is always fresh
  long long hits, made;
};

CacheSlot* as_slot(PyObject* object) {
  return reinterpret_cast<CacheSlot*>(object);
}

bool has_value(const CacheSlot* slot) {
  return slot->value != nullptr && slot->value != Py_None;
}

using Tensors = c10::SmallVector<const at::Tensor*, 4>;

Tensors tensors_of(PyObject* tuple) {
  Tensors tensors;
  TORCH_CHECK_TYPE(PyTuple_Check(tuple), "expected a tuple of tensors, got ", Py_TYPE(tuple)->tp_name);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    PyObject* object = PyTuple_GET_ITEM(tuple, i);
    tensors.push_back(plain_tensor(object));
    TORCH_CHECK_TYPE(
        tensors.back() != nullptr, "expected a tuple of plain tensors, got ", Py_TYPE(object)->tp_name);
  }
  return tensors;
}

// Returns true if all weights still have the memory and layout that the slot is bound to.
bool matches(const CacheSlot* slot, const at::Tensor* const* weights) {
  for (const WeightState& state : *slot->states) {
    state.prefetch();
    if (*weights == nullptr || !state.matches(**weights++)) {
      return false;
    }
  }
  return true;
}

bool is_fresh(const CacheSlot* slot, const at::Tensor* const* weights) {
  if (!has_value(slot) || slot->is_alias) {
    return has_value(slot);
  }
  for (const WeightState& state : *slot->states) {
    if (!state.is_fresh(**weights++)) {
      return false;
    }
  }
  return true;
}

PyObject* new_slot(PyObject* type, PyObject* args) {
  PyObject* weights = nullptr;
  int is_alias = 0;
  if (!PyArg_ParseTuple(args, "O!p", &PyTuple_Type, &weights, &is_alias)) {
    return nullptr;
  }
  auto states = std::make_unique<std::vector<WeightState>>();
  for (const at::Tensor* weight : tensors_of(weights)) {
    states->emplace_back().bind(*weight);
  }
  PyObject* slot = PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type), 0);
  if (slot != nullptr) {
    as_slot(slot)->is_alias = static_cast<char>(is_alias);
    as_slot(slot)->states = states.release();
  }
  return slot;
}

PyObject* slot_new(PyTypeObject* type, PyObject* args, PyObject*) {
  return method<new_slot>(reinterpret_cast<PyObject*>(type), args);
}

void slot_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_CLEAR(as_slot(self)->value);
  delete as_slot(self)->states;
  type->tp_free(self);
  Py_DECREF(type);
}

void slot_bind(PyObject* self, PyObject* weights) {
  const Tensors tensors = tensors_of(weights);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (WeightState& state = as_slot(self)->states->at(i); !state.matches(*tensors[i])) {
      state.bind(*tensors[i]);
    }
  }
}

bool slot_matches(PyObject* self, PyObject* weights) {
  return matches(as_slot(self), tensors_of(weights).data());
}

bool slot_is_fresh(PyObject* self, PyObject* weights) {
  const Tensors tensors = tensors_of(weights);
  return matches(as_slot(self), tensors.data()) && is_fresh(as_slot(self), tensors.data());
}

void slot_invalidate(PyObject* self, PyObject*) {
  for (WeightState& state : *as_slot(self)->states) {
    state.seen = state.next_seen = 0;
  }
}

PyObject* slot_suspects(PyObject* self, PyObject*) {
  PyObject* suspects = PyList_New(0);
  for (const WeightState& state : *as_slot(self)->states) {
    PyList_Append(suspects, state.is_suspect ? Py_True : Py_False);
  }
  return suspects;
}

// adopt(other, positions): copies weight states from a started slot.
void slot_adopt(PyObject* self, PyObject* args) {
  auto& states = *as_slot(self)->states;
  for (size_t i = 0; i < states.size(); ++i) {
    const auto position = PyLong_AsSize_t(item(item(args, 1), i));
    states[i] = as_slot(item(args, 0))->states->at(position);
  }
}

PyMethodDef slot_methods[] = {
    {"bind", method<slot_bind>, METH_O, "Binds the slot to the weights' memory; the value is stale if that moved."},
    {"matches", method<slot_matches>, METH_O, "True if the slot is bound to the weights' memory."},
    {"is_fresh", method<slot_is_fresh>, METH_O, "True if no signal indicates a write."},
    {"invalidate", method<slot_invalidate>, METH_NOARGS, "Makes the value stale."},
    {"suspects", method<slot_suspects>, METH_NOARGS, "For each weight, True if a sampled element differed."},
    {"adopt", method<slot_adopt>, METH_VARARGS, "Copies weight states from another slot."},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef slot_members[] = {
    {"value", T_OBJECT, offsetof(CacheSlot, value), 0, "The value, or None."},
    {"hits", T_LONGLONG, offsetof(CacheSlot, hits), READONLY, "Number of calls that found the value fresh."},
    {"made", T_LONGLONG, offsetof(CacheSlot, made), READONLY, "Number of computations."},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot slot_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(slot_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(slot_dealloc)},
    {Py_tp_methods, slot_methods},
    {Py_tp_members, slot_members},
    {0, nullptr}};
PyType_Spec slot_spec = {
    "amp_fx_watch.CacheSlot", sizeof(CacheSlot), 0, Py_TPFLAGS_DEFAULT, slot_slots};

// --------------------------------------------------------------------------- refreshing values

// Calls a function with each slot and its tuple of weights.
template <typename Function>
void for_each(PyObject* slots, PyObject* weights, Function function) {
  TORCH_CHECK(
      PyTuple_GET_SIZE(slots) == PyTuple_GET_SIZE(weights),
      "expected one tuple of weights per slot, got ",
      PyTuple_GET_SIZE(weights),
      " for ",
      PyTuple_GET_SIZE(slots));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(slots); ++i) {
    function(i, as_slot(item(slots, i)), tensors_of(item(weights, i)));
  }
}

// stale(slots, weights) -> positions of stale slots, without duplicates. Counts a hit for each
// fresh slot.
PyObject* stale(PyObject*, PyObject* args) {
  PyObject* positions = PyList_New(0);
  std::unordered_set<CacheSlot*> visited;
  for_each(item(args, 0), item(args, 1), [&](Py_ssize_t i, CacheSlot* slot, const Tensors& weights) {
    if (matches(slot, weights.data()) && is_fresh(slot, weights.data())) {
      slot->hits++;
    } else if (visited.insert(slot).second) {
      PyList_Append(positions, Ref(PyLong_FromSsize_t(i)).get());
    }
  });
  return positions;
}

// start(slots, weights): call before values are computed.
void start(PyObject*, PyObject* args) {
  for_each(item(args, 0), item(args, 1), [](Py_ssize_t, CacheSlot* slot, const Tensors& weights) {
    for (size_t i = 0; i < weights.size(); ++i) {
      slot->states->at(i).start(*weights[i]);
    }
  });
}

// finish(slots, values): stores the computed values.
void finish(PyObject*, PyObject* args) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(item(args, 0)); ++i) {
    CacheSlot* slot = as_slot(item(item(args, 0), i));
    for (WeightState& state : *slot->states) {
      state.finish();
    }
    slot->made++;
    Py_XDECREF(std::exchange(slot->value, Py_NewRef(item(item(args, 1), i))));
  }
}

bool is_in_use(PyObject* object) { // by Python, by a view, or by a pending backward
  if (Py_REFCNT(object) > 1) {
    return true;
  }
  if (PyTuple_CheckExact(object)) {
    PyObject** items = &PyTuple_GET_ITEM(object, 0);
    return std::any_of(items, items + PyTuple_GET_SIZE(object), is_in_use);
  }
  const at::Tensor* tensor = plain_tensor(object);
  if (tensor == nullptr || tensor->use_count() > 1) {
    return true;
  }
  const c10::Storage& storage = tensor->storage();
  // The Python object of a storage owns a reference to it even if nothing refers to the object.
  PyObject* wrapper = storage.unsafeGetStorageImpl()->pyobj_slot()->load_pyobj();
  const bool has_idle_object = wrapper != nullptr && Py_REFCNT(wrapper) == 1;
  return storage.use_count() > (has_idle_object ? 2 : 1);
}

// reusable(slots) -> for each slot, its value if nothing else reads the value's memory, else None.
PyObject* reusable(PyObject*, PyObject* slots) {
  PyObject* values = PyList_New(PyTuple_GET_SIZE(slots));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(slots); ++i) {
    const CacheSlot* slot = as_slot(item(slots, i));
    const bool is_free = num_in_flight == 0 && has_value(slot) && !is_in_use(slot->value);
    PyList_SET_ITEM(values, i, Py_NewRef(is_free ? slot->value : Py_None));
  }
  return values;
}

// -------------------------------------------------------------------- cached values of a graph

// Slots for one set of weights that a graph was called with. `code` is compiled code whose constants
// are the values of the first slots. It owns references to them, so their addresses are not reused.
struct CachedSet {
  std::vector<Ref> refs; // to the slots
  std::vector<CacheSlot*> slots;
  Ref entries, code; // `code` is null if all values are inputs
  std::vector<PyObject*> bound_values; // the constants

  bool is_dead() const {
    return !std::all_of(slots.begin(), slots.end(), has_value);
  }
  bool has_code() const {
    const auto is_same = [](const CacheSlot* slot, PyObject* v) { return slot->value == v; };
    const auto end = slots.begin() + static_cast<std::ptrdiff_t>(bound_values.size());
    return code && std::equal(slots.begin(), end, bound_values.begin(), is_same);
  }
};
using CachedSets = std::vector<CachedSet>; // change it before elements are destroyed: that may run Python

struct GraphCache {
  PyObject_HEAD
  std::vector<Py_ssize_t>* sources; // positions of the weights, in the order of the slots
  std::vector<Py_ssize_t>* passed;
  CachedSets* sets; // several if the graph is compiled for several layers
  Py_ssize_t num_constants; // the values of the first slots are constants of the code
  char samples, found_mismatch;
};

constexpr size_t max_sets = 256;

GraphCache* as_graph_cache(PyObject* object) {
  return reinterpret_cast<GraphCache*>(object);
}

// Returns the weights of all slots, in order; nullptr for arguments that are not plain tensors.
const Tensors& weights_in(const GraphCache* cache, PyObject* args) {
  static thread_local Tensors weights;
  weights.clear();
  for (Py_ssize_t position : *cache->sources) {
    weights.push_back(plain_tensor(item(args, position)));
  }
  return weights;
}

template <typename Test>
bool all_of(const CachedSet& set, const Tensors& weights, Test test) {
  const at::Tensor* const* next = weights.data();
  for (CacheSlot* slot : set.slots) {
    if (!test(slot, next)) {
      return false;
    }
    next += slot->states->size();
  }
  return true;
}

CachedSet* find_set(const GraphCache* cache, const Tensors& weights) {
  for (CachedSet& set : *cache->sets) {
    if (all_of(set, weights, matches)) {
      return &set;
    }
  }
  return nullptr;
}

// Returns true if all values of a set are fresh. Compares one sampled element of each weight. A
// concurrent write does not count as a mismatch: it increases `writes` before it changes elements.
bool are_fresh(GraphCache* cache, const CachedSet& set, const Tensors& weights) {
  bool are_all_fresh = true;
  all_of(set, weights, [&](CacheSlot* slot, const at::Tensor* const* sources) {
    const bool was_fresh = is_fresh(slot, sources);
    bool is_suspect = false;
    for (WeightState& state : *slot->states) {
      state.is_suspect = cache->samples && was_fresh && !slot->is_alias &&
          !state.sample.agrees(state.data);
      is_suspect |= state.is_suspect;
    }
    cache->found_mismatch |= is_suspect && is_fresh(slot, sources);
    are_all_fresh &= was_fresh && !is_suspect;
    return true;
  });
  return are_all_fresh;
}

void begin_call(PyObject*, PyObject*) {
  num_in_flight++;
  num_in_flight_here++;
}

void leave_call(PyObject*, PyObject*) {
  num_in_flight--;
  num_in_flight_here--;
}

// enter(args) -> (code, inputs), and begins the call, if all values are fresh; otherwise None.
PyObject* graph_cache_enter(PyObject* self, PyObject* args) {
  GraphCache* cache = as_graph_cache(self);
  const auto num_passed = static_cast<Py_ssize_t>(cache->passed->size());
  // Allocates first, because an allocation may run the garbage collector, which may call graphs.
  PyObject* inputs = PyList_New(num_passed);
  Ref code_and_inputs(inputs == nullptr ? nullptr : Py_BuildValue("ON", Py_None, inputs));
  if (!code_and_inputs) {
    return nullptr;
  }
  const Tensors& weights = weights_in(cache, args);
  CachedSet* set = find_set(cache, weights);
  cache->found_mismatch = 0;
  const bool is_hit = set != nullptr && are_fresh(cache, *set, weights) &&
      (cache->num_constants == 0 || set->has_code());
  if (!is_hit) {
    return Py_NewRef(Py_None);
  }
  for (Py_ssize_t i = 0; i < num_passed; ++i) {
    PyList_SET_ITEM(inputs, i, Py_NewRef(item(args, (*cache->passed)[i])));
  }
  for (size_t n = 0; n < set->slots.size(); ++n) { // appending does not run the garbage collector
    CacheSlot* slot = set->slots[n];
    slot->hits++;
    if (n < static_cast<size_t>(cache->num_constants)) {
      continue;
    }
    if (!PyTuple_CheckExact(slot->value)) {
      PyList_Append(inputs, slot->value);
      continue;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(slot->value); ++i) {
      PyList_Append(inputs, item(slot->value, i));
    }
  }
  if (set->code) {
    Py_DECREF(Py_None);
    PyTuple_SET_ITEM(code_and_inputs.get(), 0, Py_NewRef(set->code.get()));
  }
  begin_call(nullptr, nullptr);
  return code_and_inputs.release();
}

// entries(args) -> the entries that were passed to `remember` for these weights, or None.
PyObject* graph_cache_entries(PyObject* self, PyObject* args) {
  const CachedSet* set = find_set(as_graph_cache(self), weights_in(as_graph_cache(self), args));
  return Py_NewRef(set == nullptr || set->is_dead() ? Py_None : set->entries.get());
}

// remember(slots, entries, code): adds a set of slots, and drops sets with evicted values.
void graph_cache_remember(PyObject* self, PyObject* args) {
  PyObject *slots = item(args, 0), *code = item(args, 2);
  CachedSet set{{}, {}, ref_to(item(args, 1)), ref_to(code == Py_None ? nullptr : code), {}};
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(slots); ++i) {
    set.refs.push_back(ref_to(item(slots, i)));
    set.slots.push_back(as_slot(item(slots, i)));
    if (i < as_graph_cache(self)->num_constants) {
      set.bound_values.push_back(set.slots.back()->value);
    }
  }
  CachedSets remaining, old = std::move(*as_graph_cache(self)->sets);
  for (CachedSet& other : old) {
    if (old.size() < max_sets && !other.is_dead() && other.slots != set.slots) {
      remaining.push_back(std::move(other));
    }
  }
  remaining.push_back(std::move(set));
  *as_graph_cache(self)->sets = std::move(remaining);
}

// evict(): drops sets with evicted values, and code that is bound to values that were replaced.
void graph_cache_evict(PyObject* self, PyObject*) {
  CachedSets remaining, old = std::move(*as_graph_cache(self)->sets);
  std::vector<Ref> dropped;
  for (CachedSet& set : old) {
    if (!set.has_code()) {
      dropped.push_back(std::move(set.code));
    }
    if (!set.is_dead()) {
      remaining.push_back(std::move(set));
    }
  }
  *as_graph_cache(self)->sets = std::move(remaining);
}

std::vector<Py_ssize_t>* indices_of(PyObject* tuple) {
  auto* indices = new std::vector<Py_ssize_t>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    indices->push_back(PyLong_AsSsize_t(item(tuple, i)));
  }
  return indices;
}

// GraphCache(sources, passed, num_constants, samples)
PyObject* graph_cache_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *sources = nullptr, *passed = nullptr;
  Py_ssize_t num_constants = 0;
  int samples = 0;
  if (!PyArg_ParseTuple(
          args, "O!O!np", &PyTuple_Type, &sources, &PyTuple_Type, &passed, &num_constants, &samples)) {
    return nullptr;
  }
  GraphCache* cache = as_graph_cache(type->tp_alloc(type, 0));
  if (cache != nullptr) {
    cache->sources = indices_of(sources);
    cache->passed = indices_of(passed);
    cache->sets = new CachedSets();
    cache->num_constants = num_constants;
    cache->samples = static_cast<char>(samples);
  }
  return reinterpret_cast<PyObject*>(cache);
}

void graph_cache_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete as_graph_cache(self)->sources;
  delete as_graph_cache(self)->passed;
  delete as_graph_cache(self)->sets;
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef graph_cache_methods[] = {
    {"enter", method<graph_cache_enter>, METH_O, "Code and inputs if all values are fresh, else None."},
    {"begin", method<begin_call>, METH_NOARGS, "Begins a call."},
    {"leave", method<leave_call>, METH_NOARGS, "Ends a call."},
    {"entries", method<graph_cache_entries>, METH_O, "The entries for a set of weights, or None."},
    {"remember", method<graph_cache_remember>, METH_VARARGS, "Adds slots for a set of weights."},
    {"evict", method<graph_cache_evict>, METH_NOARGS, "Drops sets and code of evicted values."},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef graph_cache_members[] = {
    {"found_mismatch", T_BOOL, offsetof(GraphCache, found_mismatch), READONLY, "A sample differed."},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot graph_cache_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(graph_cache_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(graph_cache_dealloc)},
    {Py_tp_methods, graph_cache_methods},
    {Py_tp_members, graph_cache_members},
    {0, nullptr}};
PyType_Spec graph_cache_spec = {
    "amp_fx_watch.GraphCache", sizeof(GraphCache), 0, Py_TPFLAGS_DEFAULT, graph_cache_slots};

// ------------------------------------------------------------------------ functions on tensors

StorageImpl* storage_in(PyObject* object) {
  return unpack(object).storage().unsafeGetStorageImpl();
}

RecordRef record_in(PyObject* object) {
  return record_of(unpack(object).storage().getWeakStorageImpl().lock());
}

bool watch(PyObject*, PyObject* object) {
  StorageImpl* storage = storage_in(object);
  return is_own(*storage) && watch_again(storage, *record_in(object));
}

// Unlike !watch, false for a lazy clone, whose memory becomes torch's own when it is written.
bool is_foreign(PyObject*, PyObject* object) {
  StorageImpl* storage = storage_in(object);
  return !is_own(*storage) &&
      !c10::impl::cow::is_cow_data_ptr(storage->_mutable_data_ptr_no_checks());
}

void unwatch(PyObject*, PyObject* object) {
  if (is_hooked(storage_in(object))) {
    remove_hook(storage_in(object));
  }
}

bool watched(PyObject*, PyObject* object) {
  return is_hooked(storage_in(object));
}

void distrust(PyObject*, PyObject* object) {
  record_in(object)->is_distrusted = true;
}

bool is_distrusted(PyObject*, PyObject* object) {
  const RecordRef record = find_record(storage_in(object));
  return record != nullptr && record->is_distrusted;
}

// mark(list): records a write to each tensor.
void mark(PyObject*, PyObject* list) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    PyObject* object = PyList_GET_ITEM(list, i);
    if (is_tensor(object) && unpack(object).has_storage()) {
      on_write(storage_in(object));
    }
  }
}

// share_record(dtensor, local): writes to a DTensor count as writes to its local tensor. The
// DTensor's own storage is empty and only identifies it.
void share_record(PyObject*, PyObject* args) {
  const at::Tensor& whole = unpack(item(args, 0));
  if (whole.has_storage()) {
    const RecordRef record = record_in(item(args, 1));
    std::lock_guard<std::mutex> guard(records_mutex());
    records()[whole.storage().unsafeGetStorageImpl()] = record;
  }
}

// Returns a tensor that shares a weight's memory and version counter but has a separate storage, so
// that pointer requests do not run the hook. The alias owns a reference to the weight's storage.
PyObject* alias(PyObject*, PyObject* object) {
  const at::Tensor& source = unpack(object);
  const auto owner = source.storage().getWeakStorageImpl().lock();
  using Owner = c10::intrusive_ptr<StorageImpl>;
  c10::DataPtr data(
      const_cast<void*>(owner->data_ptr().get()),
      new Owner(owner),
      [](void* context) { delete static_cast<Owner*>(context); },
      owner->device());
  auto storage = c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), owner->nbytes(), std::move(data), nullptr, false);
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), source.key_set(), source.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(source.sizes(), source.strides());
  impl->set_storage_offset(source.storage_offset());
  if (!source.is_inference()) {
    impl->set_version_counter(source.unsafeGetTensorImpl()->version_counter());
  }
  return THPVariable_Wrap(std::move(result));
}

// --------------------------------------------------- ops that write tensor lists, collectives

// CUDA kernels that write tensor lists (foreach, fused) request const pointers, which does not run
// the hook. Collectives run the hook, but write later.
struct Written {
  std::vector<size_t> positions; // of the arguments that an op writes
  bool is_collective;
  int64_t async_position; // of the argument `async_op`; -1 if the op has none
};
std::unordered_map<std::string, Written>& list_ops() {
  static auto* map = new std::unordered_map<std::string, Written>();
  return *map;
}

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

// Records a write to a tensor or to each tensor of a list.
void mark_written(const c10::IValue& value, bool is_asynchronous) {
  if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      mark_written(element, is_asynchronous);
    }
  } else if (value.isTensor() && value.toTensor().defined() && value.toTensor().has_storage()) {
    StorageImpl* storage = value.toTensor().storage().unsafeGetStorageImpl();
    if (RecordRef record = find_record(storage)) {
      is_asynchronous ? record->note_collective() : record->note_write();
    }
  }
}

void list_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  const Written& description = list_ops().at(full_name(op.operator_name()));
  const bool is_asynchronous = description.is_collective &&
      (description.async_position < 0 || (*stack)[first + description.async_position].toBool());
  std::vector<c10::IValue> written;
  for (size_t index : description.positions) {
    written.push_back((*stack)[first + index]);
    mark_written(written.back(), is_asynchronous);
  }
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  for (const c10::IValue& value : written) { // again: a thread may have refreshed values meanwhile
    mark_written(value, is_asynchronous);
  }
}

// Returns the arguments that an op may write: lists that its schema marks as written; for a
// collective, all tensors and lists, because schemas of collectives do not mark writes.
Written written_by(const c10::FunctionSchema& schema, bool is_collective) {
  Written result{{}, is_collective, -1};
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* written = arguments[i].alias_info();
    const bool is_list = arguments[i].type()->kind() == c10::TypeKind::ListType;
    const bool is_marked = written != nullptr && written->isWrite() && !arguments[i].is_out();
    const bool is_tensor = arguments[i].type()->kind() == c10::TypeKind::TensorType;
    if (is_collective ? is_list || is_tensor : is_list && is_marked) {
      result.positions.push_back(i);
    }
    if (arguments[i].name() == "async_op" || arguments[i].name() == "asyncOp") {
      result.async_position = static_cast<int64_t>(i);
    }
  }
  return result;
}

// A lazy clone sets the copy-on-write hook, and torch allows one hook per storage. The hook of
// amp_fx is removed first, which counts as a write. Values of the weight stay stale until either
// tensor is written.
void lazy_clone_kernel(const c10::OperatorHandle&, c10::DispatchKeySet, c10::Stack* stack) {
  const at::Tensor source = stack->back().toTensor();
  stack->pop_back();
  StorageImpl* storage = source.storage().unsafeGetStorageImpl();
  remove_hook(storage);
  auto cloned = c10::impl::cow::lazy_clone_storage(*storage);
  if (cloned == nullptr) { // an alias, or memory that torch did not allocate
    stack->emplace_back(source.clone());
    return;
  }
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(cloned)), source.key_set(), source.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(source.sizes(), source.strides());
  impl->set_storage_offset(source.storage_offset());
  stack->emplace_back(std::move(result));
}

// Registers a kernel before each op that writes lists of tensors, and before each collective.
void watch_list_ops(PyObject*, PyObject*) {
  static auto* kernels = new std::vector<c10::RegistrationHandleRAII>();
  if (!kernels->empty()) {
    return;
  }
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const bool is_collective = name.name.rfind("c10d::", 0) == 0;
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || (!is_collective && name.name.rfind("aten::", 0) != 0)) {
      continue;
    }
    Written description = written_by(op->schema(), is_collective);
    if (description.positions.empty()) {
      continue;
    }
    list_ops()[full_name(name)] = std::move(description);
    kernels->push_back(c10::Dispatcher::singleton().registerImpl(
        name,
        c10::DispatchKey::ADInplaceOrView,
        c10::KernelFunction::makeFromBoxedFunction<&list_kernel>(),
        std::nullopt,
        nullptr,
        "amp_fx"));
  }
  for (auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::XPU}) {
    kernels->push_back(c10::Dispatcher::singleton().registerImpl(
        {"aten::_lazy_clone", ""},
        key,
        c10::KernelFunction::makeFromBoxedFunction<&lazy_clone_kernel>(),
        std::nullopt,
        nullptr,
        "amp_fx"));
  }
}

PyObject* watched_list_ops(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (const auto& entry : list_ops()) {
    PyList_Append(names, Ref(PyUnicode_FromString(entry.first.c_str())).get());
  }
  return names;
}

PyMethodDef functions[] = {
    {"stale", method<stale>, METH_VARARGS, "Positions of slots that are not fresh."},
    {"start", method<start>, METH_VARARGS, "Call before values are computed."},
    {"finish", method<finish>, METH_VARARGS, "Stores computed values."},
    {"reusable", method<reusable>, METH_O, "Values that can be overwritten."},
    {"watch", method<watch>, METH_O, "Watches a tensor's storage; False if that is impossible."},
    {"is_foreign", method<is_foreign>, METH_O, "True if torch did not allocate the memory."},
    {"unwatch", method<unwatch>, METH_O, "Stops watching a tensor's storage."},
    {"watched", method<watched>, METH_O, "True while the hook is set."},
    {"distrust", method<distrust>, METH_O, "Makes all values of a tensor permanently stale."},
    {"is_distrusted", method<is_distrusted>, METH_O, "True after distrust."},
    {"mark", method<mark>, METH_O, "Records a write to each tensor of a list."},
    {"share_record", method<share_record>, METH_VARARGS, "Links a DTensor to its local tensor."},
    {"alias", method<alias>, METH_O, "A tensor with the same memory and a separate storage."},
    {"watch_list_ops", method<watch_list_ops>, METH_NOARGS, "Watches foreach and fused ops."},
    {"watched_list_ops", method<watched_list_ops>, METH_NOARGS, "Names of the watched ops."},
    {nullptr, nullptr, 0, nullptr}};

#ifndef _WIN32
void before_fork() {
  records_mutex().lock();
}
void after_fork() {
  records_mutex().unlock();
}
void after_fork_in_child() {
  num_in_flight = num_in_flight_here; // other threads do not exist in the child
  records_mutex().unlock();
}
#endif

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "amp_fx_watch", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

bool add_type(PyObject* module, const char* name, PyType_Spec* spec) {
  PyObject* type = PyType_FromSpec(spec);
  return type != nullptr && PyModule_AddObject(module, name, type) == 0;
}

// Returns true if the Python object of a tensor has the layout declared above, by its `_cdata`.
bool has_known_layout() {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::DispatchKeySet(c10::DispatchKey::CPU), caffe2::TypeMeta::Make<float>(), c10::kCPU);
  PyObject* object = THPVariable_Wrap(tensor);
  PyObject* address = object == nullptr ? nullptr : PyObject_GetAttrString(object, "_cdata");
  const bool is_known = address != nullptr &&
      PyLong_AsVoidPtr(address) == reinterpret_cast<THPVariable*>(object)->cdata.unsafeGetTensorImpl();
  Py_XDECREF(address);
  Py_XDECREF(object);
  return is_known;
}

} // namespace

PyMODINIT_FUNC PyInit_amp_fx_watch() {
  if (!has_known_layout()) {
    if (!PyErr_Occurred()) {
      PyErr_SetString(PyExc_ImportError, "the layout of THPVariable in this torch is unknown");
    }
    return nullptr;
  }
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr || !add_type(module, "CacheSlot", &slot_spec) ||
      !add_type(module, "GraphCache", &graph_cache_spec)) {
    return nullptr;
  }
#ifndef _WIN32
  pthread_atfork(before_fork, after_fork, after_fork_in_child);
#endif
  return module;
}
