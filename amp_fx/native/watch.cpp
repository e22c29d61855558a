// Sees writes to weights, and checks many values computed from weights at once.
//
// A storage is watched through the hook that torch 2.13 has for "somebody asks for a mutable
// pointer" (c10::StorageImpl::set_materializer). Nothing about the storage changes, so any thread
// may set, fire or clear the hook at any time. Before 2.13 a storage is made copy-on-write
// instead (`arm` below), which is not safe next to other threads.
//
// Python sees `Kept`, a value and what its weights were when it was made; `Look`, the values of
// one graph; and functions on tensors. All are called with the GIL held, which orders everything
// here that is not atomic. Only `on_write` is called by any thread without it.

//
// Headers of torch with pybind11, and torch/library.h, take longer to compile than everything
// here: what is needed of them is declared below.

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

#if __has_include(<c10/core/StorageMaterializer.h>)
#define HAS_HOOK 1
#else
#define HAS_HOOK 0
#endif

// Of torch/csrc/autograd/python_variable.h; `has_known_layout` checks the struct at import.
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
  TORCH_CHECK_TYPE(is_tensor(object), "expected a tensor, not ", Py_TYPE(object)->tp_name);
  return reinterpret_cast<THPVariable*>(object)->cdata;
}

// Calls a function; what it throws becomes an exception of Python's.
template <typename Function>
PyObject* guarded(Function function) {
  try {
    return function();
  } catch (const c10::TypeError& error) {
    PyErr_SetString(PyExc_TypeError, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// ------------------------------------------------------------------ storages and their writes

// What is known of one storage. The weak reference keeps its address from being used again.
struct Record {
  explicit Record(const c10::intrusive_ptr<StorageImpl>& s)
      : storage(s), num_bytes(static_cast<int64_t>(s->nbytes())) {}
  c10::weak_intrusive_ptr<StorageImpl> storage;
  int64_t num_bytes;
  uint64_t armed_at = 0; // the writes when the hook was set
  bool is_distrusted = false; // written where nothing sees it: nothing made of it is ever fresh
  std::atomic<uint64_t> writes{1}; // raised when a write begins; 0 stands for "never made"
  std::atomic<uint64_t> writer{0}; // the thread of the latest write
  std::atomic<int64_t> settled_at{0}; // when that write has ended for sure
  int64_t written_at = 0; // when a write was last noted; these under `noting`
  uint64_t last_writer = 0, other_writer = 0; // the latest thread, and the one before; 0: none
  int64_t other_at = 0;
  std::mutex noting;
};
using RecordRef = std::shared_ptr<Record>;

// Never destroyed: storages outlive static objects.
std::mutex& records_mutex() {
  static auto* mutex = new std::mutex();
  return *mutex;
}
std::unordered_map<StorageImpl*, RecordRef>& records() {
  static auto* map = new std::unordered_map<StorageImpl*, RecordRef>();
  return *map;
}

constexpr uint64_t any_thread = 0; // the writer of a collective: torch's own threads
constexpr uint64_t several_threads = UINT64_MAX; // that write at once, or may do so
std::atomic<uint64_t> next_thread{1};
thread_local const uint64_t this_thread = next_thread++;
std::atomic<int64_t> num_in_flight{0}; // calls that read values
thread_local int64_t num_own_in_flight = 0;

int64_t now() { // nanoseconds
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

// How long a write may go on after its pointer was taken, for all but the thread that took it.
constexpr int64_t settling_ns = 50'000'000;
constexpr int64_t settling_ns_of_collective = 1'000'000'000;
constexpr int64_t settling_ns_per_byte = 10;
constexpr int64_t memory_of_writers_ns = 60'000'000'000;

// Waits longer before what is read is trusted.
void settle(Record& record, uint64_t writer, int64_t settling) {
  std::lock_guard<std::mutex> guard(record.noting);
  const int64_t time = now();
  const bool was_collective = record.writer == any_thread; // who writes after one has waited for it
  const bool is_alone = was_collective || record.writer == writer || time >= record.settled_at;
  record.writer = is_alone ? writer : several_threads;
  const int64_t end = time + settling + settling_ns_per_byte * record.num_bytes;
  record.settled_at = was_collective ? end : std::max(record.settled_at.load(), end);
}

void note_write(Record& record, uint64_t writer = this_thread, int64_t settling = settling_ns) {
  if (writer != any_thread) { // collectives are seen each time, whether or not there is a hook
    std::lock_guard<std::mutex> guard(record.noting);
    if (record.last_writer != writer) {
      record.other_writer = std::exchange(record.last_writer, writer);
      record.other_at = record.written_at;
    }
    record.written_at = now();
  }
  settle(record, writer, settling);
  record.writes++;
}

// Whether another thread may be at a write that nothing saw, as the hook was gone: one that was seen
// writing before.
bool may_others_write(Record& record) {
  std::lock_guard<std::mutex> guard(record.noting);
  const bool is_others = record.last_writer != 0 && record.last_writer != this_thread;
  return is_others || (record.other_writer != 0 && record.other_writer != this_thread &&
                       now() - record.other_at < memory_of_writers_ns);
}

bool is_settling(const Record& record) {
  return record.writer != this_thread && now() < record.settled_at;
}

RecordRef find_record(StorageImpl* storage) {
  std::lock_guard<std::mutex> guard(records_mutex());
  auto found = records().find(storage);
  return found == records().end() ? nullptr : found->second;
}

RecordRef record_of(const c10::intrusive_ptr<StorageImpl>& storage) {
  std::lock_guard<std::mutex> guard(records_mutex());
  auto& map = records();
  auto found = map.find(storage.get());
  if (found != map.end() && !found->second->storage.expired()) {
    return found->second;
  }
  if ((map.size() & (map.size() - 1)) == 0) { // now and then, at a cost that stays linear
    for (auto it = map.begin(); it != map.end();) {
      it = it->second->storage.expired() ? map.erase(it) : std::next(it);
    }
  }
  auto record = std::make_shared<Record>(storage);
  map[storage.get()] = record;
  return record;
}

#if HAS_HOOK

// Reads two private members of StorageImpl, by the rule that explicit instantiation may name
// them: whether our hook is set, and whether torch will look at it. Two threads that clear and
// set it at once can leave the one without the other.
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

// Every request for a mutable pointer counts as a write. Graphs of ours read weights through
// aliases, which have storages of their own.
void on_write(StorageImpl* storage) {
  if (RecordRef record = find_record(storage)) {
    note_write(*record);
  }
}

bool is_armed(const StorageImpl* storage) {
  return storage->*reveal(Hook{}) == &on_write && storage->*reveal(IsChecked{});
}

bool arm(StorageImpl* storage) {
  if (is_armed(storage)) {
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

void disarm(StorageImpl* storage) {
  if (storage->*reveal(Hook{}) == &on_write) {
    storage->clear_materializer();
  }
}

#else

bool is_armed(const StorageImpl* storage) {
  return c10::impl::cow::is_cow_data_ptr(storage->data_ptr());
}

bool arm(StorageImpl* storage) {
  return is_armed(storage) || c10::impl::cow::lazy_clone_storage(*storage) != nullptr;
}

void disarm(StorageImpl* storage) {
  storage->mutable_data();
}

#endif

// Watches a storage; that it was not watched, without a write that tells why, is a write. The hook
// is gone once it was called: other threads that write may be at a write that it did not see.
bool watch_again(StorageImpl* storage, Record& record) {
  if (!is_armed(storage)) {
    if (may_others_write(record)) {
      settle(record, several_threads, settling_ns);
    }
    if (!HAS_HOOK || record.armed_at == record.writes) {
      note_write(record);
    }
    if (!arm(storage)) {
      return false;
    }
    record.armed_at = record.writes;
  }
  return true;
}

// Whether torch allocated a storage itself: others are written by those who did (NumPy, other
// processes).
bool is_own(const StorageImpl& storage) {
#if HAS_HOOK
  return c10::impl::cow::has_simple_data_ptr(storage);
#else
  return is_armed(&storage) || c10::impl::cow::has_simple_data_ptr(storage);
#endif
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

const char* data_of(const at::Tensor& tensor) { // asks for no pointer
  const auto* impl = tensor.unsafeGetTensorImpl();
  StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  return static_cast<const char*>(storage->_mutable_data_ptr_no_checks().get()) +
      impl->storage_offset() * impl->itemsize();
}

// --------------------------------------------------------------------------------- one value

// A weight is divided into so many stretches, and one element of each is remembered.
constexpr uint64_t num_sampled = 64;

uint64_t mixed(uint64_t x) { // splitmix64
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

// Some elements of a weight in host memory, as they were when a value was made.
struct Sample {
  std::vector<uint64_t> bits;
  uint64_t seed = 0;
  uint64_t numel = 0;
  size_t item_size = 0;
  size_t turn = 0;

  const char* place(const char* data, size_t i) const { // without a division: it is asked often
    if (numel <= num_sampled) {
      return data + i * item_size;
    }
    const uint64_t from = i * numel / num_sampled, to = (i + 1) * numel / num_sampled;
    return data + (from + ((mixed(seed + i) >> 32) * (to - from) >> 32)) * item_size;
  }
  uint64_t read(const char* place) const { // of numbers of 16 bytes the first 8
    return item_size == 4 ? read_as<uint32_t>(place)
        : item_size == 2  ? read_as<uint16_t>(place)
        : item_size == 1  ? read_as<uint8_t>(place)
                          : read_as<uint64_t>(place);
  }
  template <typename Bits>
  static uint64_t read_as(const char* place) {
    Bits found;
    std::memcpy(&found, place, sizeof(found));
    return found;
  }
  void take(const at::Tensor& weight, const char* data) {
    const bool is_readable = weight.is_cpu() && weight.is_non_overlapping_and_dense();
    numel = is_readable ? static_cast<uint64_t>(weight.numel()) : 0;
    item_size = weight.element_size();
    seed = mixed(seed + static_cast<uint64_t>(now()));
    bits.resize(std::min(num_sampled, numel));
    for (size_t i = 0; i < bits.size(); ++i) {
      bits[i] = read(place(data, i));
    }
  }
  // Whether an element is what it was; another one each time.
  bool agrees(const char* data) {
    if (bits.empty()) {
      return true;
    }
    const size_t i = turn < bits.size() ? turn : 0;
    turn = i + 1;
    return read(place(data, i)) == bits[i];
  }
};

// What one weight was when a value was made of it.
struct Stamp {
  RecordRef record;
  StorageImpl* storage = nullptr;
  const char* data = nullptr;
  at::DimVector sizes, strides;
  at::ScalarType type = at::kFloat;
  bool is_conj = false, is_neg = false;
  uint64_t seen = 0; // the record's writes when it was made; 0: make it again
  int64_t version = 0;
  uint64_t next_seen = 0; // the same for the value that is being made
  int64_t next_version = 0;
  Sample sample;
  bool is_suspect = false; // the sample differed

  void bind(const at::Tensor& weight) {
    const auto owner = weight.storage().getWeakStorageImpl().lock();
    *this = Stamp();
    record = record_of(owner);
    storage = owner.get();
    data = data_of(weight);
    sizes = at::DimVector(weight.sizes());
    strides = at::DimVector(weight.strides());
    type = weight.scalar_type();
    is_conj = weight.is_conj();
    is_neg = weight.is_neg();
  }
  bool lies_where(const at::Tensor& weight) const {
    return weight.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == storage &&
        data_of(weight) == data && weight.scalar_type() == type && weight.sizes() == sizes &&
        weight.strides() == strides && weight.is_conj() == is_conj && weight.is_neg() == is_neg;
  }
  bool is_fresh(const at::Tensor& weight) const {
    return seen != 0 && seen == record->writes && !record->is_distrusted && is_armed(storage) &&
        version_of(weight) == version;
  }
  // The sample is taken before the value is made: what is written from here on differs from it.
  void start(const at::Tensor& weight) {
    watch_again(storage, *record);
    next_seen = record->writes;
    next_version = version_of(weight);
    sample.take(weight, data);
  }
  void finish() {
    seen = is_armed(storage) && !is_settling(*record) ? next_seen : 0;
    version = next_version;
    is_suspect = false;
  }
};

struct Kept {
  PyObject_HEAD
  PyObject* value; // nullptr or None before it is made, and once dropped
  std::vector<Stamp>* stamps;
  char is_alias; // the weight's own bytes, which no write makes stale
  long long hits, made;
};

Kept* as_kept(PyObject* object) {
  return reinterpret_cast<Kept*>(object);
}

bool has_value(const Kept* kept) {
  return kept->value != nullptr && kept->value != Py_None;
}

using Tensors = c10::SmallVector<const at::Tensor*, 4>;

Tensors tensors_of(PyObject* tuple) {
  Tensors found;
  TORCH_CHECK_TYPE(PyTuple_Check(tuple), "expected a tuple of tensors");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    found.push_back(plain_tensor(PyTuple_GET_ITEM(tuple, i)));
    TORCH_CHECK_TYPE(found.back() != nullptr, "expected a tuple of plain tensors");
  }
  return found;
}

// `weights` are those of a value, as many as it has stamps.
bool lies_where(const Kept* kept, const at::Tensor* const* weights) {
  for (const Stamp& stamp : *kept->stamps) {
    if (*weights == nullptr || !stamp.lies_where(**weights++)) {
      return false;
    }
  }
  return true;
}

bool is_fresh(const Kept* kept, const at::Tensor* const* weights) {
  if (!has_value(kept) || kept->is_alias) {
    return has_value(kept);
  }
  for (const Stamp& stamp : *kept->stamps) {
    if (!stamp.is_fresh(**weights++)) {
      return false;
    }
  }
  return true;
}

PyObject* kept_new(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject* weights = nullptr;
    int is_alias = 0;
    if (!PyArg_ParseTuple(args, "O!p", &PyTuple_Type, &weights, &is_alias)) {
      return nullptr;
    }
    auto stamps = std::make_unique<std::vector<Stamp>>();
    for (const at::Tensor* weight : tensors_of(weights)) {
      stamps->emplace_back().bind(*weight);
    }
    Kept* kept = as_kept(type->tp_alloc(type, 0));
    if (kept != nullptr) {
      kept->is_alias = static_cast<char>(is_alias);
      kept->stamps = stamps.release();
    }
    return reinterpret_cast<PyObject*>(kept);
  });
}

void kept_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_CLEAR(as_kept(self)->value);
  delete as_kept(self)->stamps;
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* kept_bind(PyObject* self, PyObject* weights) {
  return guarded([&] {
    const Tensors found = tensors_of(weights);
    for (size_t i = 0; i < found.size(); ++i) {
      if (Stamp& stamp = as_kept(self)->stamps->at(i); !stamp.lies_where(*found[i])) {
        stamp.bind(*found[i]);
      }
    }
    return Py_NewRef(Py_None);
  });
}

PyObject* kept_lies_where(PyObject* self, PyObject* weights) {
  return guarded([&] {
    return PyBool_FromLong(lies_where(as_kept(self), tensors_of(weights).data()));
  });
}

PyObject* kept_is_fresh(PyObject* self, PyObject* weights) {
  return guarded([&] {
    const Tensors found = tensors_of(weights);
    const Kept* kept = as_kept(self);
    return PyBool_FromLong(lies_where(kept, found.data()) && is_fresh(kept, found.data()));
  });
}

PyObject* kept_invalidate(PyObject* self, PyObject*) {
  for (Stamp& stamp : *as_kept(self)->stamps) {
    stamp.seen = stamp.next_seen = 0;
  }
  return Py_NewRef(Py_None);
}

PyObject* kept_suspects(PyObject* self, PyObject*) {
  PyObject* found = PyList_New(0);
  for (const Stamp& stamp : *as_kept(self)->stamps) {
    PyList_Append(found, stamp.is_suspect ? Py_True : Py_False);
  }
  return found;
}

// adopt(other, positions): takes the weights to be what they are to another value, which was
// started; they stand there at these positions.
PyObject* kept_adopt(PyObject* self, PyObject* const* args, Py_ssize_t) {
  return guarded([&]() -> PyObject* {
    auto& stamps = *as_kept(self)->stamps;
    for (size_t i = 0; i < stamps.size(); ++i) {
      const auto position = PyLong_AsSize_t(PyTuple_GET_ITEM(args[1], i));
      stamps[i] = as_kept(args[0])->stamps->at(position);
    }
    return Py_NewRef(Py_None);
  });
}

PyCFunction as_method(PyObject* (*method)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(method));
}

PyMethodDef kept_methods[] = {
    {"bind", kept_bind, METH_O, "Says where the weights lie now; those that moved are stale."},
    {"lies_where", kept_lies_where, METH_O, "Whether the weights are where they were."},
    {"is_fresh", kept_is_fresh, METH_O, "Whether no signal tells of a write."},
    {"invalidate", kept_invalidate, METH_NOARGS, "Makes the value stale."},
    {"suspects", kept_suspects, METH_NOARGS, "By weight, whether a sampled element differed."},
    {"adopt", as_method(kept_adopt), METH_FASTCALL, "Takes what another value knows of the weights."},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef kept_members[] = {
    {"value", T_OBJECT, offsetof(Kept, value), 0, "The value; None if there is none."},
    {"hits", T_LONGLONG, offsetof(Kept, hits), READONLY, "Times that a call found it fresh."},
    {"made", T_LONGLONG, offsetof(Kept, made), READONLY, "Times that it was made."},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot kept_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(kept_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(kept_dealloc)},
    {Py_tp_methods, kept_methods},
    {Py_tp_members, kept_members},
    {0, nullptr}};
PyType_Spec kept_spec = {"amp_fx_watch.Kept", sizeof(Kept), 0, Py_TPFLAGS_DEFAULT, kept_slots};

// ------------------------------------------------------------------------ making values again

// Calls a function with each of some values and its weights, of which there is a tuple for each.
template <typename Function>
void for_each(PyObject* kepts, PyObject* weights, Function function) {
  TORCH_CHECK(PyTuple_GET_SIZE(kepts) == PyTuple_GET_SIZE(weights), "as many values as weights");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kepts); ++i) {
    function(i, as_kept(PyTuple_GET_ITEM(kepts, i)), tensors_of(PyTuple_GET_ITEM(weights, i)));
  }
}

// stale(kepts, weights) -> the positions of the values that are not fresh, each value once; to
// others it is a hit.
PyObject* stale(PyObject*, PyObject* const* args, Py_ssize_t) {
  return guarded([&]() -> PyObject* {
    PyObject* found = PyList_New(0);
    std::unordered_set<Kept*> known;
    for_each(args[0], args[1], [&](Py_ssize_t i, Kept* kept, const Tensors& sources) {
      if (!lies_where(kept, sources.data()) || !is_fresh(kept, sources.data())) {
        if (!known.insert(kept).second) {
          return;
        }
        PyObject* position = PyLong_FromSsize_t(i);
        PyList_Append(found, position);
        Py_DECREF(position);
      } else {
        kept->hits++;
      }
    });
    return found;
  });
}

// start(kepts, weights): values are about to be made.
PyObject* start(PyObject*, PyObject* const* args, Py_ssize_t) {
  return guarded([&]() -> PyObject* {
    for_each(args[0], args[1], [&](Py_ssize_t, Kept* kept, const Tensors& sources) {
      for (size_t i = 0; i < sources.size(); ++i) {
        kept->stamps->at(i).start(*sources[i]);
      }
    });
    return Py_NewRef(Py_None);
  });
}

void set_made(Kept* kept, PyObject* value) {
  for (Stamp& stamp : *kept->stamps) {
    stamp.finish();
  }
  kept->made++;
  Py_XDECREF(std::exchange(kept->value, Py_NewRef(value)));
}

// finish(kepts, values): they are made.
PyObject* finish(PyObject*, PyObject* const* args, Py_ssize_t) {
  return guarded([&]() -> PyObject* {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[0]); ++i) {
      set_made(as_kept(PyTuple_GET_ITEM(args[0], i)), PyTuple_GET_ITEM(args[1], i));
    }
    return Py_NewRef(Py_None);
  });
}

// finish_step(kepts, values, weights): a step made them, and wrote the weights through aliases.
// They are of the weights as those are now, unless somebody else wrote them since `start`. To all
// other values the step is a write.
PyObject* finish_step(PyObject*, PyObject* const* args, Py_ssize_t) {
  return guarded([&]() -> PyObject* {
    std::unordered_set<Kept*> valid;
    std::unordered_set<Record*> written;
    for_each(args[0], args[2], [&](Py_ssize_t, Kept* kept, const Tensors& sources) {
      bool is_valid = lies_where(kept, sources.data());
      for (const Stamp& stamp : *kept->stamps) {
        is_valid &= stamp.next_seen == stamp.record->writes;
        written.insert(stamp.record.get());
      }
      if (is_valid) {
        valid.insert(kept);
      }
    });
    for (Record* record : written) {
      note_write(*record);
    }
    for_each(args[0], args[2], [&](Py_ssize_t i, Kept* kept, const Tensors& sources) {
      for (size_t j = 0; valid.count(kept) > 0 && j < sources.size(); ++j) {
        kept->stamps->at(j).start(*sources[j]);
      }
      if (valid.count(kept) > 0) {
        set_made(kept, PyTuple_GET_ITEM(args[1], i));
      }
    });
    return Py_NewRef(Py_None);
  });
}

bool is_read(PyObject* object) { // as an object, a tensor or a view, by a backward, say
  if (Py_REFCNT(object) > 1) {
    return true;
  }
  if (PyTuple_CheckExact(object)) {
    PyObject** items = &PyTuple_GET_ITEM(object, 0);
    return std::any_of(items, items + PyTuple_GET_SIZE(object), is_read);
  }
  const at::Tensor* tensor = plain_tensor(object);
  return tensor == nullptr || tensor->use_count() > 1 || tensor->storage().use_count() > 1;
}

// reusable(kepts) -> each value whose memory may be written, since nobody can be reading it;
// None in the place of others.
PyObject* reusable(PyObject*, PyObject* kepts) {
  const bool is_busy = num_in_flight > 0;
  PyObject* found = PyList_New(PyTuple_GET_SIZE(kepts));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kepts); ++i) {
    PyObject* value = as_kept(PyTuple_GET_ITEM(kepts, i))->value;
    const bool is_free = !is_busy && value != nullptr && value != Py_None && !is_read(value);
    PyList_SET_ITEM(found, i, Py_NewRef(is_free ? value : Py_None));
  }
  return found;
}

