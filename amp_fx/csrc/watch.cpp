// Sees writes to weights, and checks many values computed from weights at once.
//
// A storage is watched through the hook that torch 2.13 has for "somebody asks for a mutable
// pointer" (c10::StorageImpl::set_materializer). Nothing about the storage changes, so any thread
// may set, fire or clear the hook at any time.
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

struct Decref {
  void operator()(PyObject* object) const {
    Py_DECREF(object);
  }
};
using Ref = std::unique_ptr<PyObject, Decref>; // owned

Ref ref_to(PyObject* object) {
  return Ref(Py_XNewRef(object));
}

PyObject* result(bool found) {
  return PyBool_FromLong(found);
}
PyObject* result(PyObject* found) {
  return found;
}

// A function as Python calls it: what it throws becomes an exception of Python's.
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

// ------------------------------------------------------------------ storages and their writes

thread_local const uint64_t this_thread = [] {
  static std::atomic<uint64_t> latest{0};
  return ++latest;
}();
std::atomic<int64_t> num_in_flight{0}; // calls that read values
thread_local int64_t num_own_in_flight = 0;

// How long a write may go on after its pointer was taken, for all but the thread that took it.
constexpr int64_t write_ns = 50'000'000;
constexpr int64_t collective_ns = 1'000'000'000;
constexpr int64_t ns_per_byte = 10;
constexpr int64_t memory_of_writers_ns = 60'000'000'000;

