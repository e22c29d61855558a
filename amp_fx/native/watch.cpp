// Sees writes to weights, and looks at many weights at once.
//
// A storage is watched through the hook that torch 2.13 has for "somebody asks for a mutable
// pointer" (c10::StorageImpl::set_materializer): nothing about the storage changes, so that any
// thread may set, fire or clear it at any time. Before 2.13 a storage is made copy-on-write
// instead (`arm` below), which other threads must not be near.
//
// What Python sees: `Copy`, one low copy of a weight and what the weight was
// when it was made; `Look`, the kept casts of one graph; and functions on tensors. They are
// called with the GIL held, which orders all that is not atomic here; `on_write` is called by
// any thread without it. Sizes are in elements, times in nanoseconds.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/COW.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>
#ifndef _WIN32
#include <pthread.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#if __has_include(<c10/core/StorageMaterializer.h>)
#define HAS_HOOK 1
#else
#define HAS_HOOK 0
#endif

namespace {

using c10::StorageImpl;

// ------------------------------------------------------------------ storages and their writes

// What is known of one storage. The weak reference keeps its address from being used again.
struct Record {
  explicit Record(const c10::intrusive_ptr<StorageImpl>& s)
      : storage(s), num_bytes(static_cast<int64_t>(s->nbytes())) {}
  c10::weak_intrusive_ptr<StorageImpl> storage;
  int64_t num_bytes;
  std::atomic<uint64_t> writes{1}; // raised when a write begins; 0 stands for "never seen"
  std::atomic<uint64_t> writer{0}; // the thread of the latest
  std::atomic<int64_t> when{0};
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

std::atomic<uint64_t> next_thread{1};
thread_local const uint64_t this_thread = next_thread++;
std::atomic<int64_t> num_in_flight{0}; // calls that hold copies

// The calls that this thread is inside of. In one that is pure (it writes no weight), asking
// for a pointer is reading: CUDA graphs compare addresses so.
struct Calls {
  int depth = 0;
  int num_impure = 0;
  std::vector<RecordRef> asked;
};
thread_local Calls calls;

int64_t now() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

// The threads that called or wrote, as long as they live.
std::atomic<int64_t> num_threads{0};
struct Participation {
  bool is_counted = false;
  ~Participation() {
    num_threads -= is_counted ? 1 : 0;
  }
};
thread_local Participation participation;

void note_thread() {
  if (!participation.is_counted) {
    participation.is_counted = true;
    num_threads++;
  }
}

void note_write(Record& record) {
  note_thread();
  record.writer = this_thread;
  record.when = now();
  record.writes++;
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

// Reading two private members of StorageImpl, by the rule that explicit instantiation may name
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

void on_write(StorageImpl* storage) {
  RecordRef record = find_record(storage);
  if (record == nullptr) {
    return;
  }
  if (calls.depth > 0 && calls.num_impure == 0) {
    calls.asked.push_back(std::move(record));
  } else {
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

// Whether torch allocated a storage itself: others are written by those who did (NumPy, other
// processes).
bool is_own(const StorageImpl& storage) {
#if HAS_HOOK
  return c10::impl::cow::has_simple_data_ptr(storage);
#else
  return is_armed(&storage) || c10::impl::cow::has_simple_data_ptr(storage);
#endif
}

// Whether a write by another thread may still go on: it took its pointer a moment ago.
constexpr int64_t settling_ns = 50'000'000;
constexpr int64_t settling_ns_per_byte = 10;
bool is_settling(const Record& record) {
  const uint64_t writer = record.writer;
  return writer != 0 && writer != this_thread &&
      now() - record.when < settling_ns + settling_ns_per_byte * record.num_bytes;
}

const at::Tensor* plain_tensor(PyObject* object) {
  if (!THPVariable_CheckExact(object)) {
    return nullptr;
  }
  const at::Tensor& tensor = THPVariable_Unpack(object);
  return tensor.has_storage() ? &tensor : nullptr;
}

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<int64_t>(tensor._version());
}

// ---------------------------------------------------------------------------------- one copy

struct Copy {
  PyObject_HEAD
  PyObject* low; // nullptr once dropped
  RecordRef* record;
  StorageImpl* storage;
  const char* source_data;
  at::DimVector* sizes;
  at::DimVector* strides;
  at::DimVector* low_strides;
  uint64_t seen; // the record's writes when it was made; 0: make it again
  int64_t version;
  char is_alias; // the weight's own bytes, in a storage of its own
  char is_distrusted; // written where nothing sees it: made again for every call
  char is_suspect; // a sample differed
  char is_sampled;
  at::ScalarType source_type, low_type;
  uint8_t source_size, low_size; // bytes of an element
  const char* low_data;
  int64_t numel;
  int64_t canary_at;
  uint64_t canary;
  long long hits, refreshes;
};

const at::Tensor& low_of(const Copy* copy) {
  return THPVariable_Unpack(copy->low);
}

uint64_t bits_at(const char* data, int64_t index, size_t size) {
  data += index * size;
  return size == 4 ? *reinterpret_cast<const uint32_t*>(data)
                   : *reinterpret_cast<const uint16_t*>(data);
}

void set_low(Copy* copy, PyObject* low) {
  PyObject* old = copy->low;
  copy->low = low;
  copy->low_data = static_cast<const char*>(low_of(copy).const_data_ptr());
  Py_XDECREF(old);
}

// Binds a copy to where its weight lies now.
void bind(Copy* copy, const at::Tensor& source) {
  const auto storage = source.storage().getWeakStorageImpl().lock();
  *copy->record = record_of(storage);
  copy->storage = storage.get();
  copy->source_data = static_cast<const char*>(source.const_data_ptr());
  *copy->sizes = at::DimVector(source.sizes());
  *copy->strides = at::DimVector(source.strides());
  *copy->low_strides = at::DimVector(low_of(copy).strides());
  copy->seen = 0;
  copy->source_type = source.scalar_type();
  copy->low_type = low_of(copy).scalar_type();
  copy->source_size = static_cast<uint8_t>(source.element_size());
  copy->low_size = static_cast<uint8_t>(low_of(copy).element_size());
  copy->numel = source.numel();
  copy->canary_at = -1;
  const auto is_known = [](at::ScalarType type) {
    return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
  };
  copy->is_sampled = !copy->is_alias && source.is_cpu() && copy->numel > 0 &&
      source.is_non_overlapping_and_dense() &&
      (*copy->low_strides == *copy->strides || source.is_contiguous()) &&
      is_known(copy->source_type) && is_known(copy->low_type);
}

bool lies_where(const Copy* copy, const at::Tensor& source) {
  const auto* impl = source.unsafeGetTensorImpl();
  StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  return copy->low != nullptr && storage == copy->storage &&
      static_cast<const char*>(storage->_mutable_data_ptr_no_checks().get()) + // asks nothing
          impl->storage_offset() * impl->itemsize() ==
      copy->source_data &&
      source.scalar_type() == copy->source_type && source.sizes() == *copy->sizes &&
      source.strides() == *copy->strides;
}

bool is_fresh(const Copy* copy, const at::Tensor& source) {
  return copy->seen != 0 && !copy->is_distrusted && copy->seen == (*copy->record)->writes &&
      is_armed(copy->storage) && (copy->is_alias || version_of(source) == copy->version);
}

float as_float(const char* data, int64_t index, at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return reinterpret_cast<const float*>(data)[index];
    case at::kBFloat16:
      return reinterpret_cast<const c10::BFloat16*>(data)[index];
    default:
      return reinterpret_cast<const c10::Half*>(data)[index];
  }
}

float rounded(float value, at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return value;
    case at::kBFloat16:
      return c10::BFloat16(value);
    default:
      return c10::Half(value);
  }
}

// Where a copy has the element that the weight has at an index. Only a contiguous weight may have
// a copy that is laid out in another way.
int64_t low_index(const Copy* copy, int64_t index) {
  if (*copy->low_strides == *copy->strides) {
    return index;
  }
  int64_t found = 0;
  for (size_t i = copy->sizes->size(); i-- > 0; index /= (*copy->sizes)[i]) {
    found += index % (*copy->sizes)[i] * (*copy->low_strides)[i];
  }
  return found;
}

// Whether one element of a copy is the weight's, rounded. NaNs are alike; numbers below the
// low dtype's normal range are not looked at, as processors may flush them.
bool agrees_at(const Copy* copy, int64_t index) {
  const float value = as_float(copy->source_data, index, copy->source_type);
  const float kept = as_float(copy->low_data, low_index(copy, index), copy->low_type);
  const float tiny = copy->low_type == at::kHalf ? 6.2e-5f : 1.2e-38f;
  if (std::isnan(value) || std::abs(value) < tiny) {
    return std::isnan(value) ? std::isnan(kept) : std::abs(kept) <= tiny;
  }
  return rounded(value, copy->low_type) == kept;
}

// Notes that a copy is what its weight was when it had been written so often.
void note_made(Copy* copy, uint64_t writes, int64_t version) {
  copy->version = version;
  copy->canary_at = -1;
  copy->is_suspect = 0;
  copy->refreshes++;
  // Watched from before it was read; unless a write may still have been under way then.
  const bool is_watched = is_armed(copy->storage) && !is_settling(**copy->record);
  copy->seen = is_watched ? writes : 0;
}

void watch_again(Copy* copy) {
  if (!is_armed(copy->storage)) {
    if (!HAS_HOOK || copy->seen == (*copy->record)->writes) {
      note_write(**copy->record);
    }
    arm(copy->storage);
  }
}

PyObject* copy_new(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *low = nullptr, *source = nullptr;
  int is_alias = 0;
  if (!PyArg_ParseTuple(args, "OOp", &low, &source, &is_alias)) {
    return nullptr;
  }
  auto* copy = reinterpret_cast<Copy*>(type->tp_alloc(type, 0));
  if (copy == nullptr) {
    return nullptr;
  }
  set_low(copy, Py_NewRef(low));
  copy->record = new RecordRef();
  copy->sizes = new at::DimVector();
  copy->strides = new at::DimVector();
  copy->low_strides = new at::DimVector();
  copy->is_alias = static_cast<char>(is_alias);
  bind(copy, THPVariable_Unpack(source));
  return reinterpret_cast<PyObject*>(copy);
  END_HANDLE_TH_ERRORS
}

void copy_dealloc(PyObject* self) {
  auto* copy = reinterpret_cast<Copy*>(self);
  PyTypeObject* type = Py_TYPE(self);
  Py_CLEAR(copy->low);
  delete copy->record;
  delete copy->sizes;
  delete copy->strides;
  delete copy->low_strides;
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* copy_drop(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  Py_CLEAR(reinterpret_cast<Copy*>(self)->low);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* copy_invalidate(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  reinterpret_cast<Copy*>(self)->seen = 0;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* copy_distrust(PyObject* self, PyObject*) {
  reinterpret_cast<Copy*>(self)->is_distrusted = 1;
  Py_RETURN_NONE;
}

PyObject* copy_bind(PyObject* self, PyObject* source) {
  HANDLE_TH_ERRORS
  bind(reinterpret_cast<Copy*>(self), THPVariable_Unpack(source));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* copy_lies_where(PyObject* self, PyObject* source) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(
      lies_where(reinterpret_cast<Copy*>(self), THPVariable_Unpack(source)));
  END_HANDLE_TH_ERRORS
}

PyObject* copy_is_fresh(PyObject* self, PyObject* source) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(is_fresh(reinterpret_cast<Copy*>(self), THPVariable_Unpack(source)));
  END_HANDLE_TH_ERRORS
}

// start(source) -> (writes, version) before something is made of a weight, and finish(writes,
// version) afterwards: what refresh does for a copy, for what Python makes.
PyObject* copy_start(PyObject* self, PyObject* source) {
  HANDLE_TH_ERRORS
  auto* copy = reinterpret_cast<Copy*>(self);
  watch_again(copy);
  const auto writes = static_cast<unsigned long long>((*copy->record)->writes);
  const auto version = static_cast<long long>(version_of(THPVariable_Unpack(source)));
  return Py_BuildValue("KL", writes, version);
  END_HANDLE_TH_ERRORS
}

PyObject* copy_finish(PyObject* self, PyObject* ticket) {
  HANDLE_TH_ERRORS
  unsigned long long writes = 0;
  long long version = 0;
  if (!PyArg_ParseTuple(ticket, "KL", &writes, &version)) {
    return nullptr;
  }
  auto* copy = reinterpret_cast<Copy*>(self);
  if (copy->low != nullptr) {
    note_made(copy, writes, version);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* copy_get_low(PyObject* self, void*) {
  PyObject* low = reinterpret_cast<Copy*>(self)->low;
  return Py_NewRef(low == nullptr ? Py_None : low);
}

PyObject* copy_get_count(PyObject* self, void* which) {
  auto* copy = reinterpret_cast<Copy*>(self);
  return PyLong_FromLongLong(which == nullptr ? copy->hits : copy->refreshes);
}

PyObject* copy_get_flag(PyObject* self, void* which) {
  auto* copy = reinterpret_cast<Copy*>(self);
  return PyBool_FromLong(which == nullptr ? copy->is_suspect : copy->is_distrusted);
}

PyMethodDef copy_methods[] = {
    {"drop", copy_drop, METH_NOARGS, "Lets go of the low tensor; no look finds the copy again."},
    {"invalidate", copy_invalidate, METH_NOARGS, "Has it made again before its next use."},
    {"distrust", copy_distrust, METH_NOARGS, "Has it made again before every use."},
    {"bind", copy_bind, METH_O, "Says where the weight lies now; implies invalidate."},
    {"lies_where", copy_lies_where, METH_O, "Whether a weight is where the copy's was."},
    {"start", copy_start, METH_O, "What finish takes, before something is made of a weight."},
    {"finish", copy_finish, METH_O, "Notes that it is made of the weight as start found it."},
    {"is_fresh", copy_is_fresh, METH_O, "Whether no signal tells of a write."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef copy_getset[] = {
    {"low", copy_get_low, nullptr, "The low tensor; None once dropped.", nullptr},
    {"hits", copy_get_count, nullptr, "Times that a call found it fresh.", nullptr},
    {"refreshes", copy_get_count, nullptr, "Times that it was made.", copy_getset},
    {"is_suspect", copy_get_flag, nullptr, "Whether a sample differed.", nullptr},
    {"is_distrusted", copy_get_flag, nullptr, "Whether it is made for every use.", copy_getset},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot copy_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(copy_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(copy_dealloc)},
    {Py_tp_methods, copy_methods},
    {Py_tp_getset, copy_getset},
    {0, nullptr}};
PyType_Spec copy_spec = {"amp_fx_watch.Copy", sizeof(Copy), 0, Py_TPFLAGS_DEFAULT, copy_slots};

// --------------------------------------------------------------------- the casts of one graph

struct Place {
  std::vector<Copy*> copies; // owned
};

struct HeldPlace {
  explicit HeldPlace(const Place& other) : place(other) {
    for (Copy* copy : place.copies) {
      Py_INCREF(copy);
    }
  }
  ~HeldPlace() {
    for (Copy* copy : place.copies) {
      Py_DECREF(copy);
    }
  }
  HeldPlace(const HeldPlace&) = delete;
  Place place;
};

struct Look {
  PyObject_HEAD
  std::vector<Py_ssize_t>* sources;
  std::vector<Py_ssize_t>* passed;
  std::vector<Place>* places; // one graph may serve many layers, each with its own weights
  char is_pure, samples;
  char found_mismatch;
  uint64_t random;
};

constexpr size_t max_places = 256;

uint64_t next_random(Look* look) { // xorshift64*
  uint64_t x = look->random;
  x ^= x >> 12;
  x ^= x << 25;
  x ^= x >> 27;
  look->random = x;
  return x * 0x2545F4914F6CDD1DULL;
}

Place* find_place(Look* look, PyObject* args) {
  const auto& sources = *look->sources;
  for (auto& place : *look->places) {
    bool is_here = true;
    for (size_t i = 0; is_here && i < sources.size(); ++i) {
      const at::Tensor* source = plain_tensor(PyTuple_GET_ITEM(args, sources[i]));
      is_here = source != nullptr && lies_where(place.copies[i], *source);
    }
    if (is_here) {
      return &place;
    }
  }
  return nullptr;
}

const at::Tensor& source_at(const Look* look, PyObject* args, size_t i) {
  return THPVariable_Unpack(PyTuple_GET_ITEM(args, (*look->sources)[i]));
}

bool all_fresh(const Look* look, const Place& place, PyObject* args) {
  for (size_t i = 0; i < place.copies.size(); ++i) {
    if (!is_fresh(place.copies[i], source_at(look, args, i))) {
      return false;
    }
  }
  return true;
}

// Compares an element or two of every copy on the CPU with its weight: one place chosen anew,
// rounded, and the place of the last time, whose bits are remembered. Stale copies are left out.
bool samples_agree(Look* look, Place& place, PyObject* args) {
  RECORD_FUNCTION("amp_fx::sample", c10::ArrayRef<const c10::IValue>{});
  const size_t count = place.copies.size();
  static thread_local std::vector<int64_t> chosen; // -1: left out
  chosen.assign(count, -1);
  for (size_t i = 0; i < count; ++i) {
    const Copy* copy = place.copies[i];
    if (!copy->is_sampled || !is_fresh(copy, source_at(look, args, i))) {
      continue;
    }
    chosen[i] = static_cast<int64_t>(
        (static_cast<unsigned __int128>(next_random(look)) * copy->numel) >> 64);
    __builtin_prefetch(copy->source_data + chosen[i] * copy->source_size);
    __builtin_prefetch(copy->low_data + low_index(copy, chosen[i]) * copy->low_size);
    __builtin_prefetch(copy->source_data + std::max<int64_t>(copy->canary_at, 0) * copy->source_size);
  }
  bool agree = true;
  for (size_t i = 0; i < count; ++i) {
    Copy* copy = place.copies[i];
    if (chosen[i] < 0) {
      continue;
    }
    const size_t size = copy->source_size;
    const bool is_same = (copy->canary_at < 0 ||
                          bits_at(copy->source_data, copy->canary_at, size) == copy->canary) &&
        agrees_at(copy, chosen[i]);
    if (!is_same) {
      copy->is_suspect = 1;
      agree = false;
      continue;
    }
    copy->canary_at = chosen[i];
    copy->canary = bits_at(copy->source_data, chosen[i], size);
  }
  return agree;
}

// What a graph is called with: the inputs that it is passed, and its copies but those left out.
PyObject* inputs_of(const Look* look, const Place& place, PyObject* args) {
  const size_t num_passed = look->passed->size();
  PyObject* inputs = PyTuple_New(static_cast<Py_ssize_t>(num_passed + place.copies.size()));
  if (inputs == nullptr) {
    return nullptr;
  }
  size_t position = 0;
  for (Py_ssize_t index : *look->passed) {
    PyTuple_SET_ITEM(inputs, position++, Py_NewRef(PyTuple_GET_ITEM(args, index)));
  }
  for (const Copy* copy : place.copies) {
    PyTuple_SET_ITEM(inputs, position++, Py_NewRef(copy->low));
  }
  return inputs;
}

void begin_call(const Look* look) {
  note_thread();
  num_in_flight++;
  calls.depth++;
  calls.num_impure += look->is_pure ? 0 : 1;
}

PyObject* look_enter(PyObject* self, PyObject* args) {
  HANDLE_TH_ERRORS
  auto* look = reinterpret_cast<Look*>(self);
  look->found_mismatch = 0;
  Place* place = find_place(look, args);
  if (place == nullptr) {
    Py_RETURN_NONE;
  }
  look->found_mismatch = look->samples && !samples_agree(look, *place, args);
  // After the samples: a thread that wrote meanwhile raised `writes` before it wrote.
  if (look->found_mismatch || !all_fresh(look, *place, args)) {
    Py_RETURN_NONE;
  }
  PyObject* inputs = inputs_of(look, *place, args);
  if (inputs != nullptr) {
    for (Copy* copy : place->copies) {
      copy->hits++;
    }
    begin_call(look);
  }
  return inputs;
  END_HANDLE_TH_ERRORS
}

PyObject* look_begin(PyObject* self, PyObject*) {
  begin_call(reinterpret_cast<Look*>(self));
  Py_RETURN_NONE;
}

PyObject* look_leave(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto* look = reinterpret_cast<Look*>(self);
  num_in_flight--;
  calls.depth--;
  calls.num_impure -= look->is_pure ? 0 : 1;
  if (calls.depth == 0 && !calls.asked.empty()) {
    for (const RecordRef& record : calls.asked) {
      auto storage = record->storage.lock();
      // While it was unwatched another thread may have written: with others, it counts as one.
      if (storage && (num_threads > 1 || !arm(storage.get()))) {
        note_write(*record);
      }
    }
    calls.asked.clear();
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

struct Stale {
  Copy* copy;
  at::Tensor source;
  uint64_t writes;
  int64_t version;
};

// Whether somebody may be reading a low tensor: another call, or a backward that saved it, as
// a tensor, as a view or (AOTAutograd, without version checks) as a Python object.
bool is_in_use(const Copy* copy) {
  const at::Tensor& low = low_of(copy);
  return num_in_flight > 0 || Py_REFCNT(copy->low) > 1 || low.use_count() > 1 ||
      low.storage().use_count() > 1;
}

// How many elements one launch of a kernel for two lists takes: 320 blocks of 65,536
// (ATen/native/cuda/MultiTensorApply.cuh). A larger tensor is one launch only if copied by itself.
constexpr int64_t kMostOfOneLaunch = 320 * 65536;

// A list in which one pair differs in strides would be copied tensor by tensor.
void copy_all(const std::vector<at::Tensor>& lows, const std::vector<at::Tensor>& sources) {
  std::vector<at::Tensor> alike_lows, alike_sources;
  for (size_t i = 0; i < lows.size(); ++i) {
    const bool fits = lows[i].is_cpu() || lows[i].numel() < kMostOfOneLaunch;
    if (fits && lows[i].strides() == sources[i].strides()) {
      alike_lows.push_back(lows[i]);
      alike_sources.push_back(sources[i]);
    } else {
      lows[i].copy_(sources[i]);
    }
  }
  if (!alike_lows.empty()) {
    at::_foreach_copy_(alike_lows, alike_sources, /*non_blocking=*/false);
  }
}

void make_again(std::vector<Stale>& stale, bool makes_new) {
  RECORD_FUNCTION("amp_fx::refresh", c10::ArrayRef<const c10::IValue>{});
  std::vector<at::Tensor> lows, sources;
  for (auto& item : stale) {
    const at::Tensor& low = low_of(item.copy);
    const bool is_kept = !makes_new && !is_in_use(item.copy);
    lows.push_back(is_kept ? low : at::empty_strided(low.sizes(), low.strides(), low.options()));
    sources.push_back(item.source);
  }
  {
    pybind11::gil_scoped_release no_gil;
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    copy_all(lows, sources);
  }
  for (size_t i = 0; i < stale.size(); ++i) {
    Copy* copy = stale[i].copy;
    if (copy->low == nullptr) { // dropped meanwhile
      continue;
    }
    if (!lows[i].is_same(low_of(copy))) {
      set_low(copy, THPVariable_Wrap(lows[i]));
    }
    note_made(copy, stale[i].writes, stale[i].version);
  }
}

void watch_again(const Place& place) {
  for (Copy* copy : place.copies) {
    watch_again(copy);
  }
}

// refresh(args, may_arm, makes_new) -> (inputs, number made) | None where the place is not known.
PyObject* look_refresh(PyObject* self, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject* args = nullptr;
  int may_arm = 1, makes_new = 0;
  if (!PyArg_ParseTuple(arguments, "O!pp", &PyTuple_Type, &args, &may_arm, &makes_new)) {
    return nullptr;
  }
  auto* look = reinterpret_cast<Look*>(self);
  Place* found = find_place(look, args);
  if (found == nullptr) {
    Py_RETURN_NONE;
  }
  const HeldPlace held(*found); // the other may move while the GIL is released
  const Place& place = held.place;
  if (may_arm) {
    watch_again(place);
  }
  std::vector<Stale> stale;
  std::unordered_set<Copy*> listed;
  for (size_t i = 0; i < place.copies.size(); ++i) {
    Copy* copy = place.copies[i];
    const at::Tensor& source = source_at(look, args, i);
    if (is_fresh(copy, source)) {
      copy->hits++;
    } else if (copy->is_alias) {
      copy->seen = (*copy->record)->writes;
    } else if (listed.insert(copy).second) {
      stale.push_back({copy, source, (*copy->record)->writes, version_of(source)});
    }
  }
  if (!stale.empty()) {
    make_again(stale, makes_new);
  }
  PyObject* inputs = inputs_of(look, place, args);
  if (inputs == nullptr) {
    return nullptr;
  }
  return Py_BuildValue("Nn", inputs, static_cast<Py_ssize_t>(stale.size()));
  END_HANDLE_TH_ERRORS
}

bool is_dead(const Place& place) {
  for (const Copy* copy : place.copies) {
    if (copy->low == nullptr) {
      return true;
    }
  }
  return false;
}

void release(std::vector<Place> places) {
  for (auto& place : places) {
    for (Copy* copy : place.copies) {
      Py_DECREF(copy);
    }
  }
}

PyObject* look_remember(PyObject* self, PyObject* copies) {
  HANDLE_TH_ERRORS
  auto* look = reinterpret_cast<Look*>(self);
  Place place;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(copies); ++i) {
    place.copies.push_back(reinterpret_cast<Copy*>(Py_NewRef(PyTuple_GET_ITEM(copies, i))));
  }
  std::vector<Place> kept, gone;
  const bool is_full = look->places->size() >= max_places;
  for (auto& known : *look->places) {
    (is_full || is_dead(known) || known.copies == place.copies ? gone : kept)
        .push_back(std::move(known));
  }
  kept.push_back(std::move(place));
  *look->places = std::move(kept);
  release(std::move(gone));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* look_forget(PyObject* self, PyObject*) {
  auto* look = reinterpret_cast<Look*>(self);
  std::vector<Place> gone;
  gone.swap(*look->places);
  release(std::move(gone));
  Py_RETURN_NONE;
}

std::vector<Py_ssize_t>* indices_of(PyObject* tuple) {
  auto* indices = new std::vector<Py_ssize_t>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    indices->push_back(PyLong_AsSsize_t(PyTuple_GET_ITEM(tuple, i)));
  }
  return indices;
}

PyObject* look_new(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *sources = nullptr, *passed = nullptr;
  int is_pure = 0, samples = 0;
  if (!PyArg_ParseTuple(
          args, "O!O!pp", &PyTuple_Type, &sources, &PyTuple_Type, &passed, &is_pure, &samples)) {
    return nullptr;
  }
  auto* look = reinterpret_cast<Look*>(type->tp_alloc(type, 0));
  if (look == nullptr) {
    return nullptr;
  }
  look->sources = indices_of(sources);
  look->passed = indices_of(passed);
  look->places = new std::vector<Place>();
  look->is_pure = static_cast<char>(is_pure);
  look->samples = static_cast<char>(samples);
  look->random = static_cast<uint64_t>(now()) | 1;
  return reinterpret_cast<PyObject*>(look);
  END_HANDLE_TH_ERRORS
}

void look_dealloc(PyObject* self) {
  auto* look = reinterpret_cast<Look*>(self);
  PyTypeObject* type = Py_TYPE(self);
  Py_DECREF(look_forget(self, nullptr));
  delete look->sources;
  delete look->passed;
  delete look->places;
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* look_get_mismatch(PyObject* self, void*) {
  return PyBool_FromLong(reinterpret_cast<Look*>(self)->found_mismatch);
}

PyMethodDef look_methods[] = {
    {"enter", look_enter, METH_O, "The inputs of a call that finds all fresh, or None."},
    {"begin", look_begin, METH_NOARGS, "What a successful enter does besides."},
    {"leave", look_leave, METH_NOARGS, "Ends what enter or begin began."},
    {"refresh", look_refresh, METH_VARARGS, "Makes stale copies again."},
    {"remember", look_remember, METH_O, "Takes the copies of a new place."},
    {"forget", look_forget, METH_NOARGS, "Knows no place any more."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef look_getset[] = {
    {"found_mismatch", look_get_mismatch, nullptr, "Whether a sample differed.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot look_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(look_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(look_dealloc)},
    {Py_tp_methods, look_methods},
    {Py_tp_getset, look_getset},
    {0, nullptr}};
PyType_Spec look_spec = {"amp_fx_watch.Look", sizeof(Look), 0, Py_TPFLAGS_DEFAULT, look_slots};

// ------------------------------------------------------- steps that write copies with weights

// begin_step(copies, makes_new) -> ((copy, low, writes), ...): a step is about to write the weights
// of these copies through aliases, of which their storages learn nothing, and the copies with them.
// It takes the weights for written, and gives the tensors to write the copies to: theirs, or new
// ones where somebody may be reading those; None for an alias. Who holds such a tensor keeps other
// threads from making the copy again in it.
PyObject* begin_step(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject* copies = nullptr;
  int makes_new = 0;
  if (!PyArg_ParseTuple(arguments, "O!p", &PyTuple_Type, &copies, &makes_new)) {
    return nullptr;
  }
  const Py_ssize_t count = PyTuple_GET_SIZE(copies);
  std::vector<PyObject*> lows;
  std::unordered_set<Record*> marked;
  for (Py_ssize_t i = 0; i < count; ++i) {
    auto* copy = reinterpret_cast<Copy*>(PyTuple_GET_ITEM(copies, i));
    watch_again(copy);
    if (marked.insert(copy->record->get()).second) {
      note_write(**copy->record);
    }
    if (copy->is_alias) {
      lows.push_back(Py_NewRef(Py_None));
    } else if (makes_new || is_in_use(copy)) {
      const at::Tensor& low = low_of(copy);
      lows.push_back(
          THPVariable_Wrap(at::empty_strided(low.sizes(), low.strides(), low.options())));
    } else {
      lows.push_back(Py_NewRef(copy->low));
    }
  }
  PyObject* tickets = PyTuple_New(count);
  for (Py_ssize_t i = 0; i < count; ++i) { // once all is marked: storages may be shared
    auto* copy = reinterpret_cast<Copy*>(PyTuple_GET_ITEM(copies, i));
    const auto writes = static_cast<unsigned long long>((*copy->record)->writes);
    PyTuple_SET_ITEM(tickets, i, Py_BuildValue("ONK", copy, lows[i], writes));
  }
  return tickets;
  END_HANDLE_TH_ERRORS
}

// end_step(tickets, weights): it has. A copy is fresh from here on unless its weight was written
// otherwise meanwhile; steps on the same weights at once are such writes to each other.
PyObject* end_step(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *tickets = nullptr, *weights = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!O!", &PyTuple_Type, &tickets, &PyTuple_Type, &weights)) {
    return nullptr;
  }
  struct Written {
    Copy* copy;
    PyObject* low;
    const at::Tensor* weight;
    bool is_valid;
  };
  std::vector<Written> all;
  std::unordered_set<Record*> records;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tickets); ++i) {
    Copy* copy = nullptr;
    PyObject* low = nullptr;
    unsigned long long writes = 0;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tickets, i), "OOK", &copy, &low, &writes)) {
      return nullptr;
    }
    const at::Tensor& weight = THPVariable_Unpack(PyTuple_GET_ITEM(weights, i));
    const bool is_valid = writes == (*copy->record)->writes && lies_where(copy, weight);
    all.push_back({copy, low, &weight, is_valid});
    records.insert(copy->record->get());
  }
  for (Record* record : records) {
    note_write(*record);
  }
  for (const Written& written : all) {
    if (!written.is_valid) {
      continue;
    }
    Copy* copy = written.copy;
    if (copy->is_alias) {
      copy->seen = (*copy->record)->writes;
      continue;
    }
    if (written.low != copy->low) {
      set_low(copy, Py_NewRef(written.low));
    }
    note_made(copy, (*copy->record)->writes, version_of(*written.weight));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// ------------------------------------------------------------------------ functions on tensors

PyObject* watch(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  const at::Tensor& tensor = THPVariable_Unpack(object);
  const auto storage = tensor.storage().getWeakStorageImpl().lock();
  if (!is_own(*storage)) {
    Py_RETURN_FALSE;
  }
  const bool was_armed = is_armed(storage.get());
  RecordRef record = record_of(storage);
  if (!was_armed) {
    note_write(*record);
  }
  return PyBool_FromLong(arm(storage.get()));
  END_HANDLE_TH_ERRORS
}

PyObject* unwatch(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  StorageImpl* storage = THPVariable_Unpack(object).storage().unsafeGetStorageImpl();
  if (is_armed(storage)) {
    disarm(storage);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* watched(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(is_armed(THPVariable_Unpack(object).storage().unsafeGetStorageImpl()));
  END_HANDLE_TH_ERRORS
}

void mark_written(const std::vector<at::Tensor>& tensors) {
  std::lock_guard<std::mutex> guard(records_mutex());
  const auto& known = records();
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.has_storage()) {
      const auto found = known.find(tensor.storage().unsafeGetStorageImpl());
      if (found != known.end()) {
        note_write(*found->second);
      }
    }
  }
}

PyObject* mark(PyObject*, PyObject* list) {
  HANDLE_TH_ERRORS
  std::vector<at::Tensor> tensors;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    PyObject* item = PyList_GET_ITEM(list, i);
    if (THPVariable_Check(item)) {
      tensors.push_back(THPVariable_Unpack(item));
    }
  }
  mark_written(tensors);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// stands_for(whole, part): what is said of a DTensor, also by ops that write lists, is said of its
// part in this process. Its own storage, which holds nothing, tells which DTensor that is.
PyObject* stands_for(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *whole = nullptr, *part = nullptr;
  if (!PyArg_ParseTuple(arguments, "OO", &whole, &part)) {
    return nullptr;
  }
  const at::Tensor& tensor = THPVariable_Unpack(whole);
  if (tensor.has_storage()) {
    const RecordRef record = record_of(THPVariable_Unpack(part).storage().getWeakStorageImpl().lock());
    std::lock_guard<std::mutex> guard(records_mutex());
    records()[tensor.storage().unsafeGetStorageImpl()] = record;
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// The same bytes as a weight's in a storage of its own: who asks it for a pointer does not ask
// the weight's. It keeps the weight's storage alive and has the weight's version.
PyObject* alias(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  const at::Tensor& source = THPVariable_Unpack(object);
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
    torch::autograd::impl::set_version_counter(
        result, torch::autograd::impl::version_counter(source));
  }
  return THPVariable_Wrap(std::move(result));
  END_HANDLE_TH_ERRORS
}

// ------------------------------------------------------------ kernels on ops that write lists

// A CUDA kernel of such an op takes pointers that it calls constant, and asks no storage.
using Written = std::vector<size_t>; // positions of the arguments that an op writes
std::unordered_map<std::string, Written>& list_ops() {
  static auto* map = new std::unordered_map<std::string, Written>();
  return *map;
}

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

void list_kernel(
    const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  std::vector<at::Tensor> written;
  for (size_t index : list_ops().at(full_name(op.operator_name()))) {
    if ((*stack)[first + index].isTensorList()) {
      for (at::Tensor& tensor : (*stack)[first + index].toTensorVector()) {
        written.push_back(std::move(tensor));
      }
    }
  }
  mark_written(written);
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  if (num_threads > 1) { // one may have looked meanwhile
    mark_written(written);
  }
}

// Names all ops that write lists of tensors, and puts a kernel in front of each.
PyObject* watch_list_ops(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  static torch::Library* library = nullptr;
  if (library != nullptr) {
    Py_RETURN_NONE;
  }
  library = new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::ADInplaceOrView, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0) {
      continue;
    }
    Written found;
    const auto& arguments = op->schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* written = arguments[i].alias_info();
      const bool is_list = arguments[i].type()->kind() == c10::TypeKind::ListType;
      if (is_list && written != nullptr && written->isWrite() && !arguments[i].is_out()) {
        found.push_back(i);
      }
    }
    if (found.empty()) {
      continue;
    }
    const std::string full = full_name(name);
    list_ops()[full] = found;
    library->impl(
        full.substr(std::string("aten::").size()).c_str(),
        torch::CppFunction::makeFromBoxedFunction<&list_kernel>());
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
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
    {"watch", watch, METH_O, "Watches a tensor's storage; False where that is impossible."},
    {"unwatch", unwatch, METH_O, "Watches it no longer."},
    {"watched", watched, METH_O, "Whether a write would be noticed, and none was."},
    {"mark", mark, METH_O, "Says that the tensors of a list were written."},
    {"stands_for", stands_for, METH_VARARGS, "What is said of a DTensor is said of its part."},
    {"alias", alias, METH_O, "The same bytes in a storage of its own."},
    {"begin_step", begin_step, METH_VARARGS, "Where a step writes copies with their weights."},
    {"end_step", end_step, METH_VARARGS, "Takes what it wrote for the copies."},
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
  num_in_flight = calls.depth; // other threads are not there
  num_threads = participation.is_counted ? 1 : 0;
  records_mutex().unlock();
}
#endif

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "amp_fx_watch", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

bool add_type(PyObject* module, const char* name, PyType_Spec* spec) {
  PyObject* type = PyType_FromSpec(spec);
  return type != nullptr && PyModule_AddObject(module, name, type) == 0;
}

} // namespace

PyMODINIT_FUNC PyInit_amp_fx_watch() {
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr || !add_type(module, "Copy", &copy_spec) ||
      !add_type(module, "Look", &look_spec)) {
    return nullptr;
  }
  PyModule_AddIntConstant(module, "has_hook", HAS_HOOK);
#ifndef _WIN32
  pthread_atfork(before_fork, after_fork, after_fork_in_child);
#endif
  return module;
}