// ----------------------------------------------------------------------- the values of a graph

// One set of weights that a graph was called with. The run is what was made of the values; it
// keeps those alive, so that comparing addresses tells whether they are still the same.
struct Place {
  std::vector<Kept*> kepts; // owned
  PyObject* entries; // owned
  PyObject* run; // owned, or nullptr
  std::vector<PyObject*> of_run;

  bool is_dead() const {
    return !std::all_of(kepts.begin(), kepts.end(), has_value);
  }
  bool has_run() const {
    for (size_t i = 0; run != nullptr && i < kepts.size(); ++i) {
      if (kepts[i]->value != of_run[i]) {
        return false;
      }
    }
    return run != nullptr;
  }
};

struct Look {
  PyObject_HEAD
  std::vector<Py_ssize_t>* sources; // positions of the weights, value after value
  std::vector<Py_ssize_t>* passed;
  std::vector<Place>* places; // one graph may serve many layers, each with its own weights
  Py_ssize_t num_delivered; // so many values are inputs of the graph
  char samples, runs, found_mismatch;
};

constexpr size_t max_places = 256;

Look* as_look(PyObject* object) {
  return reinterpret_cast<Look*>(object);
}

void release(const std::vector<Place>& places) {
  for (const Place& place : places) {
    for (Kept* kept : place.kepts) {
      Py_DECREF(kept);
    }
    Py_DECREF(place.entries);
    Py_XDECREF(place.run);
  }
}