int64_t now() { // nanoseconds
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

struct Write {
  uint64_t thread = 0; // 0: none
  int64_t begin = 0, end = 0; // it has ended by then
};

// Guards all records. It is one mutex, so that the fork handlers can hold it: a child does not have
// the thread that would unlock it. Never destroyed, since storages outlive static objects.
std::mutex& records_mutex() {
  static auto* mutex = new std::mutex();
  return *mutex;
}

// What is known of one storage. The weak reference keeps its address from being used again.
class Record {
 public:
  explicit Record(const c10::intrusive_ptr<StorageImpl>& s)
      : storage(s), num_bytes_(static_cast<int64_t>(s->nbytes())) {}

  c10::weak_intrusive_ptr<StorageImpl> storage;
  uint64_t armed_at = 0; // the writes when the hook was set
  bool is_distrusted = false; // written where nothing sees it: nothing made of it is ever fresh
  std::atomic<uint64_t> writes{1}; // raised when a write begins; 0 stands for "never made"

  // This thread writes. It has waited for any collective that writes the same.
  void note_write() {
    {
      std::lock_guard<std::mutex> guard(records_mutex());
      if (latest_.thread != this_thread) {
        other_ = latest_;
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
  // The hook was gone: threads that were seen writing may be at a write that it did not see.
  void expect_others() {
    std::lock_guard<std::mutex> guard(records_mutex());
    for (Write* write : {&latest_, &other_}) {
      const bool is_recent = write == &latest_ || now() - write->begin < memory_of_writers_ns;
      if (write->thread != 0 && write->thread != this_thread && is_recent) {
        write->end = end_of(write_ns);
      }
    }
  }
  // Whether another thread, or a collective, may still be writing.
  bool is_settling() {
    std::lock_guard<std::mutex> guard(records_mutex());
    const int64_t time = now();
    const auto is_going_on = [time](const Write& write) {
      return write.thread != this_thread && time < write.end;
    };
    return time < end_of_collective_ || is_going_on(latest_) || is_going_on(other_);
  }

 private:
  int64_t end_of(int64_t duration) const {
    return now() + duration + ns_per_byte * num_bytes_;
  }
  int64_t num_bytes_;
  Write latest_, other_; // that of the latest thread, and the last one of the thread before it
  int64_t end_of_collective_ = 0;
};
using RecordRef = std::shared_ptr<Record>;

std::unordered_map<StorageImpl*, RecordRef>& records() { // never destroyed, like the mutex
  static auto* map = new std::unordered_map<StorageImpl*, RecordRef>();
  return *map;
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

// Every request for a mutable pointer counts as a write. Graphs of ours read weights through
// aliases, which have storages of their own.
void on_write(StorageImpl* storage) {
  if (RecordRef record = find_record(storage)) {
    record->note_write();
  }
}

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

// Watches a storage; that it was not watched, without a write that tells why, is a write. The hook
// is gone once it was called: other threads that write may be at a write that it did not see.
bool watch_again(StorageImpl* storage, Record& record) {
  if (!is_armed(storage)) {
    record.expect_others();
    if (record.armed_at == record.writes) {
      record.note_write();
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

// The distinct elements of a strided tensor, in the order of their addresses. Dimensions of size 1
// and expanded ones are left out, and neighbours that lie as one are merged: a dense tensor has one
// dimension, whatever its layout.
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
  uint64_t offset(uint64_t index) const { // in bytes; without a division if there is one dimension
    uint64_t found = 0;
    for (size_t i = dims.size(); i-- > 0;) {
      found += (i == 0 ? index : index % dims[i].size) * dims[i].stride;
      index = i == 0 ? 0 : index / dims[i].size;
    }
    return found;
  }
};

// Some elements of a weight in host memory, as they were when a value was made.
struct Sample {
  std::vector<uint64_t> bits;
  Elements elements;
  uint64_t seed = 0;
  size_t item_size = 0;
  size_t turn = 0;

  const char* place(const char* data, size_t i) const { // it is asked often
    const uint64_t count = elements.count;
    if (count <= num_sampled) {
      return data + elements.offset(i);
    }
    const uint64_t from = i * count / num_sampled, to = (i + 1) * count / num_sampled;
    return data + elements.offset(from + ((mixed(seed + i) >> 32) * (to - from) >> 32));
  }
  uint64_t read(const char* place) const { // of numbers of 16 bytes the first 8
    uint64_t found = 0;
    std::memcpy(&found, place, std::min(item_size, sizeof(found)));
    return found;
  }
  void take(const at::Tensor& weight, const char* data) {
    elements = weight.is_cpu() ? Elements(weight) : Elements();
    item_size = weight.element_size();
    seed = mixed(seed + static_cast<uint64_t>(now()));
    bits.resize(std::min(num_sampled, elements.count));
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
    seen = is_armed(storage) && !record->is_settling() ? next_seen : 0;
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

PyObject* new_kept(PyObject* type, PyObject* args) {
  PyObject* weights = nullptr;
  int is_alias = 0;
  if (!PyArg_ParseTuple(args, "O!p", &PyTuple_Type, &weights, &is_alias)) {
    return nullptr;
  }
  auto stamps = std::make_unique<std::vector<Stamp>>();
  for (const at::Tensor* weight : tensors_of(weights)) {
    stamps->emplace_back().bind(*weight);
  }
  PyObject* kept = PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type), 0);
  if (kept != nullptr) {
    as_kept(kept)->is_alias = static_cast<char>(is_alias);
    as_kept(kept)->stamps = stamps.release();
  }
  return kept;
}

PyObject* kept_new(PyTypeObject* type, PyObject* args, PyObject*) {
  return method<new_kept>(reinterpret_cast<PyObject*>(type), args);
}

void kept_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_CLEAR(as_kept(self)->value);
  delete as_kept(self)->stamps;
  type->tp_free(self);
  Py_DECREF(type);
}

void kept_bind(PyObject* self, PyObject* weights) {
  const Tensors found = tensors_of(weights);
  for (size_t i = 0; i < found.size(); ++i) {
    if (Stamp& stamp = as_kept(self)->stamps->at(i); !stamp.lies_where(*found[i])) {
      stamp.bind(*found[i]);
    }
  }
}

bool kept_lies_where(PyObject* self, PyObject* weights) {
  return lies_where(as_kept(self), tensors_of(weights).data());
}

bool kept_is_fresh(PyObject* self, PyObject* weights) {
  const Tensors found = tensors_of(weights);
  return lies_where(as_kept(self), found.data()) && is_fresh(as_kept(self), found.data());
}

void kept_invalidate(PyObject* self, PyObject*) {
  for (Stamp& stamp : *as_kept(self)->stamps) {
    stamp.seen = stamp.next_seen = 0;
  }
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
void kept_adopt(PyObject* self, PyObject* args) {
  auto& stamps = *as_kept(self)->stamps;
  for (size_t i = 0; i < stamps.size(); ++i) {
    const auto position = PyLong_AsSize_t(item(item(args, 1), i));
    stamps[i] = as_kept(item(args, 0))->stamps->at(position);
  }
}

PyMethodDef kept_methods[] = {
    {"bind", method<kept_bind>, METH_O, "Says where the weights lie now; those that moved are stale."},
    {"lies_where", method<kept_lies_where>, METH_O, "Whether the weights are where they were."},
    {"is_fresh", method<kept_is_fresh>, METH_O, "Whether no signal tells of a write."},
    {"invalidate", method<kept_invalidate>, METH_NOARGS, "Makes the value stale."},
    {"suspects", method<kept_suspects>, METH_NOARGS, "By weight, whether a sampled element differed."},
    {"adopt", method<kept_adopt>, METH_VARARGS, "Takes what another value knows of the weights."},
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
    function(i, as_kept(item(kepts, i)), tensors_of(item(weights, i)));
  }
}

// stale(kepts, weights) -> the positions of the values that are not fresh, each value once; to
// others it is a hit.
PyObject* stale(PyObject*, PyObject* args) {
  PyObject* found = PyList_New(0);
  std::unordered_set<Kept*> known;
  for_each(item(args, 0), item(args, 1), [&](Py_ssize_t i, Kept* kept, const Tensors& weights) {
    if (lies_where(kept, weights.data()) && is_fresh(kept, weights.data())) {
      kept->hits++;
    } else if (known.insert(kept).second) {
      PyList_Append(found, Ref(PyLong_FromSsize_t(i)).get());
    }
  });
  return found;
}

void start_value(Kept* kept, const Tensors& weights) {
  for (size_t i = 0; i < weights.size(); ++i) {
    kept->stamps->at(i).start(*weights[i]);
  }
}

void finish_value(Kept* kept, PyObject* value) {
  for (Stamp& stamp : *kept->stamps) {
    stamp.finish();
  }
  kept->made++;
  Py_XDECREF(std::exchange(kept->value, Py_NewRef(value)));
}

// start(kepts, weights): values are about to be made.
void start(PyObject*, PyObject* args) {
  for_each(item(args, 0), item(args, 1), [](Py_ssize_t, Kept* kept, const Tensors& weights) {
    start_value(kept, weights);
  });
}

// finish(kepts, values): they are made.
void finish(PyObject*, PyObject* args) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(item(args, 0)); ++i) {
    finish_value(as_kept(item(item(args, 0), i)), item(item(args, 1), i));
  }
}

// finish_step(kepts, values, weights): a step made them, and wrote the weights through aliases.
// They are of the weights as those are now, unless somebody else wrote them since `start`. To all
// other values the step is a write.
void finish_step(PyObject*, PyObject* args) {
  std::unordered_set<Kept*> invalid;
  std::unordered_set<Record*> written;
  PyObject *kepts = item(args, 0), *values = item(args, 1), *weights = item(args, 2);
  for_each(kepts, weights, [&](Py_ssize_t, Kept* kept, const Tensors& own) {
    bool is_valid = lies_where(kept, own.data());
    for (const Stamp& stamp : *kept->stamps) {
      is_valid &= stamp.next_seen == stamp.record->writes;
      written.insert(stamp.record.get());
    }
    if (!is_valid) {
      invalid.insert(kept);
    }
  });
  for (Record* record : written) {
    record->note_write();
  }
  for_each(kepts, weights, [&](Py_ssize_t i, Kept* kept, const Tensors& own) {
    if (invalid.count(kept) == 0) {
      start_value(kept, own);
      finish_value(kept, item(values, i));
    }
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
  if (tensor == nullptr || tensor->use_count() > 1) {
    return true;
  }
  const c10::Storage& storage = tensor->storage();
  // Python's object of a storage holds it as long as that lives, also where nobody holds the object.
  PyObject* shown = storage.unsafeGetStorageImpl()->pyobj_slot()->load_pyobj();
  const bool is_shown_to_nobody = shown != nullptr && Py_REFCNT(shown) == 1;
  return storage.use_count() > (is_shown_to_nobody ? 2 : 1);
}

// reusable(kepts) -> each value whose memory may be written, since nobody can be reading it;
// None in the place of others.
PyObject* reusable(PyObject*, PyObject* kepts) {
  PyObject* found = PyList_New(PyTuple_GET_SIZE(kepts));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kepts); ++i) {
    const Kept* kept = as_kept(item(kepts, i));
    const bool is_free = num_in_flight == 0 && has_value(kept) && !is_read(kept->value);
    PyList_SET_ITEM(found, i, Py_NewRef(is_free ? kept->value : Py_None));
  }
  return found;
}

// ----------------------------------------------------------------------- the values of a graph

// One set of weights that a graph was called with. The run is what was made of the values; it
// keeps those alive, so that comparing addresses tells whether they are still the same.
struct Place {
  std::vector<Ref> owned;
  std::vector<Kept*> kepts;
  Ref entries, run; // the latter may be null
  std::vector<PyObject*> of_run;

  bool is_dead() const {
    return !std::all_of(kepts.begin(), kepts.end(), has_value);
  }
  bool has_run() const {
    const auto is_same = [](const Kept* kept, PyObject* value) { return kept->value == value; };
    return run && std::equal(kepts.begin(), kepts.end(), of_run.begin(), is_same);
  }
};
using Places = std::vector<Place>; // whatever leaves one is freed when nothing changes it any more

struct Look {
  PyObject_HEAD
  std::vector<Py_ssize_t>* sources; // positions of the weights, value after value
  std::vector<Py_ssize_t>* passed;
  Places* places; // one graph may serve many layers, each with its own weights
  char samples, runs, found_mismatch; // runs: values are constants of code, not inputs
};

constexpr size_t max_places = 256;

Look* as_look(PyObject* object) {
  return reinterpret_cast<Look*>(object);
}

// The weights of all values, one value's after the other's; nullptr for what is no plain tensor.
const Tensors& weights_in(const Look* look, PyObject* args) {
  static thread_local Tensors found;
  found.clear();
  for (Py_ssize_t position : *look->sources) {
    found.push_back(plain_tensor(item(args, position)));
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

void begin_call(PyObject*, PyObject*) {
  num_in_flight++;
  num_own_in_flight++;
}

void leave_call(PyObject*, PyObject*) {
  num_in_flight--;
  num_own_in_flight--;
}

// enter(args) -> (run, inputs) of a call that finds all fresh, which it begins; or None.
PyObject* look_enter(PyObject* self, PyObject* args) {
  Look* look = as_look(self);
  const auto num_passed = static_cast<Py_ssize_t>(look->passed->size());
  // Whatever is allocated may start the garbage collector, which may call graphs: so it is first.
  PyObject* inputs = PyList_New(num_passed);
  Ref found(inputs == nullptr ? nullptr : Py_BuildValue("ON", Py_None, inputs));
  if (!found) {
    return nullptr;
  }
  const Tensors& weights = weights_in(look, args);
  Place* place = find_place(look, weights);
  look->found_mismatch = 0;
  if (place == nullptr || !are_fresh(look, *place, weights) || (look->runs && !place->has_run())) {
    return Py_NewRef(Py_None);
  }
  for (Py_ssize_t i = 0; i < num_passed; ++i) {
    PyList_SET_ITEM(inputs, i, Py_NewRef(item(args, (*look->passed)[i])));
  }
  if (!look->runs) {
    for (Kept* kept : place->kepts) { // appending allocates no object that the collector tracks
      const Py_ssize_t num_items = PyTuple_CheckExact(kept->value) ? PyTuple_GET_SIZE(kept->value) : -1;
      if (num_items < 0) {
        PyList_Append(inputs, kept->value);
      }
      for (Py_ssize_t i = 0; i < num_items; ++i) {
        PyList_Append(inputs, item(kept->value, i));
      }
    }
  }
  for (Kept* kept : place->kepts) {
    kept->hits++;
  }
  if (place->run) {
    Py_DECREF(Py_None);
    PyTuple_SET_ITEM(found.get(), 0, Py_NewRef(place->run.get()));
  }
  begin_call(nullptr, nullptr);
  return found.release();
}

// entries(args) -> what `remember` was given for the place of these weights; or None.
PyObject* look_entries(PyObject* self, PyObject* args) {
  const Place* place = find_place(as_look(self), weights_in(as_look(self), args));
  return Py_NewRef(place == nullptr || place->is_dead() ? Py_None : place->entries.get());
}

// remember(kepts, entries, run): takes the values of a place, and what was made of them.
void look_remember(PyObject* self, PyObject* args) {
  PyObject *kepts = item(args, 0), *run = item(args, 2);
  Place place{{}, {}, ref_to(item(args, 1)), ref_to(run == Py_None ? nullptr : run), {}};
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kepts); ++i) {
    place.owned.push_back(ref_to(item(kepts, i)));
    place.kepts.push_back(as_kept(item(kepts, i)));
    place.of_run.push_back(place.kepts.back()->value);
  }
  Places kept, old = std::move(*as_look(self)->places);
  for (Place& known : old) {
    if (old.size() < max_places && !known.is_dead() && known.kepts != place.kepts) {
      kept.push_back(std::move(known));
    }
  }
  kept.push_back(std::move(place));
  *as_look(self)->places = std::move(kept);
}

// let_go(): frees places of values that are no more, and what was made of other values.
void look_let_go(PyObject* self, PyObject*) {
  Places kept, old = std::move(*as_look(self)->places);
  std::vector<Ref> runs;
  for (Place& place : old) {
    if (!place.has_run()) {
      runs.push_back(std::move(place.run));
    }
    if (!place.is_dead()) {
      kept.push_back(std::move(place));
    }
  }
  *as_look(self)->places = std::move(kept);
}

std::vector<Py_ssize_t>* indices_of(PyObject* tuple) {
  auto* indices = new std::vector<Py_ssize_t>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    indices->push_back(PyLong_AsSsize_t(item(tuple, i)));
  }
  return indices;
}

// Look(sources, passed, runs, samples)
PyObject* look_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *sources = nullptr, *passed = nullptr;
  int runs = 0, samples = 0;
  if (!PyArg_ParseTuple(
          args, "O!O!pp", &PyTuple_Type, &sources, &PyTuple_Type, &passed, &runs, &samples)) {
    return nullptr;
  }
  Look* look = as_look(type->tp_alloc(type, 0));
  if (look != nullptr) {
    look->sources = indices_of(sources);
    look->passed = indices_of(passed);
    look->places = new Places();
    look->runs = static_cast<char>(runs);
    look->samples = static_cast<char>(samples);
  }
  return reinterpret_cast<PyObject*>(look);
}

void look_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete as_look(self)->sources;
  delete as_look(self)->passed;
  delete as_look(self)->places;
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef look_methods[] = {
    {"enter", method<look_enter>, METH_O, "The run and inputs of a call that finds all fresh, or None."},
    {"begin", method<begin_call>, METH_NOARGS, "What a successful enter does besides."},
    {"leave", method<leave_call>, METH_NOARGS, "Ends what enter or begin began."},
    {"entries", method<look_entries>, METH_O, "The entries of the place of some weights, or None."},
    {"remember", method<look_remember>, METH_VARARGS, "Takes the values of a place."},
    {"let_go", method<look_let_go>, METH_NOARGS, "Frees what was made of values that are no more."},
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

bool watch(PyObject*, PyObject* object) {
  StorageImpl* storage = storage_in(object);
  return is_own(*storage) && watch_again(storage, *record_in(object));
}

void unwatch(PyObject*, PyObject* object) {
  if (is_armed(storage_in(object))) {
    disarm(storage_in(object));
  }
}

bool watched(PyObject*, PyObject* object) {
  return is_armed(storage_in(object));
}

void distrust(PyObject*, PyObject* object) {
  record_in(object)->is_distrusted = true;
}

bool is_distrusted(PyObject*, PyObject* object) {
  const RecordRef record = find_record(storage_in(object));
  return record != nullptr && record->is_distrusted;
}

// mark(list): says that tensors were written.
void mark(PyObject*, PyObject* list) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    PyObject* object = PyList_GET_ITEM(list, i);
    if (is_tensor(object) && unpack(object).has_storage()) {
      on_write(storage_in(object));
    }
  }
}

// stands_for(whole, part): what is said of a DTensor, also by ops that write lists, is said of its
// part in this process. Its own storage, which holds nothing, tells which DTensor that is.
void stands_for(PyObject*, PyObject* args) {
  const at::Tensor& whole = unpack(item(args, 0));
  if (whole.has_storage()) {
    const RecordRef record = record_in(item(args, 1));
    std::lock_guard<std::mutex> guard(records_mutex());
    records()[whole.storage().unsafeGetStorageImpl()] = record;
  }
}

// The same bytes as a weight's in a storage of its own: who asks it for a pointer does not ask
// the weight's. It keeps the weight's storage alive and has the weight's version.
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

// Says that tensors, or lists of them, were written, or that a collective goes on writing them.
void mark_written(const c10::IValue& value, bool goes_on) {
  if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) {
      mark_written(each, goes_on);
    }
  } else if (value.isTensor() && value.toTensor().defined() && value.toTensor().has_storage()) {
    StorageImpl* storage = value.toTensor().storage().unsafeGetStorageImpl();
    if (RecordRef record = find_record(storage)) {
      goes_on ? record->note_collective() : record->note_write();
    }
  }
}