// The weights of all values, one value's after the other's; nullptr for what is no plain tensor.
const Tensors& weights_in(const Look* look, PyObject* args) {
  static thread_local Tensors found;
  found.clear();
  for (Py_ssize_t position : *look->sources) {
    found.push_back(plain_tensor(PyTuple_GET_ITEM(args, position)));
  }
  return found;
}

template <typename Test>
bool all_of(const Place& place, const Tensors& weights, Test test) {
  const at::Tensor* const* next = weights.data();
  for (Kept* kept : place.kepts) {
    if (!test(kept, next)) {
      return false;
    }
    next += kept->stamps->size();
  }
  return true;
}

Place* find_place(const Look* look, const Tensors& weights) {
  for (Place& place : *look->places) {
    if (all_of(place, weights, lies_where)) {
      return &place;
    }
  }
  return nullptr;
}

// Whether all values of a place are fresh. Compares an element of each weight of fresh values with
// what it was. Who writes meanwhile, in another thread, raises `writes` first: no mismatch is that.
bool are_fresh(Look* look, const Place& place, const Tensors& weights) {
  bool are_all_fresh = true;
  all_of(place, weights, [&](Kept* kept, const at::Tensor* const* own) {
    const bool was_fresh = is_fresh(kept, own);
    bool is_suspect = false;
    for (Stamp& stamp : *kept->stamps) {
      stamp.is_suspect = look->samples && was_fresh && !kept->is_alias &&
          !stamp.sample.agrees(stamp.data);
      is_suspect |= stamp.is_suspect;
    }
    look->found_mismatch |= is_suspect && is_fresh(kept, own);
    are_all_fresh &= was_fresh && !is_suspect;
    return true;
  });
  return are_all_fresh;
}

PyObject* begin_call(PyObject*, PyObject*) {
  num_in_flight++;
  num_own_in_flight++;
  return Py_NewRef(Py_None);
}

PyObject* leave_call(PyObject*, PyObject*) {
  num_in_flight--;
  num_own_in_flight--;
  return Py_NewRef(Py_None);
}

// enter(args) -> (run, inputs) of a call that finds all fresh, which it begins; or None.
PyObject* look_enter(PyObject* self, PyObject* args) {
  return guarded([&]() -> PyObject* {
    Look* look = as_look(self);
    const auto num_passed = static_cast<Py_ssize_t>(look->passed->size());
    // Whatever is allocated may start the garbage collector, which may call graphs: so it is first.
    PyObject* inputs = PyList_New(num_passed + look->num_delivered);
    PyObject* found = inputs == nullptr ? nullptr : Py_BuildValue("ON", Py_None, inputs);
    if (found == nullptr) {
      return nullptr;
    }
    const Tensors& weights = weights_in(look, args);
    Place* place = find_place(look, weights);
    look->found_mismatch = 0;
    if (place == nullptr || !are_fresh(look, *place, weights) ||
        (look->runs && !place->has_run())) {
      Py_DECREF(found);
      return Py_NewRef(Py_None);
    }
    for (Py_ssize_t i = 0; i < num_passed; ++i) {
      PyList_SET_ITEM(inputs, i, Py_NewRef(PyTuple_GET_ITEM(args, (*look->passed)[i])));
    }
    for (Py_ssize_t i = 0; i < look->num_delivered; ++i) {
      PyList_SET_ITEM(inputs, num_passed + i, Py_NewRef(place->kepts[i]->value));
    }
    for (Kept* kept : place->kepts) {
      kept->hits++;
    }
    if (place->run != nullptr) {
      Py_DECREF(Py_None);
      PyTuple_SET_ITEM(found, 0, Py_NewRef(place->run));
    }
    Py_DECREF(begin_call(nullptr, nullptr));
    return found;
  });
}