void list_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  const Written& known = list_ops().at(full_name(op.operator_name()));
  const bool goes_on = known.is_collective &&
      (known.is_async_at < 0 || (*stack)[first + known.is_async_at].toBool());
  std::vector<c10::IValue> written;
  for (size_t index : known.positions) {
    written.push_back((*stack)[first + index]);
    mark_written(written.back(), goes_on);
  }
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  for (const c10::IValue& value : written) { // another thread may have looked meanwhile
    mark_written(value, goes_on);
  }
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


// A lazy clone puts the hook of copy-on-write where ours is, and torch refuses a second one. So ours
// is taken off first, which looks like a write. Until either tensor is written, nothing made of the
// weight is fresh.
void lazy_clone_kernel(const c10::OperatorHandle&, c10::DispatchKeySet, c10::Stack* stack) {
  const at::Tensor source = stack->back().toTensor();
  stack->pop_back();
  StorageImpl* storage = source.storage().unsafeGetStorageImpl();
  disarm(storage);
  auto cloned = c10::impl::cow::lazy_clone_storage(*storage);
  if (cloned == nullptr) { // an alias of ours, or memory that torch did not allocate
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


// Puts a kernel in front of each op that writes lists of tensors, and of each collective.
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
    {"stale", method<stale>, METH_VARARGS, "Which values are not fresh."},
    {"start", method<start>, METH_VARARGS, "Values are about to be made of weights."},
    {"finish", method<finish>, METH_VARARGS, "They are made."},
    {"finish_step", method<finish_step>, METH_VARARGS, "They are made by what wrote the weights."},
    {"reusable", method<reusable>, METH_O, "The values that nobody can be reading, None for others."},
    {"watch", method<watch>, METH_O, "Watches a tensor's storage; False where that is impossible."},
    {"unwatch", method<unwatch>, METH_O, "Watches it no longer."},
    {"watched", method<watched>, METH_O, "Whether a write would be noticed, and none was."},
    {"distrust", method<distrust>, METH_O, "Makes all that is made of a tensor stale, for good."},
    {"is_distrusted", method<is_distrusted>, METH_O, "Whether that was said."},
    {"mark", method<mark>, METH_O, "Says that the tensors of a list were written."},
    {"stands_for", method<stands_for>, METH_VARARGS, "What is said of a DTensor is said of its part."},
    {"alias", method<alias>, METH_O, "The same bytes in a storage of its own."},
    {"watch_list_ops", method<watch_list_ops>, METH_NOARGS, "Sees ops that write lists of tensors."},
    {"watched_list_ops", method<watched_list_ops>, METH_NOARGS, "Their names."},
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
#ifndef _WIN32
  pthread_atfork(before_fork, after_fork, after_fork_in_child);
#endif
  return module;
}