// entries(args) -> what `remember` was given for the place of these weights; or None.
PyObject* look_entries(PyObject* self, PyObject* args) {
  return guarded([&] {
    const Place* place = find_place(as_look(self), weights_in(as_look(self), args));
    return Py_NewRef(place == nullptr || place->is_dead() ? Py_None : place->entries);
  });
}

// remember(kepts, entries, run): takes the values of a place, and what was made of them.
PyObject* look_remember(PyObject* self, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    PyObject *kepts = nullptr, *entries = nullptr, *run = nullptr;
    if (!PyArg_ParseTuple(arguments, "O!OO", &PyTuple_Type, &kepts, &entries, &run)) {
      return nullptr;
    }
    Place place{{}, Py_NewRef(entries), run == Py_None ? nullptr : Py_NewRef(run), {}};
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kepts); ++i) {
      place.kepts.push_back(as_kept(Py_NewRef(PyTuple_GET_ITEM(kepts, i))));
      place.of_run.push_back(place.kepts.back()->value);
    }
    auto& places = *as_look(self)->places;
    std::vector<Place> kept, gone;
    const bool is_full = places.size() >= max_places;
    for (Place& known : places) {
      const bool stays = !is_full && !known.is_dead() && known.kepts != place.kepts;
      (stays ? kept : gone).push_back(std::move(known));
    }
    kept.push_back(std::move(place));
    places = std::move(kept);
    release(gone);
    return Py_NewRef(Py_None);
  });
}

// let_go(): frees places of values that are no more, and what was made of other values.
PyObject* look_let_go(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& places = *as_look(self)->places;
    std::vector<Place> kept, gone;
    std::vector<PyObject*> runs;
    for (Place& place : places) {
      if (place.run != nullptr && !place.has_run()) {
        runs.push_back(std::exchange(place.run, nullptr));
      }
      (place.is_dead() ? gone : kept).push_back(std::move(place));
    }
    places = std::move(kept);
    release(gone);
    for (PyObject* run : runs) {
      Py_DECREF(run);
    }
    return Py_NewRef(Py_None);
  });
}

std::vector<Py_ssize_t>* indices_of(PyObject* tuple) {
  auto* indices = new std::vector<Py_ssize_t>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    indices->push_back(PyLong_AsSsize_t(PyTuple_GET_ITEM(tuple, i)));
  }
  return indices;
}

// Look(sources, passed, num_delivered, runs, samples)
PyObject* look_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *sources = nullptr, *passed = nullptr;
  Py_ssize_t num_delivered = 0;
  int runs = 0, samples = 0;
  if (!PyArg_ParseTuple(
          args, "O!O!npp", &PyTuple_Type, &sources, &PyTuple_Type, &passed, &num_delivered, &runs,
          &samples)) {
    return nullptr;
  }
  Look* look = as_look(type->tp_alloc(type, 0));
  if (look != nullptr) {
    look->sources = indices_of(sources);
    look->passed = indices_of(passed);
    look->places = new std::vector<Place>();
    look->num_delivered = num_delivered;
    look->runs = static_cast<char>(runs);
    look->samples = static_cast<char>(samples);
  }
  return reinterpret_cast<PyObject*>(look);
}

void look_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  release(*as_look(self)->places);
  delete as_look(self)->sources;
  delete as_look(self)->passed;
  delete as_look(self)->places;
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef look_methods[] = {
    {"enter", look_enter, METH_O, "The run and inputs of a call that finds all fresh, or None."},
    {"begin", begin_call, METH_NOARGS, "What a successful enter does besides."},
    {"leave", leave_call, METH_NOARGS, "Ends what enter or begin began."},
    {"entries", look_entries, METH_O, "The entries of the place of some weights, or None."},
    {"remember", look_remember, METH_VARARGS, "Takes the values of a place."},
    {"let_go", look_let_go, METH_NOARGS, "Frees what was made of values that are no more."},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef look_members[] = {
    {"found_mismatch", T_BOOL, offsetof(Look, found_mismatch), READONLY, "A sample differed."},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot look_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(look_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(look_dealloc)},
    {Py_tp_methods, look_methods},
    {Py_tp_members, look_members},
    {0, nullptr}};
PyType_Spec look_spec = {"amp_fx_watch.Look", sizeof(Look), 0, Py_TPFLAGS_DEFAULT, look_slots};

// ------------------------------------------------------------------------ functions on tensors

StorageImpl* storage_in(PyObject* object) {
  return unpack(object).storage().unsafeGetStorageImpl();
}

RecordRef record_in(PyObject* object) {
  return record_of(unpack(object).storage().getWeakStorageImpl().lock());
}

PyObject* watch(PyObject*, PyObject* object) {
  return guarded([&] {
    StorageImpl* storage = storage_in(object);
    return PyBool_FromLong(is_own(*storage) && watch_again(storage, *record_in(object)));
  });
}

PyObject* unwatch(PyObject*, PyObject* object) {
  return guarded([&] {
    if (is_armed(storage_in(object))) {
      disarm(storage_in(object));
    }
    return Py_NewRef(Py_None);
  });
}

PyObject* watched(PyObject*, PyObject* object) {
  return guarded([&] { return PyBool_FromLong(is_armed(storage_in(object))); });
}

PyObject* distrust(PyObject*, PyObject* object) {
  return guarded([&] {
    record_in(object)->is_distrusted = true;
    return Py_NewRef(Py_None);
  });
}

PyObject* is_distrusted(PyObject*, PyObject* object) {
  return guarded([&] {
    const RecordRef record = find_record(storage_in(object));
    return PyBool_FromLong(record != nullptr && record->is_distrusted);
  });
}

// Says that tensors were written, or that a collective goes on writing them.
void mark_written(const std::vector<at::Tensor>& tensors, bool goes_on = false) {
  std::lock_guard<std::mutex> guard(records_mutex());
  const auto& known = records();
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || !tensor.has_storage()) {
      continue;
    }
    const auto found = known.find(tensor.storage().unsafeGetStorageImpl());
    if (found == known.end()) {
      continue;
    }
    if (goes_on) {
      note_write(*found->second, any_thread, settling_ns_of_collective);
    } else {
      note_write(*found->second);
    }
  }
}

PyObject* mark(PyObject*, PyObject* list) {
  return guarded([&]() -> PyObject* {
  std::vector<at::Tensor> tensors;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    PyObject* item = PyList_GET_ITEM(list, i);
    if (is_tensor(item)) {
      tensors.push_back(unpack(item));
    }
  }
  mark_written(tensors);
  return Py_NewRef(Py_None);
  });
}

// stands_for(whole, part): what is said of a DTensor, also by ops that write lists, is said of its
// part in this process. Its own storage, which holds nothing, tells which DTensor that is.
PyObject* stands_for(PyObject*, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
  PyObject *whole = nullptr, *part = nullptr;
  if (!PyArg_ParseTuple(arguments, "OO", &whole, &part)) {
    return nullptr;
  }
  const at::Tensor& tensor = unpack(whole);
  if (tensor.has_storage()) {
    const RecordRef record =
        record_of(unpack(part).storage().getWeakStorageImpl().lock());
    std::lock_guard<std::mutex> guard(records_mutex());
    records()[tensor.storage().unsafeGetStorageImpl()] = record;
  }
  return Py_NewRef(Py_None);
  });
}

// The same bytes as a weight's in a storage of its own: who asks it for a pointer does not ask
// the weight's. It keeps the weight's storage alive and has the weight's version.
PyObject* alias(PyObject*, PyObject* object) {
  return guarded([&]() -> PyObject* {
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
  });
}

// ------------------------------------------------ kernels on ops that write lists, collectives

// CUDA kernels of ops that write lists take pointers that they call constant, and ask no storage.
// Collectives ask for one, and write when they get to it.
struct Written {
  std::vector<size_t> positions; // of the arguments that an op writes
  bool is_collective;
  int64_t is_async_at; // position of the argument that says whether nobody waits; -1: there is none
};
std::unordered_map<std::string, Written>& list_ops() {
  static auto* map = new std::unordered_map<std::string, Written>();
  return *map;
}

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

void collect(const c10::IValue& value, std::vector<at::Tensor>* found) {
  if (value.isTensor()) {
    found->push_back(value.toTensor());
  } else if (value.isList()) { // of tensors, or of lists of them
    for (const c10::IValue& item : value.toListRef()) {
      collect(item, found);
    }
  }
}

void list_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  const Written& known = list_ops().at(full_name(op.operator_name()));
  std::vector<at::Tensor> written;
  for (size_t index : known.positions) {
    collect((*stack)[first + index], &written);
  }
  const bool goes_on = known.is_collective &&
      (known.is_async_at < 0 || (*stack)[first + known.is_async_at].toBool());
  mark_written(written, goes_on);
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  mark_written(written, goes_on); // another thread may have looked meanwhile
}

// The arguments that an op may write: lists that its schema marks, and all tensors of a
// collective, whose schemas mark none.
Written written_by(const c10::FunctionSchema& schema, bool is_collective) {
  Written found{{}, is_collective, -1};
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* written = arguments[i].alias_info();
    const bool is_list = arguments[i].type()->kind() == c10::TypeKind::ListType;
    const bool is_marked = written != nullptr && written->isWrite() && !arguments[i].is_out();
    const bool is_tensor = arguments[i].type()->kind() == c10::TypeKind::TensorType;
    if (is_collective ? is_list || is_tensor : is_list && is_marked) {
      found.positions.push_back(i);
    }
    if (arguments[i].name() == "async_op" || arguments[i].name() == "asyncOp") {
      found.is_async_at = static_cast<int64_t>(i);
    }
  }
  return found;
}

// Puts a kernel in front of each op that writes lists of tensors, and of each collective.
PyObject* watch_list_ops(PyObject*, PyObject*) {
  return guarded([&]() -> PyObject* {
  static auto* kernels = new std::vector<c10::RegistrationHandleRAII>();
  if (!kernels->empty()) {
    return Py_NewRef(Py_None);
  }
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const bool is_collective = name.name.rfind("c10d::", 0) == 0;
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || (!is_collective && name.name.rfind("aten::", 0) != 0)) {
      continue;
    }
    Written found = written_by(op->schema(), is_collective);
    if (found.positions.empty()) {
      continue;
    }
    list_ops()[full_name(name)] = std::move(found);
    kernels->push_back(c10::Dispatcher::singleton().registerImpl(
        name,
        c10::DispatchKey::ADInplaceOrView,
        c10::KernelFunction::makeFromBoxedFunction<&list_kernel>(),
        std::nullopt,
        nullptr,
        "amp_fx"));
  }
  return Py_NewRef(Py_None);
  });
}

PyObject* watched_list_ops(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (const auto& entry : list_ops()) {
    PyObject* name = PyUnicode_FromString(entry.first.c_str());
    PyList_Append(names, name);
    Py_DECREF(name);
  }
  return names;
}

PyMethodDef functions[] = {
    {"stale", as_method(stale), METH_FASTCALL, "Which values are not fresh."},
    {"start", as_method(start), METH_FASTCALL, "Values are about to be made of weights."},
    {"finish", as_method(finish), METH_FASTCALL, "They are made."},
    {"finish_step", as_method(finish_step), METH_FASTCALL, "They are made by what wrote the weights."},
    {"reusable", reusable, METH_O, "The values that nobody can be reading, None for others."},
    {"watch", watch, METH_O, "Watches a tensor's storage; False where that is impossible."},
    {"unwatch", unwatch, METH_O, "Watches it no longer."},
    {"watched", watched, METH_O, "Whether a write would be noticed, and none was."},
    {"distrust", distrust, METH_O, "Makes all that is made of a tensor stale, for good."},
    {"is_distrusted", is_distrusted, METH_O, "Whether that was said."},
    {"mark", mark, METH_O, "Says that the tensors of a list were written."},
    {"stands_for", stands_for, METH_VARARGS, "What is said of a DTensor is said of its part."},
    {"alias", alias, METH_O, "The same bytes in a storage of its own."},
    {"watch_list_ops", watch_list_ops, METH_NOARGS, "Sees ops that write lists of tensors."},
    {"watched_list_ops", watched_list_ops, METH_NOARGS, "Their names."},
    {nullptr, nullptr, 0, nullptr}};

#ifndef _WIN32
void before_fork() {
  records_mutex().lock();
}
void after_fork() {
  records_mutex().unlock();
}
void after_fork_in_child() {
  num_in_flight = num_own_in_flight; // other threads are not there
  records_mutex().unlock();
}
#endif

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "amp_fx_watch", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

bool add_type(PyObject* module, const char* name, PyType_Spec* spec) {
  PyObject* type = PyType_FromSpec(spec);
  return type != nullptr && PyModule_AddObject(module, name, type) == 0;
}

// Whether tensors lie in Python's objects as declared above, by the address that `_cdata` tells.
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
      PyErr_SetString(PyExc_ImportError, "tensors lie otherwise in this torch's Python objects");
    }
    return nullptr;
  }
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr || !add_type(module, "Kept", &kept_spec) ||
      !add_type(module, "Look", &look_spec)) {
    return nullptr;
  }
  PyModule_AddIntConstant(module, "has_hook", HAS_HOOK);
#ifndef _WIN32
  pthread_atfork(before_fork, after_fork, after_fork_in_child);
#endif
  return module;
}
